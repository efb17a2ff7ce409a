"""Evaluation: greedy answers to held-out prompts, scored by the reward.

prompts ─ policy.generate ─> rollouts ─ reward.score ─> scores ─ judged ─> a few numbers
"""

from __future__ import annotations

from dataclasses import dataclass

from rillflow.formulas.interval import wilson
from rillflow.records.batch import Batch

SOLVED = 1.0
"""A row with at least this reward counts as solved."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the policy does on held-out prompts.

    Example:
        Evaluation(correct=43, count=50, mean_reward=0.86, interval=(0.738, 0.931), length_mean=3.2)
    """

    correct: int
    """Rows solved: reward at least 1."""
    count: int
    """Rows scored; a row without a score counts as not solved."""
    mean_reward: float
    """Mean over the rows that have a score."""
    interval: tuple[float, float]
    """95% Wilson interval of the accuracy."""
    length_mean: float
    """Mean tokens of an answer."""

    @property
    def accuracy(self) -> float:
        """Share of rows solved."""
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
        length_mean=float(rollouts.ragged("loss_mask").sums().double().mean()),
    )
