"""Steps whose rewards give no gradient are found, for every reason, only if consecutive."""

from __future__ import annotations

import pytest

from rillflow.records.metrics import Max, Mean, Metrics, Min
from rillflow.runs.uniform_rewards import RewardLevel, RewardRange, Streak, streaks, without_lesson


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
        Streak(first=7, last=9, why="every reward is 1", level=RewardLevel.BEST),
    ]
    apart = [(1, scored(0.0, 0.0)), (2, scored(0.0, 1.0)), (3, scored(0.0, 0.0)), (4, scored(0.0, 0.0))]
    assert streaks(apart) == []
    assert streaks([(step, metrics) for step, metrics in steps if step != 2]) == [
        Streak(first=7, last=9, why="every reward is 1", level=RewardLevel.BEST)
    ], "steps that were not made are no row"


@pytest.mark.parametrize(
    ("earlier", "value", "level", "words"),
    [
        ({}, 0.0, RewardLevel.ONLY, "read the reward's messages for these answers"),
        (
            scored(0.0, 1.0),
            0.0,
            RewardLevel.WORST,
            "the policy collapsed: lower policy.lr and raise policy.warmup_steps",
        ),
        (scored(0.0, 1.0), 1.0, RewardLevel.BEST, "these prompts are learned"),
        (scored(-1.0, 1.0), 0.0, RewardLevel.BETWEEN, "worse and better ones"),
        (scored(None, None), 0.0, RewardLevel.ONLY, "read the reward's messages for these answers"),
    ],
)
def test_a_streak_says_what_earlier_rewards_make_of_it(
    earlier: Metrics, value: float, level: RewardLevel, words: str
) -> None:
    steps = [(step, scored(value, value)) for step in (2, 3, 4)]
    (streak,) = streaks([(1, earlier), *steps])
    assert streak == Streak(first=2, last=4, why=f"every reward is {value:g}", level=level)
    assert words in streak.text and streak.text.startswith(f"every reward is {value:g} in steps 2 to 4: ")
    assert streaks(steps, RewardRange().widened(earlier)) == [streak], "as a run sees it, step by step"
    assert ("read the reward's messages for these" in streak.text) == (level is RewardLevel.ONLY)
