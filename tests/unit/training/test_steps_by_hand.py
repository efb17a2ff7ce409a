"""The effect of an algorithm's step on the weights, compared with a plain loop over its rows.

    step on fixed rollouts and scores ─ input of policy.update ─ PolicyLoss, packed, split ───> gradient
    row by row, token by token, whole rows through the module only ───────────────────────────> gradient

For every estimator and placement of divergence, every aggregation, and every setting for truncated rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rillflow.algorithms.config import OnlineConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.controller.executor import apply_formula, rows_where
from rillflow.controller.flow import Flow
from rillflow.formulas.losses import Aggregation
from rillflow.records.batch import Batch, joined
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish
from rillflow.training.config import TrainConfig
from rillflow.training.guards import loss_tokens
from rillflow.training.loss import PolicyLoss
from rillflow.training.scorer import LogprobReader, Scorer, micro_batches

MakeRows = Callable[..., Batch]
GROUP, WEIGHT, PENALTY, GAMMA, LAM = 4, 0.3, 0.25, 0.9, 0.8
CHARGES: Sequence[Mapping[str, Any]] = (
    {},
    {"kl_in": "reward"},
    {"kl_in": "loss"},
    {"kl_in": "loss", "kl_estimator": "k2"},
)


class Here:
    """The executor of a step whose roles answer from a table and whose formulas run at once."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = dict(answers)
        self.endpoints: dict[str, set[str]] = {}
        for name in answers:
            role, _, endpoint = name.partition(".")
            self.endpoints.setdefault(role, set()).add(endpoint)

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        answer = self.answers[f"{role}.{endpoint}"]
        if endpoint == "update":
            answer = self.answers[f"{role}.update"] = joined(args)
        return answer

    def compute(
        self,
        formula: Callable[..., Any],
        batches: Sequence[Any],
        into: str | None,
        options: Mapping[str, Any],
    ) -> Any:
        return apply_formula(formula, into, *batches, **options)

    def filter(self, batch: Any, field: str, by: Any = None) -> Any:
        return rows_where(field, batch, by)


def table(module: PreTrainedModel, make_rows: MakeRows) -> dict[str, Any]:
    """Return two groups of four: one with equal rewards, one row without a score; some rows are truncated."""
    rows = make_rows(prompts=(5, 3), samples=GROUP).only("tokens", "loss_mask")
    own, mask = Scorer(module, TrainConfig()).logprobs(rows), rows.ragged("loss_mask")
    generator = torch.Generator().manual_seed(5)

    def near(scale: float) -> Ragged:
        noise = scale * torch.randn(own.values.shape, generator=generator)
        return own.with_values((own.values + noise) * mask.values)

    cut = torch.tensor([False, True, False, False, True, False, False, True])
    rollouts = rows.with_fields(
        sampler_logprobs=near(0.1),
        finish=torch.where(cut, int(Finish.LENGTH), int(Finish.STOP)).to(torch.int8),
    )

    def known(**fields: Tensor | Ragged) -> Batch:
        return Batch(ids=rows.ids, fields=fields)

    scores = {
        "rewards": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5, 2.0]),
        "valid": torch.tensor([True] * 6 + [False, True]),
    }
    return {
        "policy.generate": rollouts,
        "reward.score": known(**scores),
        "reference.logprobs": known(reference_logprobs=near(0.4)),
        "policy.logprobs": known(old_logprobs=near(0.2)),
        "critic.values": known(values=near(1.0)),
        "critic.final_values": known(final_values=torch.randn(8, generator=generator)),
        "critic.update": None,
        "policy.update": None,
        "policy.publish": 1,
    }


def found(module: PreTrainedModel, answers: Mapping[str, Any], config: OnlineConfig) -> dict[str, Tensor]:
    """Return the gradient of the rows of the step's update, in micro-batches of 25 tokens."""
    here = Here(answers)
    ALGORITHMS[config.name].step(Flow(here), None, config)
    loss = PolicyLoss(config.loss, max_tokens=9)
    rows, scorer = loss.prepare(here.answers["policy.update"]), Scorer(module, TrainConfig())
    module.zero_grad()
    for index in micro_batches(rows, 25):
        part = rows.select(index)
        terms = loss(scorer.forward(part, LogprobReader()), loss_tokens(part)).terms
        (terms.sum() / float(part.dense("loss_denominator")[0])).backward()
    return gradients(module)


def gradients(module: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Row:
    """One row with lists over its loss tokens."""

    def __init__(self, answers: Mapping[str, Any], index: int) -> None:
        rollouts = answers["policy.generate"]
        self.group, self.index = index // GROUP, index
        self.tokens = rollouts.ragged("tokens").rows()[index]
        self.places = rollouts.ragged("loss_mask").rows()[index].nonzero().flatten().tolist()
        self.cut = int(rollouts.dense("finish")[index]) == Finish.LENGTH
        self.score = float(answers["reward.score"].dense("rewards")[index])
        self.valid = bool(answers["reward.score"].dense("valid")[index])
        self.final = float(answers["critic.final_values"].dense("final_values")[index])

        def at(batch: str, field: str) -> list[float]:
            row = answers[batch].ragged(field).rows()[index]
            return [float(row[place]) for place in self.places]

        self.sampler = at("policy.generate", "sampler_logprobs")
        self.reference = at("reference.logprobs", "reference_logprobs")
        self.old = at("policy.logprobs", "old_logprobs")
        self.values = at("critic.values", "values")
        self.advantages = [0.0] * len(self.places)


def compare(rows: list[Row], config: OnlineConfig) -> None:
    """Set GRPO's advantages."""
    in_reward = config.loss.kl and config.loss.kl_in == "reward"
    for group in range(2):
        mates = [row for row in rows if row.group == group and row.valid]
        raw = [row.score - PENALTY * row.cut for row in mates]
        paid = raw
        if in_reward:
            nats = [sum(m - r for m, r in zip(row.sampler, row.reference, strict=True)) for row in mates]
            paid = [reward - WEIGHT * each for reward, each in zip(raw, nats, strict=True)]
        divisor = stdev(raw) + 1e-6 if max(raw) > min(raw) else 1.0
        for row, reward in zip(mates, paid, strict=True):
            row.advantages = [(reward - mean(paid)) / divisor] * len(row.places)


def estimate(rows: list[Row], config: OnlineConfig) -> None:
    """Set PPO's advantages, whitened over the tokens of all scored rows, including truncated ones."""
    in_reward = config.loss.kl and config.loss.kl_in == "reward"
    scored = [row for row in rows if row.valid]
    for row in scored:
        ahead = 0.0
        after = row.final if row.cut and config.truncated == "bootstrap" else 0.0
        for place in reversed(range(len(row.places))):
            paid = (row.score - PENALTY * row.cut) if place == len(row.places) - 1 else 0.0
            if in_reward:
                paid -= WEIGHT * (row.sampler[place] - row.reference[place])
            ahead = paid + GAMMA * after - row.values[place] + GAMMA * LAM * ahead
            after = row.values[place]
            row.advantages[place] = ahead
    everything = [advantage for row in scored for advantage in row.advantages]
    middle, spread = mean(everything), stdev(everything) + 1e-6
    for row in scored:
        row.advantages = [(advantage - middle) / spread for advantage in row.advantages]


def expected(module: PreTrainedModel, rows: list[Row], config: OnlineConfig) -> dict[str, Tensor]:
    """Return the gradient of the loss, with each row whole through the module, token by token."""
    loss = config.loss
    kept = [row for row in rows if not (row.cut and config.truncated == "mask")]
    total = {
        "token_mean": sum(len(row.places) for row in kept),
        "sequence_mean": len(kept),
        "constant": 9 * len(kept),
    }
    module.zero_grad()
    for row in kept:
        logs = module(input_ids=row.tokens[None], use_cache=False).logits[0].log_softmax(-1)
        share = 1 / len(row.places) if loss.aggregation == "sequence_mean" else 1.0
        terms = []
        for number, place in enumerate(row.places):
            now, advantage = logs[place - 1, row.tokens[place]], row.advantages[number]
            ratio = (now - row.old[number]).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                objective = objective.clamp_min(3 * advantage)
            term = -objective
            if loss.kl and loss.kl_in == "loss":
                apart = now - row.reference[number]
                k3 = (-apart).exp() - 1 + apart
                term = term + WEIGHT * (apart * apart / 2 if loss.kl_estimator == "k2" else k3)
            terms.append(share * term / total[loss.aggregation])
        torch.stack(terms).sum().backward()
    return gradients(module)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    size = math.sqrt(sum(float(grad.square().sum()) for grad in other.values()))
    gap = math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))
    assert size > 1e-3 and gap / size < 1e-5


def configured(name: str, **settings: Any) -> OnlineConfig:
    loss = settings.pop("loss")
    if "kl_in" in loss:
        loss = {**loss, "kl": WEIGHT}
    given = {"name": name, "steps": 1, "minibatches": 2, "missing_end_penalty": PENALTY, "loss": loss}
    config = ALGORITHMS[name].config.model_validate(given | settings)
    assert isinstance(config, OnlineConfig)
    return config


@pytest.mark.parametrize("truncated", ["keep", "mask"])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("charge", CHARGES, ids=str)
def test_grpo_row_by_row(
    module: PreTrainedModel, make_rows: MakeRows, charge: Mapping[str, Any], aggregation: str, truncated: str
) -> None:
    config = configured("grpo", loss={**charge, "aggregation": aggregation}, truncated=truncated)
    answers = table(module, make_rows)
    rows = [Row(answers, index) for index in range(8)]
    compare(rows, config)
    assert_same(found(module, answers, config), expected(module, rows, config))


@pytest.mark.parametrize("truncated", ["keep", "mask", "bootstrap"])
@pytest.mark.parametrize("charge", CHARGES, ids=str)
def test_ppo_row_by_row(
    module: PreTrainedModel, make_rows: MakeRows, charge: Mapping[str, Any], truncated: str
) -> None:
    config = configured("ppo", loss=charge, truncated=truncated, gamma=GAMMA, lam=LAM)
    answers = table(module, make_rows)
    rows = [Row(answers, index) for index in range(8)]
    estimate(rows, config)
    assert_same(found(module, answers, config), expected(module, rows, config))
