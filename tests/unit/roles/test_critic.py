"""The critic role: it fits returns, maps batches to batches, and draws minibatches by seed and version."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rillflow.errors import GraphError, ModelError, RecordError, TrainingError
from rillflow.formulas.config import ValueLossConfig
from rillflow.graph.loss import LossTerm
from rillflow.models.bare import character_tokenizer
from rillflow.models.language_model import ScalarModel
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.scalar_roles import Critic
from rillflow.roles.trained_role import Training
from rillflow.training.config import PassesConfig, TrainConfig

MakeModel = Callable[..., ScalarModel]
MakeRollouts = Callable[[ScalarModel, Sequence[str]], Batch]
ANSWERS = ("7", "42", "108", "3", "55")


def critic_of(model: ScalarModel, lr: float = 1e-3, seed: int = 0, version: int = 0) -> Critic:
    return Critic(
        ModelShard.whole(model),
        Training(config=TrainConfig(lr=lr), seed=seed, updates=100, version=version),
        tokenizer=model.tokenizer,
    )


def returns_of(rollouts: Batch) -> Batch:
    """Return the number of tokens left in the row, in tens, which every state determines."""
    mask = rollouts.ragged("loss_mask")
    left = mask.expand(mask.lengths) - mask.positions
    return Batch(ids=rollouts.ids, fields={"returns": mask.with_values(left.float() / 10)})


def weights(model: ScalarModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.module.parameters()]


def test_a_critic_fits_its_returns(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    model = make_model()
    critic, rollouts = critic_of(model, lr=3e-3), make_rollouts(model, ANSWERS)
    returns, loss = returns_of(rollouts), ValueLossConfig()
    first = critic.values(rollouts)
    assert set(first.fields) == {"values"} and torch.equal(first.ids, rollouts.ids)
    assert first.ragged("values").values.tolist() == [0.0] * len(rollouts.ragged("tokens").values)
    for _ in range(25):
        metrics = critic.update(
            rollouts,
            critic.values(rollouts),
            returns,
            loss=loss,
            passes=PassesConfig(epochs=2, minibatches=2),
        )
    assert critic.version == 25 and critic.trainer.optimizer.steps == 100
    mask = rollouts.ragged("loss_mask").values
    gap = critic.values(rollouts).ragged("values").values - returns.ragged("returns").values
    spread = returns.ragged("returns").values[mask].var()
    assert float(gap[mask].square().mean() / spread) < 0.1
    assert metrics["critic/squared_error/mean"].value < 0.2 * metrics["critic/return/variance"].value
    assert metrics["critic/value/mean"].count == 4 * sum(mask.tolist()) / 2


def test_known_batches_may_be_in_any_order(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    found = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 1, 2]):
        model = make_model()
        critic, rollouts = critic_of(model), make_rollouts(model, ANSWERS)
        values, returns = critic.values(rollouts).select(order), returns_of(rollouts).select(order)
        critic.update(rollouts, values, returns, loss=ValueLossConfig(), passes=PassesConfig(minibatches=2))
        found.append(weights(model))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_cut_depends_on_seed_and_version(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    def after(seed: int, version: int) -> Tensor:
        model = make_model()
        critic, rollouts = critic_of(model, seed=seed, version=version), make_rollouts(model, ANSWERS)
        known = (rollouts, critic.values(rollouts), returns_of(rollouts))
        critic.update(*known, loss=ValueLossConfig(), passes=PassesConfig(minibatches=5))
        assert critic.version == version + 1
        return torch.cat([weight.flatten() for weight in weights(model)])

    assert torch.equal(after(1, 2), after(1, 2))
    assert not torch.equal(after(1, 2), after(1, 3))
    assert not torch.equal(after(1, 2), after(2, 2))


def test_what_is_missing_or_not_finite_is_named(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    model = make_model()
    critic, rollouts = critic_of(model), make_rollouts(model, ANSWERS)
    values, returns = critic.values(rollouts), returns_of(rollouts)
    once: dict = {"loss": ValueLossConfig(), "passes": PassesConfig()}
    with pytest.raises(RecordError, match="no field 'values'"):
        critic.update(rollouts, returns, **once)
    with pytest.raises(TrainingError, match="value_loss reads the field 'returns', which no row has"):
        critic.update(rollouts, values, **once)
    column = returns.ragged("returns")
    broken = returns.with_fields(returns=column.with_values(torch.full_like(column.values, torch.nan)))
    before = weights(model)
    with pytest.raises(TrainingError, match=r"returns is nan at .*prompt 0 sample 0"):
        critic.update(rollouts, values, broken, **once)
    assert critic.version == 0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))


def test_a_critic_with_other_tokens_than_the_policy_is_refused(make_model: MakeModel) -> None:
    other = Tokenizer(character_tokenizer("=0123456789+-", 32))
    with pytest.raises(ModelError, match="the critic and the policy decode the token 1 to different text"):
        Critic(ModelShard.whole(make_model()), Training(config=TrainConfig(), seed=0), tokenizer=other)


def test_the_final_value_is_that_of_the_state_after_the_last_token(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    """``values`` before one more token equals ``final_values`` without that token."""
    model = make_model()
    torch.nn.init.normal_(model.module.score.weight)
    critic = critic_of(model)
    longer = make_rollouts(model, ["421", "108"])
    tokens = longer.ragged("tokens")
    kept = tokens.positions < tokens.expand(tokens.lengths - 1)
    shorter = Batch(
        ids=longer.ids, fields={"tokens": Ragged(values=tokens.values[kept], lengths=tokens.lengths - 1)}
    )
    before_the_last = critic.values(longer).ragged("values").values[tokens.bounds[1:] - 1]
    found = critic.final_values(shorter)
    assert set(found.fields) == {"final_values"} and torch.equal(found.ids, longer.ids)
    torch.testing.assert_close(found.dense("final_values"), before_the_last)
    assert float(before_the_last.abs().min()) > 1e-4


def own_loss(values: Tensor, returns: Tensor) -> Tensor:
    return (values - returns).abs()


def test_a_critic_minimises_a_function_and_one_at_a_time(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    model = make_model()
    critic, rollouts = critic_of(model), make_rollouts(model, ANSWERS)
    known = (rollouts, critic.values(rollouts), returns_of(rollouts))
    apart = (known[2].ragged("returns").values - known[1].ragged("values").values).abs()
    expected = float(apart[rollouts.ragged("loss_mask").values].mean())
    assert critic.update(*known, loss=own_loss, passes=PassesConfig())["critic/loss/mean"].value == (
        pytest.approx(expected)
    )
    two = (LossTerm(loss=own_loss, count=3), LossTerm(loss=own_loss, count=0))
    with pytest.raises(GraphError, match=r"critic\.update got 2 losses"):
        critic.update(*known, loss=two, passes=PassesConfig())
