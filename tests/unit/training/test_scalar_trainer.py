"""The trainer of a scalar head: it fits, refuses bad updates without change, and resumes bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rillflow.errors import TrainingError
from rillflow.formulas.config import ValueLossConfig
from rillflow.records.batch import Batch
from rillflow.training.answers import PairLoss
from rillflow.training.config import TrainConfig
from rillflow.training.loss import TokenLoss, ValueLoss
from rillflow.training.trainer import Trainer

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]
VALUE = ValueLoss(ValueLossConfig())


def weights(module: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def with_returns(rows: Batch) -> Batch:
    column = rows.ragged("tokens")
    drawn = torch.randn(len(column.values), generator=torch.Generator().manual_seed(2))
    return rows.with_fields(
        returns=column.with_values(drawn), old_values=column.with_values(torch.zeros_like(drawn))
    )


def test_values_fit_their_returns(make_scalar: MakeModule, make_rows: MakeRows) -> None:
    """Answers with a common prefix share its values, so each row has its own prompt here."""
    trainer = Trainer(make_scalar(), TrainConfig(lr=1e-2), total_steps=80)
    rows = with_returns(make_rows(prompts=(5, 3, 4, 6), samples=1))
    plain = ValueLoss(ValueLossConfig(clip=0))
    found = [trainer.update(rows, plain) for _ in range(80)]
    first, last = found[0], found[-1]
    assert first["critic/squared_error/mean"].value > 0.5
    assert last["critic/squared_error/mean"].value < 0.02 * last["critic/return/variance"].value
    assert last["critic/loss/mean"].value == pytest.approx(last["critic/squared_error/mean"].value / 2)
    mask = rows.ragged("loss_mask").values
    gap = (trainer.scorer.values(rows).values - rows.ragged("returns").values)[mask]
    assert float(gap.abs().mean()) < 0.2


def test_preferred_rows_rise_above_their_partners(make_scalar: MakeModule, make_rows: MakeRows) -> None:
    trainer = Trainer(make_scalar(), TrainConfig(lr=1e-3), total_steps=30)
    rows = make_rows(prompts=(5, 3, 4, 6), samples=2)
    losses = [trainer.update(rows, PairLoss())["preference/loss/mean"].value for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]
    scores = trainer.scorer.scores(rows)
    assert bool((scores[0::2] > scores[1::2]).all())


@pytest.mark.parametrize("loss", [VALUE, PairLoss()], ids=["value", "preference"])
@pytest.mark.parametrize("budget", [1, 30])
def test_micro_batches_change_nothing_in_float64(
    make_exact: MakeModule, make_rows: MakeRows, loss: TokenLoss | PairLoss, budget: int
) -> None:
    found = []
    for tokens in (budget, 16384):
        module = make_exact()
        trainer = Trainer(module, TrainConfig(lr=1e-3, tokens_per_micro_batch=tokens), total_steps=9)
        metrics = trainer.update(with_returns(make_rows(prompts=(5, 3, 7), samples=2)), loss)
        moments = {n: m for n, m in trainer.optimizer.state().items() if n.startswith("exp_avg/")}
        found.append((moments, {name: metric.value for name, metric in metrics.items()}))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-12, abs=1e-12)
    for name, moment in found[0][0].items():
        torch.testing.assert_close(moment, found[1][0][name], rtol=1e-10, atol=1e-14)


def test_a_head_that_overflows_names_the_token_and_what_the_head_says(
    make_scalar: MakeModule, make_rows: MakeRows
) -> None:
    module = make_scalar()
    trainer = Trainer(module, TrainConfig(), total_steps=1)
    rows = with_returns(make_rows())
    before = weights(module)
    with torch.no_grad():
        module.score.weight.fill_(torch.nan)
    with pytest.raises(
        TrainingError, match=r"token 5 \(id \d+\) of row .*has loss nan, its scalar output is nan"
    ):
        trainer.update(rows, VALUE)
    with pytest.raises(TrainingError, match="has loss nan, its scalar output is nan"):
        trainer.update(make_rows(samples=2), PairLoss())
    assert trainer.optimizer.steps == 0 and trainer.optimizer.state().keys() == {"counter/step"}
    with torch.no_grad():
        module.score.weight.copy_(before["score.weight"])
    assert same(weights(module), before)
    trainer.update(rows, VALUE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_trainer_goes_on_bit_for_bit(
    make_scalar: MakeModule, make_rows: MakeRows, tmp_path: Path, dtype: torch.dtype
) -> None:
    config = TrainConfig(lr=1e-3, schedule="cosine")
    module = make_scalar(dtype=dtype)
    trainer = Trainer(module, config, total_steps=4)
    for seed in range(2):
        trainer.update(make_rows(samples=2, seed=seed), PairLoss())
    save_file(
        {name: t.contiguous() for name, t in trainer.optimizer.state().items()},
        tmp_path / "state.safetensors",
    )
    save_file(weights(module), tmp_path / "weights.safetensors")
    other = make_scalar(seed=9, dtype=dtype)
    resumed = Trainer(other, config, total_steps=4)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False)
    resumed.optimizer.load_state(load_file(tmp_path / "state.safetensors"))
    for seed in range(2, 4):
        rows = make_rows(samples=2, seed=seed)
        assert trainer.update(rows, PairLoss()) == resumed.update(rows, PairLoss())
    assert same(weights(module), weights(other))
    assert same(trainer.optimizer.state(), resumed.optimizer.state())


def test_recomputed_activations_give_the_same_step(make_scalar: MakeModule, make_rows: MakeRows) -> None:
    found = []
    for recompute in (False, True):
        module = make_scalar()
        trainer = Trainer(module, TrainConfig(lr=1e-3, gradient_checkpointing=recompute), total_steps=1)
        trainer.update(with_returns(make_rows()), VALUE)
        assert not module.training
        found.append(weights(module))
    assert same(*found)
