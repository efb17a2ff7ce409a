"""Lessons: find steps whose rewards are uniform and therefore give no training signal, from their metrics.

steps ─ without_lesson ─> no reward at all, or one for all ─ streaks ─> a warning after three in a row
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from rillflow.records.metrics import Metrics

SHARE, LOW, HIGH = "reward/score/share", "reward/score/min", "reward/score/max"
"""Metrics that are read."""
IN_A_ROW = 3
"""Warn after this many steps without a training signal."""


class RewardLevel(StrEnum):
    """Where the one reward of a streak stands among the rewards of earlier steps."""

    ONLY = "only"
    """No earlier step had another reward."""
    WORST = "worst"
    """Earlier rewards were higher, and none was lower."""
    BEST = "best"
    """Earlier rewards were lower, and none was higher."""
    BETWEEN = "between"
    """Earlier rewards were lower and higher."""


_MEANINGS = {
    RewardLevel.ONLY: "equal rewards teach nothing; read the reward's messages for these answers",
    RewardLevel.WORST: "equal rewards teach nothing, and earlier answers had better ones. If the answers "
    "became worse, the policy collapsed: lower policy.lr and raise policy.warmup_steps; if they are right, "
    "read the reward's messages for them",
    RewardLevel.BEST: "equal rewards teach nothing, and no earlier reward was better. If the answers are "
    "right, these prompts are learned: stop, or give harder ones",
    RewardLevel.BETWEEN: "equal rewards teach nothing, and earlier answers had worse and better ones; read "
    "these answers and the reward's messages",
}


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Consecutive steps without a training signal, for one reason."""

    first: int
    """First of these steps."""
    last: int
    """Last of these steps."""
    why: str
    """Reason. Example: ``every reward is 1``."""
    level: RewardLevel = RewardLevel.ONLY
    """Where the reward stands among those of earlier steps."""

    @property
    def text(self) -> str:
        """Streak in words."""
        return f"{self.why} in steps {self.first:,} to {self.last:,}: {_MEANINGS[self.level]}"


def without_lesson(metrics: Metrics) -> str | None:
    """Return why a step's rewards give no training signal.

    None if two rewards differ or nothing was scored.
    """
    share = metrics.get(SHARE)
    if share is None:
        return None
    if share.value == 0:
        return "no answer has a reward"
    low, high = metrics.get(LOW), metrics.get(HIGH)
    if low is None or high is None or low.value != high.value:
        return None
    return f"every reward is {high.value:g}"


@dataclass(frozen=True, kw_only=True)
class RewardRange:
    """The rewards of observed steps."""

    low: float = math.inf
    """Least reward."""
    high: float = -math.inf
    """Largest reward."""

    def widened(self, metrics: Metrics) -> RewardRange:
        """Return the range that also holds the rewards of a step."""
        if LOW not in metrics or HIGH not in metrics:
            return self
        low, high = metrics[LOW].value, metrics[HIGH].value
        return RewardRange(low=min(self.low, low), high=max(self.high, high))

    def level(self, metrics: Metrics) -> RewardLevel:
        """Return where the one reward of a step stands."""
        value = metrics[HIGH].value if HIGH in metrics else math.nan
        match (self.low < value, self.high > value):
            case (False, True):
                return RewardLevel.WORST
            case (True, False):
                return RewardLevel.BEST
            case (True, True):
                return RewardLevel.BETWEEN
        return RewardLevel.ONLY


NOTHING_SEEN = RewardRange()
"""Range before the first step."""


def streaks(steps: Iterable[tuple[int, Metrics]], earlier: RewardRange = NOTHING_SEEN) -> list[Streak]:
    """Return every run of at least ``IN_A_ROW`` steps without a training signal for one reason.

    Args:
        steps: the steps.
        earlier: rewards of the steps before them.
    """
    found: list[Streak] = []
    seen = earlier
    for step, metrics in steps:
        why, level = without_lesson(metrics), seen.level(metrics)
        seen = seen.widened(metrics)
        if why is None:
            continue
        if found and found[-1].last == step - 1 and found[-1].why == why:
            found[-1] = replace(found[-1], last=step)
        else:
            found.append(Streak(first=step, last=step, why=why, level=level))
    return [streak for streak in found if streak.last - streak.first + 1 >= IN_A_ROW]
