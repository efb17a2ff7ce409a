"""Lessons: steps whose rewards tell no answer from another, found in their metrics.

steps ─ without_lesson ─> no reward at all, or one for all ─ streaks ─> three in a row are said aloud
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rillflow.records.metrics import Metrics

IN_A_ROW = 3
"""So many steps without a lesson are no accident."""


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Steps in a row whose rewards taught nothing, for one reason."""

    first: int
    """The first of them."""
    last: int
    """The last of them."""
    why: str
    """The reason. Example: ``every reward is 1``."""

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{self.why} in steps {self.first:,} to {self.last:,}: rewards that do not differ teach nothing; "
            "read what the reward said of these answers"
        )


def without_lesson(metrics: Metrics) -> str | None:
    """Why a step's rewards taught nothing; None where two answers differ, or nothing was scored."""
    share = metrics.get("reward/score/share")
    if share is None:
        return None
    if share.value == 0:
        return "no answer has a reward"
    low, high = metrics.get("reward/score/min"), metrics.get("reward/score/max")
    if low is None or high is None or low.value != high.value:
        return None
    return f"every reward is {high.value:g}"


def streaks(steps: Iterable[tuple[int, Metrics]]) -> list[Streak]:
    """Every stretch of at least ``IN_A_ROW`` steps without a lesson, for one reason each."""
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
