"""The policy: samples carry the version of the weights that sampled them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rillflow.errors import TrainingError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.records.batch import Batch, concatenate, row_ids
from rillflow.records.metrics import Histogram
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.policy import Policy
from rillflow.roles.publishing import SharedWeights
from rillflow.roles.sampler import Sampler
from rillflow.roles.trained_role import Training
from rillflow.rollout.config import RolloutConfig
from rillflow.training.config import TrainConfig, UpdateConfig

NEW = NewModel(hidden=16, layers=1, heads=2, context=16, alphabet="0123456789+=")


def policy_of(dtype: str, rollout: RolloutConfig, new: NewModel = NEW) -> tuple[Policy, Sampler, Batch]:
    """Return a policy, its sampler, and a prompt."""
    torch.set_num_threads(1)
    config = ModelConfig(new=new, dtype=dtype)  # type: ignore[arg-type]
    model = load_model(config, seed=0, device=torch.device("cpu"), base=Path())
    policy = Policy(ModelShard.whole(model), Training(config=TrainConfig(lr=1e-2), seed=0), rollout=rollout)
    prompts = Batch(
        ids=row_ids([RowId(0, 0, 0)]),
        fields={
            "tokens": Ragged.from_rows([model.tokenizer.encode("1+2=")]),
            "columns": Ragged.from_text(["{}"]),
        },
    )
    assert isinstance(policy.weights, SharedWeights)
    return policy, Sampler(policy.weights, model=model, rollout=rollout, seed=0), prompts


def test_sampled_tokens_carry_the_version_published_last() -> None:
    policy, sampler, prompts = policy_of("float32", RolloutConfig(max_tokens=3, max_rows=2))
    for published in (0, 1, 2):
        rows = sampler.generate(prompts, samples=2)
        sampled = rows.ragged("loss_mask").values
        assert set(rows.ragged("versions").values[sampled].tolist()) == {published}
        assert policy.publish() == published + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_other_arithmetic_are_not_trained_on_in_any_type(dtype: str) -> None:
    wide = NEW.model_copy(update={"hidden": 64, "layers": 4, "heads": 4, "context": 40})
    policy, sampler, prompts = policy_of(dtype, RolloutConfig(max_tokens=30, max_rows=16), wide)
    with torch.no_grad():
        for weight in policy.model.module.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # fresh weights give every token nearly the same probability
    rows = sampler.generate(prompts, samples=16)
    rows = rows.with_fields(advantages=torch.linspace(-1, 1, 16))
    loss, reuse = PolicyLossConfig(), UpdateConfig()
    sampler = rows.ragged("sampler_logprobs")
    flatter = sampler.with_values(sampler.values * 0.95)  # about the effect of a higher temperature
    with pytest.raises(TrainingError, match="not on-policy"):
        policy.update(rows.with_fields(sampler_logprobs=flatter), loss=loss, passes=reuse)
    metrics = policy.update(rows, loss=loss, passes=reuse)
    assert metrics["mismatch/logprob_gap/max"].value < (1e-4 if dtype == "float32" else 0.3)


def test_a_single_token_that_rounding_sends_astray_stops_no_bfloat16_run() -> None:
    policy, sampler, prompts = policy_of("bfloat16", RolloutConfig(max_tokens=3, max_rows=2))
    rows = sampler.generate(prompts, samples=2).with_fields(advantages=torch.tensor([1.0, -1.0]))
    sampler = rows.ragged("sampler_logprobs")
    values = sampler.values.clone()
    values[4] += 1.0  # the first row's first sampled token
    astray = rows.with_fields(sampler_logprobs=sampler.with_values(values))
    assert bool(rows.ragged("loss_mask").values[4])
    policy.update(astray, loss=PolicyLossConfig(), passes=UpdateConfig())


def test_a_ratio_against_nobody_is_refused_where_rows_are_of_other_weights() -> None:
    policy, sampler, prompts = policy_of("float32", RolloutConfig(max_tokens=3, max_rows=8))
    rows = sampler.generate(prompts, samples=4).with_fields(advantages=torch.linspace(-1, 1, 4))
    with pytest.raises(TrainingError, match="reads old_logprobs, and no batch of the update has them"):
        policy.update(rows, loss=PolicyLossConfig(), passes=UpdateConfig(minibatches=2))
    policy.update(rows, policy.logprobs(rows), loss=PolicyLossConfig(), passes=UpdateConfig(minibatches=2))


def test_crash_equivalence_a_part_of_an_update_counts_as_an_optimiser_step() -> None:
    """A checkpoint after an error is refused if the count says that a later step has begun to train."""
    policy, sampler, prompts = policy_of("float32", RolloutConfig(max_tokens=3, max_rows=8))
    rows = sampler.generate(prompts, samples=4).with_fields(advantages=torch.linspace(-1, 1, 4))
    passes = UpdateConfig(minibatches=2, shuffle=False, ratio_tolerance=9, gap_tolerance=9)
    assert passes.goes_by(2)
    policy.update(
        rows.slice(0, 2), policy.logprobs(rows), loss=PolicyLossConfig(), passes=passes, part=(0, 2)
    )
    assert policy.updates == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_rows_of_two_versions_those_of_the_present_one_are_checked(dtype: str) -> None:
    policy, sampler, prompts = policy_of(dtype, RolloutConfig(max_tokens=3, max_rows=8))
    stale = sampler.generate(prompts, samples=4)
    policy.publish()
    fresh = sampler.generate(Batch(ids=prompts.ids + 1, fields=prompts.fields), samples=4)
    rows = concatenate([stale, fresh]).with_fields(advantages=torch.linspace(-1, 1, 8))
    passes = UpdateConfig(gap_tolerance=0.001).with_freshness(1)

    def astray(version: int) -> Batch:
        """Change the log probabilities of one version's tokens."""
        column, mask = rows.ragged("sampler_logprobs"), rows.ragged("loss_mask").values
        moved = column.values + 0.5 * (mask & (rows.ragged("versions").values == version))
        return rows.with_fields(sampler_logprobs=column.with_values(moved))

    with pytest.raises(TrainingError, match=r"not on-policy.*row \(epoch 1 prompt 1"):
        policy.update(astray(1), policy.logprobs(rows), loss=PolicyLossConfig(), passes=passes)
    found = policy.update(astray(0), policy.logprobs(rows), loss=PolicyLossConfig(), passes=passes)
    tokens = [int(part.ragged("loss_mask").values.sum()) for part in (fresh, stale)]
    assert found["staleness/versions/histogram"] == Histogram(edges=(0,), counts=(tokens[0], tokens[1]))
    lies = found["mismatch/log_ratio/histogram"]
    assert isinstance(lies, Histogram) and sum(lies.counts) == sum(tokens)
    assert "mismatch/log_ratio/histogram" not in policy.update(
        fresh.with_fields(advantages=torch.ones(4)),
        loss=PolicyLossConfig(),
        passes=UpdateConfig(ratio_tolerance=9, gap_tolerance=9),
    )
