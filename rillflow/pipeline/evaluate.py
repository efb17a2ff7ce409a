"""Evaluation: how what was trained does on held-out rows.

prompts ─ policy.generate ─> rollouts ─ reward.score ─> scores ─ judged ─> a few numbers
pairs ─ reward_model.score ─> scores of two answers each ─ ranked ─> the same
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rillflow.formulas.interval import wilson
from rillflow.records.batch import Batch

SOLVED = 1.0
"""A row with at least this reward counts as solved."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out rows, or pairs of them, come out.

    Example:
        Evaluation(correct=43, count=50, mean_reward=0.86, interval=(0.74, 0.93), more={"length_mean": 3.2})
    """

    correct: int
    """Rows solved: reward at least 1. Pairs in the right order: the chosen answer scores higher."""
    count: int
    """Rows or pairs looked at; a row without a score counts as not solved."""
    mean_reward: float
    """Mean over the rows that have a score; of pairs the accuracy, for an order is right or wrong."""
    interval: tuple[float, float]
    """95% Wilson interval of the accuracy."""
    more: Mapping[str, float]
    """What else was measured, by name: mean tokens of an answer, or mean margin of a pair."""

    @property
    def accuracy(self) -> float:
        """Share of rows solved, or of pairs in the right order."""
        return self.correct / self.count


def judged(rollouts: Batch, scores: Batch) -> Evaluation:
    """What the scores of answers to held-out prompts say."""
    rewards = scores.dense("rewards")[scores.dense("valid")]
    correct = int((rewards >= SOLVED).sum())
    return Evaluation(
        correct=correct,
        count=len(rollouts),
        mean_reward=float(rewards.mean()) if len(rewards) else float("nan"),
        interval=wilson(correct, len(rollouts)),
        more={"length_mean": float(rollouts.ragged("loss_mask").sums().double().mean())},
    )


def ranked(scores: Batch) -> Evaluation:
    """How the scores of held-out pairs, the chosen answer first, order them; equal scores are no order."""
    chosen, rejected = scores.dense("rewards").view(-1, 2).double().unbind(1)
    correct, count = int((chosen > rejected).sum()), len(chosen)
    return Evaluation(
        correct=correct,
        count=count,
        mean_reward=correct / count,
        interval=wilson(correct, count),
        more={"margin_mean": float((chosen - rejected).mean())},
    )
