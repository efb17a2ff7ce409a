"""Steps whose rewards give no gradient are found, for every reason, only if consecutive."""

from __future__ import annotations

import pytest

from rillflow.records.metrics import Max, Mean, Metrics, Min
from rillflow.runs.uniform_rewards import Streak, streaks, without_lesson


def scored(low: float | None, high: float | None) -> Metrics:
    share = Mean(total=0.0 if low is None else 8.0, count=8.0)
    if low is None or high is None:
        return {"reward/score/share": share}
    return {
        "reward/score/share": share,
        "reward/score/min": Min(value=low),
        "reward/score/max": Max(value=high),
    }


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({}, None),
        (scored(0.0, 1.0), None),
        (scored(None, None), "no answer has a reward"),
        (scored(0.0, 0.0), "every reward is 0"),
        (scored(2.5, 2.5), "every reward is 2.5"),
    ],
)
def test_a_step_without_a_lesson_says_why(metrics: Metrics, why: str | None) -> None:
    assert without_lesson(metrics) == why


def test_three_in_a_row_for_one_reason_are_a_streak() -> None:
    kinds = [None, None, None, None, 0.0, 0.0, 1.0, 1.0, 1.0]
    steps = [(step, scored(kind, kind)) for step, kind in enumerate(kinds, 1)]
    assert streaks(steps) == [
        Streak(first=1, last=4, why="no answer has a reward"),
        Streak(first=7, last=9, why="every reward is 1"),
    ]
    apart = [(1, scored(0.0, 0.0)), (2, scored(0.0, 1.0)), (3, scored(0.0, 0.0)), (4, scored(0.0, 0.0))]
    assert streaks(apart) == []
    assert streaks([(step, metrics) for step, metrics in steps if step != 2]) == [
        Streak(first=7, last=9, why="every reward is 1")
    ], "steps that were not made are no row"
