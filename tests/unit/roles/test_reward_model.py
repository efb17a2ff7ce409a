"""The reward model role: it trains on pairs, and its scores have the fields of the reward role."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rillflow.errors import ModelError, RecordError, RewardError, TrainingError
from rillflow.formulas.losses import margin_preference_loss, preference_loss
from rillflow.models.architecture import head_of
from rillflow.models.bare import character_tokenizer
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import ScalarModel, load_scalar_model
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.retokenize import OtherTokens
from rillflow.roles.reward import OUTCOMES
from rillflow.roles.scalar_roles import RewardModel, SafetyCostModel
from rillflow.roles.trained_role import Training
from rillflow.tasks.arithmetic import arithmetic_examples
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.prompts import answered_batch
from rillflow.training.config import PassesConfig, TrainConfig
from rillflow.workers.endpoint import endpoints_of

MakeModel = Callable[..., ScalarModel]
MakeRollouts = Callable[[ScalarModel, Sequence[str]], Batch]


def role(
    model: ScalarModel, lr: float = 1e-3, kind: type[RewardModel] = RewardModel, **settings: object
) -> RewardModel:
    given: dict = {"tokenizer": model.tokenizer} | settings
    return kind(ModelShard.whole(model), Training(config=TrainConfig(lr=lr), seed=0, updates=100), **given)


def pairs_for(model: ScalarModel, size: int = 200) -> Batch:
    examples = PREFERENCES.made(arithmetic_examples(size=size, digits=1, operators="+-", seed=0), 0)
    return answered_batch(Encoder(tokenizer=model.tokenizer).rows(examples, PREFERENCES), epoch=0)


def accuracy(reward: RewardModel, pairs: Batch) -> float:
    scores = reward.score(pairs).dense("rewards")
    return float((scores[0::2] > scores[1::2]).float().mean())


def weights(model: ScalarModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.module.parameters()]


def test_accuracy_rises_on_200_arithmetic_pairs(make_model: MakeModel) -> None:
    model = make_model(hidden=128)
    reward, pairs = role(model), pairs_for(model)
    assert len(pairs) == 400
    assert accuracy(reward, pairs) == 0.0, "a new head scores all alike"
    first = reward.update(pairs, preference_loss, PassesConfig())
    assert first["preference/loss/mean"].value == pytest.approx(0.6931, abs=1e-3)
    assert first["preference/accuracy/mean"].count == 200
    last = reward.update(pairs, preference_loss, PassesConfig(epochs=30, minibatches=4))
    assert reward.version == 2 and reward.trainer.optimizer.steps == 121
    assert accuracy(reward, pairs) > 0.8
    assert last["preference/margin/mean"].value > 0 and last["preference/accuracy/mean"].value > 0.5


def test_scores_have_the_reward_role_s_fields(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    model = make_model()
    rollouts = make_rollouts(model, ["7", "42", ""])
    with torch.no_grad():
        head_of(model.module).weight.normal_(generator=torch.Generator().manual_seed(0))
    found = role(model).score(rollouts)
    assert list(found.fields) == ["rewards", "valid", "outcome", "completion", "message"]
    rewards = found.dense("rewards")
    assert rewards.dtype == torch.float32 and len(set(rewards.tolist())) == 3
    assert found.dense("valid").tolist() == [True] * 3
    assert [OUTCOMES[index] for index in found.dense("outcome").tolist()] == ["score"] * 3
    assert found.dense("outcome").dtype == torch.int8
    assert found.ragged("completion").to_text() == ["7", "42", ""]
    assert found.ragged("message").to_text() == [""] * 3
    last = [row[-1:].tolist() for row in rollouts.ragged("tokens").rows()]
    assert last == [[0]] * 3, "read at the end token"
    costs = role(model, kind=SafetyCostModel).score(rollouts)
    assert "rewards" not in costs.fields and torch.equal(costs.dense("costs"), rewards)


@pytest.mark.parametrize("kind", [RewardModel, SafetyCostModel])
def test_a_saved_role_goes_on_bit_for_bit(
    make_model: MakeModel, tmp_path: Path, kind: type[RewardModel]
) -> None:
    model, name = make_model(), {RewardModel: "reward_model", SafetyCostModel: "cost_model"}[kind]
    train, tokenizer = TrainConfig(lr=1e-3), model.tokenizer
    first, pairs, twice = (
        kind(ModelShard.whole(model), Training(config=train, seed=0, updates=9), tokenizer=tokenizer),
        pairs_for(model, 20),
        PassesConfig(minibatches=3),
    )
    first.update(pairs, preference_loss, twice)
    first.save(tmp_path)
    again = load_scalar_model(ModelConfig(path=name), seed=5, device=torch.device("cpu"), base=tmp_path)
    training = Training(config=train, seed=0, updates=9, version=first.version)
    second = kind(ModelShard.whole(again), training, tokenizer=tokenizer)
    second.begin(train, 9, resume=tmp_path / f"{name}.optimizer")
    for one, other in zip(first.score(pairs).fields.items(), second.score(pairs).fields.items(), strict=True):
        assert one[0] == other[0]
        if isinstance(one[1], Tensor) and isinstance(other[1], Tensor):
            assert torch.equal(one[1], other[1])
    assert first.update(pairs, preference_loss, twice) == second.update(pairs, preference_loss, twice)
    assert all(torch.equal(one, two) for one, two in zip(weights(model), weights(again), strict=True))
    second.begin(train, 9)
    assert second.trainer.optimizer.steps == 0, "a new phase begins afresh"


def test_endpoints_say_what_they_read_and_write() -> None:
    reward, cost = endpoints_of(RewardModel), endpoints_of(SafetyCostModel)
    assert set(reward) == set(cost) == {"begin", "score", "update"}
    assert reward["score"].writes[0] == "rewards" and cost["score"].writes[0] == "costs"
    assert reward["score"].writes[1:] == cost["score"].writes[1:]


def test_a_model_that_only_scores_may_be_frozen(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    model = make_model()
    model.module.requires_grad_(False)
    reward = role(model)
    reward.score(make_rollouts(model, ["7"]))
    with pytest.raises(TrainingError, match="no parameter that requires a gradient"):
        reward.update(pairs_for(model, 4), preference_loss, PassesConfig())


def test_a_pair_without_its_partner_is_refused_and_changes_nothing(make_model: MakeModel) -> None:
    model = make_model()
    reward, pairs = role(model), pairs_for(model, 4)
    before = weights(model)
    with pytest.raises(TrainingError, match="has no partner") as caught:
        reward.update(pairs.slice(0, 7), preference_loss, PassesConfig(minibatches=1))
    assert f"({pairs.row_id(6)})" in caught.value.what
    assert reward.version == 0
    assert all(torch.equal(one, two) for one, two in zip(before, weights(model), strict=True))


def test_an_empty_row_and_a_score_that_is_not_finite_are_named(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    model = make_model()
    rollouts = make_rollouts(model, ["7", "8"])
    empty = rollouts.with_fields(tokens=Ragged.from_rows([[1, 2], []]))
    with pytest.raises(TrainingError, match=r"row \(epoch 0 prompt 1 sample 0\) is empty"):
        role(model).score(empty)
    with torch.no_grad():
        head_of(model.module).weight.fill_(torch.inf)
    with pytest.raises(RewardError, match=r"score of row \(epoch 0 prompt 0 sample 0\) is (nan|-?inf)"):
        role(model).score(rollouts)


@pytest.mark.parametrize(("kind", "name"), [(RewardModel, "reward model"), (SafetyCostModel, "cost model")])
def test_other_tokens_than_the_policy_s_are_refused(
    make_model: MakeModel, kind: type[RewardModel], name: str
) -> None:
    other = Tokenizer(character_tokenizer("=0123456789+-", 32))
    with pytest.raises(ModelError, match=f"the {name} and the policy decode the token 1"):
        role(make_model(), tokenizer=other, kind=kind)


def test_a_model_with_other_tokens_reads_the_text(make_model: MakeModel, make_rollouts: MakeRollouts) -> None:
    """The same weights with another character order: scores do not depend on the policy's tokens."""
    model = make_model()
    with torch.no_grad():
        head_of(model.module).weight.normal_(generator=torch.Generator().manual_seed(0))
    texts = ["7", "42", "007"]
    columns = Ragged.from_text(json.dumps({"prompt": f"1+{place}="}) for place in range(len(texts)))
    rollouts = make_rollouts(model, texts).with_fields(columns=columns)
    policy = Tokenizer(character_tokenizer("=0123456789+-x", 32))
    tokens = [[*policy.encode(f"1+{place}="), *policy.encode(text), 0] for place, text in enumerate(texts)]
    written = rollouts.with_fields(tokens=Ragged.from_rows(tokens))
    reread = OtherTokens(wrote=policy, encoder=Encoder(tokenizer=model.tokenizer), context=model.context)
    found = role(model, tokenizer=policy, reread=reread).score(written)
    assert torch.equal(found.dense("rewards"), role(model).score(rollouts).dense("rewards"))
    assert found.ragged("completion").to_text() == texts

    cut = tokens[2][:-1]  # a row without its end token has none there either
    mask = Ragged.from_rows([[False] * 4 + [True] * 3], torch.bool)
    alone = written.slice(2, 3).with_fields(tokens=Ragged.from_rows([cut]), loss_mask=mask)
    assert list(reread(alone).rows.ragged("tokens").lists()[0]) == model.tokenizer.encode("1+2=007")


def test_rows_that_a_model_with_other_tokens_cannot_read_have_an_error_and_no_0(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    model = make_model()
    policy = Tokenizer(character_tokenizer("=0123456789+-x", 99))
    rows = [("1+0=", "7"), ("1+1=", "x"), ("1+2=", "1" * 40), ("3" * 60, "2")]
    rollouts = make_rollouts(model, ["1"] * 4)
    tokens = [[*policy.encode(prompt), *policy.encode(text), 0] for prompt, text in rows]
    mask = [[False] * len(prompt) + [True] * (len(text) + 1) for prompt, text in rows]
    rollouts = rollouts.with_fields(
        tokens=Ragged.from_rows(tokens),
        loss_mask=Ragged.from_rows(mask, torch.bool),
        columns=Ragged.from_text(json.dumps({"prompt": prompt}) for prompt, _ in rows),
    )
    reread = OtherTokens(wrote=policy, encoder=Encoder(tokenizer=model.tokenizer), context=model.context)
    found = role(model, tokenizer=policy, reread=reread).score(rollouts)
    assert found.dense("valid").tolist() == [True, False, False, True]
    assert [OUTCOMES[each] for each in found.dense("outcome").tolist()] == [
        "score",
        "error",
        "error",
        "score",
    ]
    messages = found.ragged("message").to_text()
    assert "'x'" in messages[1] and "context of 32 tokens" in messages[2]
    short = reread(rollouts).rows.ragged("tokens").lists()[3]
    assert list(short) == [*model.tokenizer.encode("3" * 30 + "2"), 0], "its prompt lost its beginning"
    with pytest.raises(RewardError, match="can read none of 1 rows"):
        role(model, tokenizer=policy, reread=reread).score(rollouts.slice(1, 2))


def test_the_margin_of_a_pair_is_read_from_the_field_of_its_rows(make_model: MakeModel) -> None:
    model = make_model()
    pairs = pairs_for(model, 4)
    margins = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat_interleave(2)
    found = role(model).update(
        pairs.with_fields(margin=margins), margin_preference_loss, PassesConfig(), centring=0.01
    )
    expected = -torch.nn.functional.logsigmoid(-torch.arange(4.0)).mean()  # a new head scores all alike
    assert found["preference/loss/mean"].value == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(RecordError, match="no field 'margin'"):
        role(model).update(pairs, margin_preference_loss, PassesConfig())
    with pytest.raises(TrainingError, match="margin is nan"):
        role(model).update(
            pairs.with_fields(margin=margins * torch.nan), margin_preference_loss, PassesConfig()
        )
