"""Several reward functions and their weighted sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import WeightedWorkers

ONE = "def one(completions): return [float(text) if text.isdigit() else None for text in completions]"
TWO = """
import time
def two(completions, answer):
    for text in completions:
        if text == "slow": time.sleep(60)
        if text == "9": raise KeyError(text)
    return [None if text == "none" else len(right) for text, right in zip(completions, answer)]
"""


def given(text: str, name: str, weight: float) -> FunctionPath:
    return FunctionPath(file=Path.cwd() / f"<{name}>", name=name, text=text, weight=weight)


def test_a_sum_has_its_parts_and_a_failure_of_one_is_the_row_s() -> None:
    functions = (given(ONE, "one", 1.0), given(TWO, "two", -0.5))
    completions = ["4", "word", "none", "9", "slow"]
    with WeightedWorkers(functions, RewardConfig(timeout_s=2.5)) as workers:
        found = workers.score(["p"] * 5, completions, {"answer": ["aa", "b", "c", "d", "e"]})
    assert [score.outcome for score in found] == [
        *(Outcome.SCORE, Outcome.SCORE, Outcome.ABSTAIN, Outcome.ERROR, Outcome.TIMEOUT)
    ]
    assert [score.value for score in found] == [4 - 0.5 * 2, -0.5 * 1, None, None, None]
    assert [dict(score.parts) for score in found] == [{"one": 4.0, "two": 2.0}, {"two": 1.0}, {}, {}, {}]
    assert found[3].message.startswith("two: raised KeyError: '9'")
    assert found[4].message.startswith("two: gave no answer within")


def test_one_function_of_weight_1_is_itself() -> None:
    with WeightedWorkers((given(ONE, "one", 1.0),), RewardConfig()) as workers:
        assert workers.score(["p"], ["4"], {}) == [Score(outcome=Outcome.SCORE, value=4.0)]


def test_a_function_that_cannot_be_loaded_is_named() -> None:
    broken = replace(given(ONE, "one", 1.0), text="raise ValueError('no')")
    with (
        WeightedWorkers((given(ONE, "one", 1.0), broken), RewardConfig()) as workers,
        pytest.raises(RewardError, match="one cannot be loaded: ValueError: no"),
    ):
        workers.score(["p"], ["4"], {})
