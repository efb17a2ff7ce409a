"""The trainer: it learns, refuses updates that would destroy the weights, and resumes bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rillflow.errors import TrainingError
from rillflow.formulas.config import MOST_LOGITS, PolicyLossConfig
from rillflow.formulas.logprobs import HeadLogits
from rillflow.records.batch import Batch
from rillflow.sharding.mesh import RankGroups
from rillflow.sharding.module import Parallel
from rillflow.sharding.packed_rows import lay_out
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, SupervisedLoss
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import SingleRank

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]
POLICY_BY_ENTROPY = PolicyLoss(PolicyLossConfig(entropy=0.1), max_tokens=16)
POLICY = PolicyLoss(PolicyLossConfig(), max_tokens=16)


def weights(module: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def on_policy(trainer: Trainer, rows: Batch, temperature: float = 1.0) -> Batch:
    return rows.with_fields(sampler_logprobs=trainer.scorer.logprobs(rows, temperature))


def test_supervised_training_learns_its_rows(module: PreTrainedModel, make_rows: MakeRows) -> None:
    trainer = Trainer(module, TrainConfig(lr=1e-2), total_steps=60)
    rows = make_rows(samples=1)
    losses = [trainer.update(rows, SupervisedLoss())["supervised/nll/mean"].value for _ in range(60)]
    assert losses[0] > 3
    assert losses[-1] < 0.1
    last = trainer.update(rows, SupervisedLoss())
    assert last["supervised/accuracy/mean"].value == 1.0
    assert last["supervised/loss/mean"].value == pytest.approx(last["supervised/nll/mean"].value, rel=1e-5)


def test_a_policy_step_raises_what_had_advantage(module: PreTrainedModel, make_rows: MakeRows) -> None:
    trainer = Trainer(module, TrainConfig(lr=1e-3), total_steps=10)
    rows = on_policy(trainer, make_rows(samples=4).with_fields(advantages=torch.tensor([1.0, -1.0] * 4)))
    before = trainer.scorer.logprobs(rows).sums()
    metrics = trainer.update(rows, POLICY, ratio_tolerance=1e-5)
    change = trainer.scorer.logprobs(rows).sums() - before
    assert bool((change[0::2] > 0).all()) and bool((change[1::2] < 0).all())
    assert metrics["policy/ratio/mean"].value == 1.0
    assert metrics["mismatch/logprob_gap/max"].value < 1e-6
    assert metrics["mismatch/first_ratio/max"].value < 1e-6
    assert metrics["train/lr/mean"].value == 1e-3
    sampled = on_policy(trainer, rows).ragged("sampler_logprobs")
    off = rows.with_fields(sampler_logprobs=sampled.with_values(sampled.values - 1e-3))
    found = trainer.update(off, POLICY, ratio_tolerance=1.0)["mismatch/first_ratio/max"].value
    assert found == pytest.approx(math.expm1(1e-3), rel=1e-2)
    assert "mismatch/first_ratio/max" not in trainer.update(off, POLICY)


@pytest.mark.parametrize("budget", [1, 30])
def test_micro_batches_change_nothing(make_module: MakeModule, make_rows: MakeRows, budget: int) -> None:
    found = []
    for tokens in (budget, 16384):
        trainer = Trainer(
            module := make_module(), TrainConfig(lr=1e-3, tokens_per_micro_batch=tokens), total_steps=9
        )
        rows = on_policy(trainer, make_rows(samples=5))
        metrics = trainer.update(rows, POLICY)
        found.append((weights(module), {name: metric.value for name, metric in metrics.items()}))
    gap = "mismatch/logprob_gap/max"  # rounding, which the number of packed rows changes
    assert found[0][1].pop(gap) < 1e-5 > found[1][1].pop(gap)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4, abs=1e-6)
    for name, weight in found[0][0].items():
        torch.testing.assert_close(weight, found[1][0][name], rtol=1e-4, atol=2e-5)


class EveryRow(PolicyLoss):
    """The policy loss, also trained on rows without a gradient."""

    def prepare(self, minibatch: Batch) -> Batch:
        rows = super().prepare(minibatch)
        return rows.with_fields(loss_active=torch.ones(len(rows), dtype=torch.bool))


def test_rows_without_advantage_are_measured_and_change_nothing(
    make_module: MakeModule, make_rows: MakeRows
) -> None:
    """Flat groups cost no backward pass; weights and metrics equal those of training on every row."""
    advantages = torch.tensor([1.0, -0.5, -0.5, 0.0, 0.0, 0.0])
    found = []
    for loss in (POLICY, EveryRow(PolicyLossConfig(), max_tokens=16)):
        trainer = Trainer(module := make_module(), TrainConfig(lr=1e-3), total_steps=9)
        rows = on_policy(trainer, make_rows(samples=3).with_fields(advantages=advantages))
        metrics = trainer.update(rows, loss, ratio_tolerance=1e-5)
        found.append((weights(module), {name: metric.value for name, metric in metrics.items()}))
    assert POLICY.prepare(rows).dense("loss_active").tolist() == [True] * 3 + [False] * 3
    for gap in ("mismatch/logprob_gap/max", "mismatch/first_ratio/max"):  # rounding: packing changes it
        assert found[0][1].pop(gap) < 1e-5 > found[1][1].pop(gap)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4, abs=1e-6)
    for name, weight in found[0][0].items():
        torch.testing.assert_close(weight, found[1][0][name], rtol=1e-4, atol=2e-5)


def test_without_any_advantage_the_weights_stay_and_the_step_counts(
    module: PreTrainedModel, make_rows: MakeRows
) -> None:
    trainer = Trainer(module, TrainConfig(lr=1e-2), total_steps=9)
    trainer.update(make_rows(), SupervisedLoss())
    rows = on_policy(trainer, make_rows().with_fields(advantages=torch.zeros(6)))
    before = weights(module)
    metrics = trainer.update(rows, POLICY, ratio_tolerance=1e-5)
    assert same(weights(module), before)
    assert metrics["train/grad_norm/mean"].value == 0
    assert metrics["policy/entropy/mean"].count == float(rows.ragged("loss_mask").sums().sum())  # type: ignore[union-attr]
    assert trainer.optimizer.steps == 2


@pytest.mark.parametrize("settings", [{"entropy": 0.1}, {"kl": 0.1}])
def test_with_entropy_or_divergence_every_row_is_trained_on(
    make_rows: MakeRows, settings: dict[str, float]
) -> None:
    rows = make_rows().with_fields(advantages=torch.zeros(6))
    zeros = rows.ragged("tokens").with_values(torch.zeros(len(rows.ragged("tokens").values)))
    rows = rows.with_fields(sampler_logprobs=zeros, reference_logprobs=zeros)
    active = PolicyLoss(PolicyLossConfig(**settings)).prepare(rows).dense("loss_active")
    assert active.tolist() == [True] * 6


def test_the_temperature_is_that_of_sampling(module: PreTrainedModel, make_rows: MakeRows) -> None:
    trainer = Trainer(module, TrainConfig(), total_steps=1)
    rows = on_policy(trainer, make_rows(), temperature=0.7)
    with pytest.raises(TrainingError, match="not on-policy"):
        trainer.update(rows, POLICY, temperature=1.0, ratio_tolerance=1e-5)
    trainer.update(rows, POLICY, temperature=0.7, ratio_tolerance=1e-5)


def test_on_policy_ratio_that_is_broken_names_row_token_and_both_numbers(
    module: PreTrainedModel, make_rows: MakeRows
) -> None:
    trainer = Trainer(module, TrainConfig(tokens_per_micro_batch=20), total_steps=1)
    rows = on_policy(trainer, make_rows(prompts=(5, 3), samples=3))
    column = rows.ragged("sampler_logprobs")
    place = int(column.bounds[5]) - 1  # the last token of row 4
    values = column.values.clone()
    true = float(values[place])
    values[place] += 2e-4
    before = weights(module)
    with pytest.raises(TrainingError) as caught:
        trainer.update(
            rows.with_fields(sampler_logprobs=column.with_values(values)), POLICY, ratio_tolerance=1e-5
        )
    token = int(rows.ragged("tokens").values[place])
    where = f"token {int(column.positions[place])} (id {token}) of row (epoch 0 prompt 1 sample 1)"
    assert where in caught.value.what
    assert f"{true:.5g}"[:6] in caught.value.what
    assert "0.0002, more than 1e-05" in caught.value.why
    assert same(weights(module), before)
    trainer.update(rows, POLICY, ratio_tolerance=1e-5)  # nothing is left of the refused one


def poison(module: PreTrainedModel, token: int) -> None:
    with torch.no_grad():
        module.get_input_embeddings().weight[token] = math.nan


def test_a_loss_that_is_not_finite_names_row_and_token_and_changes_nothing(
    make_module: MakeModule, make_rows: MakeRows
) -> None:
    trainer = Trainer(module := make_module(tie_word_embeddings=False), TrainConfig(), total_steps=2)
    rows = make_rows(prompts=(5, 3), samples=1, longest=4)
    trainer.update(rows, SupervisedLoss())
    first = int(rows.ragged("tokens").rows()[1][0])
    poison(module, first)
    before, state = weights(module), {k: v.clone() for k, v in trainer.optimizer.state().items()}
    with pytest.raises(
        TrainingError, match=r"loss is nan: token 3 \(id \d+\) of row \(epoch 0 prompt 1 sample 0\)"
    ):
        trainer.update(rows, SupervisedLoss())
    after = weights(module)
    assert all(torch.equal(before[name], after[name]) or "embed" in name for name in before)
    assert same(state, trainer.optimizer.state())
    assert trainer.optimizer.steps == 1
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_gradient_that_is_not_finite_names_the_parameter(
    module: PreTrainedModel, make_rows: MakeRows
) -> None:
    trainer = Trainer(module, TrainConfig(lr=1e-2), total_steps=2)
    rows = make_rows()
    before = weights(module)
    handle = module.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingError, match=r"gradient's norm is (nan|inf): first in model.norm.weight"):
        trainer.update(rows, SupervisedLoss())
    assert same(weights(module), before)
    assert trainer.optimizer.state().keys() == {"counter/step"}
    handle.remove()
    trainer.update(rows, SupervisedLoss())
    assert not same(weights(module), before)


def test_gradients_are_scaled_down_to_the_norm(make_module: MakeModule, make_rows: MakeRows) -> None:
    seen: dict[float, Tensor] = {}
    for limit in (1e9, 1e-3):
        module = make_module()
        trainer = Trainer(module, TrainConfig(max_grad_norm=limit), total_steps=1)
        norms: list[Tensor] = []
        metrics = trainer.update(make_rows(), SupervisedLoss())
        moments = trainer.optimizer.state()
        norms = [moments[name] / (1 - 0.9) for name in moments if name.startswith("exp_avg/")]
        seen[limit] = torch.cat([norm.flatten() for norm in norms]).norm()
        assert metrics["train/grad_norm/mean"].value == pytest.approx(float(seen[1e9]), rel=1e-4)
    assert float(seen[1e-3]) == pytest.approx(1e-3, rel=1e-3)


def test_decay_touches_matrices_alone(module: PreTrainedModel, make_rows: MakeRows) -> None:
    config = TrainConfig(lr=1e-2, weight_decay=10.0, max_grad_norm=1e-30)
    before = weights(module)
    Trainer(module, config, total_steps=1).update(make_rows(), SupervisedLoss())
    for name, weight in weights(module).items():
        share = 0.9 if weight.dim() >= 2 else 1.0
        torch.testing.assert_close(weight, share * before[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_trainer_goes_on_bit_for_bit(
    make_module: MakeModule, make_rows: MakeRows, tmp_path: Path, dtype: torch.dtype
) -> None:
    config = TrainConfig(lr=1e-3, schedule="cosine", warmup_steps=2, weight_decay=0.1)
    module = make_module(dtype=dtype)
    trainer = Trainer(module, config, total_steps=6)
    for step in range(3):
        trainer.update(make_rows(seed=step), SupervisedLoss())
    save_file(
        {name: t.contiguous() for name, t in trainer.optimizer.state().items()},
        tmp_path / "state.safetensors",
    )
    save_file(weights(module), tmp_path / "weights.safetensors")
    other = make_module(seed=9, dtype=dtype)
    resumed = Trainer(other, config, total_steps=6)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False)
    resumed.optimizer.load_state(load_file(tmp_path / "state.safetensors"))
    for step in range(3, 6):
        one = trainer.update(make_rows(seed=step), SupervisedLoss())
        two = resumed.update(make_rows(seed=step), SupervisedLoss())
        assert one == two
    assert same(weights(module), weights(other))
    assert same(trainer.optimizer.state(), resumed.optimizer.state())
    assert resumed.optimizer.steps == 6


def test_small_steps_are_not_lost_in_bfloat16(make_module: MakeModule, make_rows: MakeRows) -> None:
    rows = make_rows(samples=1)
    module = make_module(dtype=torch.bfloat16)
    trainer = Trainer(module, TrainConfig(lr=1e-5), total_steps=100)
    start = {name: weight.float() for name, weight in weights(module).items()}
    for _ in range(3):
        trainer.update(rows, SupervisedLoss())
    moments = trainer.optimizer.state()
    masters = {name.removeprefix("master/"): t for name, t in moments.items() if name.startswith("master/")}
    assert masters.keys() == start.keys()
    moved = torch.cat([(masters[name] - start[name]).flatten().abs() for name in start])
    visible = torch.cat([(weights(module)[name].float() - start[name]).flatten() for name in start])
    assert float((moved > 2e-5).float().mean()) > 0.5
    assert float((visible == 0).float().mean()) > 0.9  # without masters, these steps would be lost
    for name, weight in weights(module).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, masters[name].bfloat16())


def test_bfloat16_gradients_add_up_in_float32(make_module: MakeModule, make_rows: MakeRows) -> None:
    rows = make_rows(prompts=(5, 3, 4), samples=5)
    found = []
    for tokens in (1, 16384):
        trainer = Trainer(
            make_module(dtype=torch.bfloat16), TrainConfig(tokens_per_micro_batch=tokens), total_steps=1
        )
        trainer.update(rows, SupervisedLoss())
        moments = trainer.optimizer.state()
        found.append(torch.cat([m.flatten() for name, m in moments.items() if name.startswith("exp_avg/")]))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.02


def test_logits_of_a_large_vocabulary_are_made_in_slices(
    make_module: MakeModule, make_rows: MakeRows
) -> None:
    size = {"vocab_size": 300_000, "hidden_size": 8, "num_hidden_layers": 1, "tie_word_embeddings": True}
    rows = make_rows(prompts=(2,), samples=40, longest=12)
    mask = rows.ragged("loss_mask")
    assert int(mask.values.sum()) * size["vocab_size"] > MOST_LOGITS
    rows = rows.with_fields(sampler_logprobs=mask.with_values(torch.zeros(mask.values.shape)))
    states, kept = [], []
    for budget in (16_384, 60):  # all tokens at once, and parts whose logits are few enough to hold
        trainer = Trainer(make_module(**size), TrainConfig(tokens_per_micro_batch=budget), total_steps=1)
        largest = [0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, largest=largest: largest.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            loss = trainer.update(rows, POLICY_BY_ENTROPY)["policy/loss/mean"].value
        states.append({**trainer.optimizer.state(), "loss": torch.tensor(loss)})
        kept.append(max(largest))
    assert kept[0] == size["vocab_size"] * 8 < kept[1], "the head's weight is the largest that is kept"
    for name, found in states[0].items():
        most = float(states[1][name].abs().max())
        torch.testing.assert_close(found, states[1][name], rtol=0, atol=1e-4 * most)


def nodes(output: Tensor) -> set[str]:
    """Return the names of all nodes of a backward pass from here."""
    found, left = dict[Any, str](), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            left += [following for following, _ in node.next_functions]
    return set(found.values())


@pytest.mark.parametrize("many", [True, False], ids=["in slices", "at once"])
def test_states_that_rows_share_gather_their_gradients_in_order(
    module: PreTrainedModel, make_rows: MakeRows, many: bool
) -> None:
    """Several threads add up the gradient of a repeated index, in no fixed order."""
    parallel = Parallel(module, RankGroups.whole(SingleRank()), most_logits=1 if many else MOST_LOGITS)
    rows = make_rows(samples=4)
    reading = lay_out(rows, torch.device("cpu"), back=1)
    assert len(reading.wanted.unique()) < len(reading.wanted)
    output = parallel.outputs(rows, back=1)
    found = nodes(output.hidden if isinstance(output, HeadLogits) else output)
    assert any("IndexSelect" in name for name in found)
    assert not any(name.startswith("IndexBackward") for name in found)
    states = module(**reading.inputs).logits[0][reading.wanted]
    if not isinstance(output, HeadLogits):
        torch.testing.assert_close(output, states)


def test_recomputed_activations_give_the_same_step(make_module: MakeModule, make_rows: MakeRows) -> None:
    found = []
    for recompute in (False, True):
        module = make_module()
        trainer = Trainer(module, TrainConfig(lr=1e-3, gradient_checkpointing=recompute), total_steps=1)
        trainer.update(make_rows(), SupervisedLoss())
        assert not module.training
        found.append(weights(module))
    assert same(*found)


def test_a_state_of_another_module_is_refused(make_module: MakeModule, make_rows: MakeRows) -> None:
    trainer = Trainer(make_module(), TrainConfig(), total_steps=1)
    trainer.update(make_rows(), SupervisedLoss())
    state = trainer.optimizer.state()
    deeper = Trainer(make_module(num_hidden_layers=1), TrainConfig(), total_steps=1)
    with pytest.raises(TrainingError, match=r"has '(step|exp_avg|exp_avg_sq)/model.layers.1"):
        deeper.optimizer.load_state(state)
    wider = Trainer(make_module(intermediate_size=96), TrainConfig(), total_steps=1)
    with pytest.raises(TrainingError, match=r"shape \[64, 32\] in the training state and \[96, 32\] here"):
        wider.optimizer.load_state(state)
    narrow = Trainer(make_module(dtype=torch.bfloat16), TrainConfig(), total_steps=1)
    with pytest.raises(TrainingError, match="lacks 'master/"):
        narrow.optimizer.load_state(state)


def test_a_frozen_module_cannot_be_trained(module: PreTrainedModel) -> None:
    module.requires_grad_(False)
    with pytest.raises(TrainingError, match="no parameter that requires a gradient"):
        Trainer(module, TrainConfig(), total_steps=1)


def test_frozen_parameters_stay(module: PreTrainedModel, make_rows: MakeRows) -> None:
    module.model.embed_tokens.requires_grad_(False)
    before = weights(module)
    trainer = Trainer(module, TrainConfig(lr=1e-2), total_steps=1)
    trainer.update(make_rows(), SupervisedLoss())
    changed = {name for name, weight in weights(module).items() if not torch.equal(weight, before[name])}
    assert "model.embed_tokens.weight" not in changed
    assert "model.norm.weight" in changed
    assert not any("embed_tokens" in name for name in trainer.optimizer.state())
