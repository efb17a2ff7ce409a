"""Lessons: find steps whose rewards are uniform and therefore give no training signal, from their metrics.

steps ─ without_lesson ─> no reward at all, or one for all ─ streaks ─> a warning after three in a row
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rillflow.records.metrics import Metrics

SHARE, LOW, HIGH = "reward/score/share", "reward/score/min", "reward/score/max"
"""Metrics that are read."""
IN_A_ROW = 3
"""Number of consecutive steps without a training signal that is reported."""


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Consecutive steps without a training signal, for one reason."""

    first: int
    """First of these steps."""
    last: int
    """Last of these steps."""
    why: str
    """Reason. Example: ``every reward is 1``."""

    @property
    def text(self) -> str:
        """Streak in words."""
        return (
            f"{self.why} in steps {self.first:,} to {self.last:,}: equal rewards teach nothing; "
            "read the reward's messages for these answers"
        )


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


def streaks(steps: Iterable[tuple[int, Metrics]]) -> list[Streak]:
    """Return every run of at least ``IN_A_ROW`` steps without a training signal for one reason."""
    found: list[Streak] = []
    for step, metrics in steps:
        why = without_lesson(metrics)
        if why is None:
            continue
        if found and found[-1].last == step - 1 and found[-1].why == why:
            found[-1] = Streak(first=found[-1].first, last=step, why=why)
        else:
            found.append(Streak(first=step, last=step, why=why))
    return [streak for streak in found if streak.last - streak.first + 1 >= IN_A_ROW]
