"""A data kind and a loss kind from outside the package: ranked lists with the Plackett-Luce loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.controller.flow import Flow
from rillflow.formulas.losses import TokenLosses
from rillflow.formulas.preferences import AnswerLossConfig, AnswerTotals
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch
from rillflow.runs.reader import Evaluation
from rillflow.tasks.example import Example, answer_of, prompt_of
from rillflow.tasks.kinds import DataKind, accuracy

PLACES = 3


class RankedLists(DataKind):
    """Three answers to one prompt, the best one first."""

    name, fields, unit = "ranked lists", ("tokens", "loss_mask"), "list"
    columns = ("prompt", "ranked")
    answers = ("best answer", "second answer", "third answer")

    def read(self, row: dict[str, Any], index: int, place: str) -> Example:
        """See DataKind."""
        first, *others = (answer_of(each, "answer") for each in row.pop("ranked"))
        return Example(
            index=index,
            prompt=prompt_of(row),
            completion=first,
            others=tuple(others),
            columns=row,
            place=place,
        )

    def evaluated(self, scores: Batch, rows: Batch) -> Evaluation:
        """See DataKind: a list is right if its best answer has the highest score."""
        del rows
        lists = scores.dense("rewards").view(-1, PLACES)
        return accuracy(lists.argmax(1) == 0, {"spread_mean": float((lists[:, 0] - lists[:, -1]).mean())})


class PlackettLuceConfig(AnswerLossConfig):
    """Minus the log probability of the order, if each next answer is drawn by its implicit reward."""

    area: ClassVar[str] = "lists"
    unit: ClassVar[int] = PLACES

    beta: float = 0.1

    @property
    def reads(self) -> tuple[str, ...]:
        """See LossSection."""
        return ("reference_totals",)

    def losses(self, answers: AnswerTotals, fields: Mapping[str, Tensor]) -> TokenLosses:
        """See AnswerLossConfig."""
        del fields
        rewards = self.beta * answers.ratios.view(-1, PLACES)
        later = [rewards[:, place:].logsumexp(1) for place in range(PLACES)]
        losses = torch.stack(later, 1).sum(1) - rewards.sum(1)
        return TokenLosses(losses=losses, metrics={"lists/best/share": rewards.detach().argmax(1) == 0})


class ListwiseConfig(AlgorithmConfig):
    """Settings of [algorithm]."""

    name: Literal["listwise"]
    loss: PlackettLuceConfig = PlackettLuceConfig()


def step(flow: Flow, lists: Batch, config: ListwiseConfig) -> Handle:
    """Run one iteration: raise each answer above those ranked below it."""
    report = flow.policy.update(lists, flow.reference.totals(lists), loss=config.loss, passes=config)
    flow.publish(flow.policy)
    return report


def score(flow: Flow, lists: Batch, config: ListwiseConfig) -> Handle:
    """Return the scores of held-out answers."""
    del config
    return flow.compute(as_rewards, flow.policy.totals(lists), into="rewards")


def as_rewards(policy_totals: Tensor) -> Tensor:
    """Return the log probabilities, [B]."""
    return policy_totals


ALGORITHM = Algorithm(config=ListwiseConfig, step=step, data=RankedLists(), score=score)
