"""Evaluation: how what was trained does on held-out rows.

prompts ─ policy.generate ─> rollouts ─ reward.score ─> scores ─ judged ─> a few numbers
pairs ─ reward_model.score ─> scores of two answers each ─ ranked ─> the same
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rillflow.formulas.interval import mean_interval, wilson
from rillflow.records.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out rows, or pairs of them, come out.

    Example:
        Evaluation(count=50, mean_reward=0.86, correct=43, is_accuracy=True, interval=(0.74, 0.93), more={})
    """

    count: int
    """Rows or pairs looked at."""
    mean_reward: float
    """Mean over the rows that have a score; of pairs the accuracy, for an order is right or wrong."""
    correct: int | None
    """Rows that are right: a reward of 1 where every reward is 0 or 1, else one of at least
    ``evaluate.success``, and None without that. Pairs in the right order: the chosen answer scores higher."""
    is_accuracy: bool
    """Whether right and wrong is all there is: every reward is 0 or 1, or an order of two."""
    interval: tuple[float, float] | None
    """95%: of the accuracy (Wilson), a row without a score counting as not right; else of the mean reward."""
    more: Mapping[str, float]
    """What else was measured, by name: mean tokens of an answer, or mean margin of a pair."""

    @property
    def text(self) -> str:
        """In a line. Example: ``held-out accuracy 0.860 [0.738, 0.930] (43 of 50)``."""
        ends = "" if self.interval is None else f" [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"
        if self.is_accuracy and self.correct is not None:
            right = self.correct / self.count
            return f"held-out accuracy {right:.3f}{ends} ({self.correct} of {self.count})"
        if math.isnan(self.mean_reward):
            return f"no reward for any of {self.count} held-out answers"
        share = "" if self.correct is None else f", {self.correct} of them right"
        return f"held-out mean reward {self.mean_reward:.3f}{ends} ({self.count} answers{share})"


def judged(rollouts: Batch, scores: Batch, *, success: float | None) -> Evaluation:
    """What the scores of answers to held-out prompts say; ``success`` is the reward of a right one."""
    rewards = scores.dense("rewards")[scores.dense("valid")]
    count, correct = len(rollouts), None
    binary = len(rewards) > 0 and bool(((rewards == 0) | (rewards == 1)).all())
    if binary or success is not None:
        correct = int((rewards >= (1.0 if success is None else success)).sum())
    return Evaluation(
        count=count,
        mean_reward=float(rewards.mean()) if len(rewards) else float("nan"),
        correct=correct,
        is_accuracy=binary,
        interval=wilson(correct, count)
        if binary and correct is not None
        else mean_interval(rewards.double().tolist()),
        more={"length_mean": float(rollouts.ragged("loss_mask").sums().double().mean())},
    )


def ranked(scores: Batch) -> Evaluation:
    """How the scores of held-out pairs, the chosen answer first, order them; equal scores are no order."""
    chosen, rejected = scores.dense("rewards").view(-1, 2).double().unbind(1)
    correct, count = int((chosen > rejected).sum()), len(chosen)
    return Evaluation(
        count=count,
        mean_reward=correct / count,
        correct=correct,
        is_accuracy=True,
        interval=wilson(correct, count),
        more={"margin_mean": float((chosen - rejected).mean())},
    )
