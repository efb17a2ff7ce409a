"""``log_metric``: what a reward function logs comes back as sums, from plain and sandboxed children."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.logged import MAX_NAMES, Logged, merged, sums_of
from rillflow.rewards.outcome import Outcome
from rillflow.rewards.workers import RewardWorkers, WeightedWorkers

LOGS = """
def f(completions, log_metric):
    for text in completions:
        log_metric("length", len(text))
    log_metric("calls", 1)
    return [1.0] * len(completions)
"""


def given(text: str) -> FunctionPath:
    return FunctionPath(file=Path.cwd() / "<f>", name="f", text=text)


def logged(text: str, completions: list[str], **settings: object) -> dict[str, tuple[float, int]]:
    with RewardWorkers(given(text), RewardConfig.model_validate(settings)) as workers:
        scores = workers.score(["p"] * len(completions), completions, {})
    assert all(score.outcome is Outcome.SCORE for score in scores), scores
    return merged(score.logged for score in scores)


def test_the_values_of_all_calls_are_summed() -> None:
    assert logged(LOGS, ["a", "bbb", "cc"], workers=2) == {"length": (6.0, 3), "calls": (2.0, 2)}


def test_in_the_sandbox_each_row_is_a_call() -> None:
    limit = Path("/proc/sys/user/max_user_namespaces")
    if not limit.is_file() or limit.read_text().strip() == "0":
        pytest.skip("this machine has no user namespaces")
    assert logged(LOGS, ["a", "bbb"], sandbox=True) == {"length": (4.0, 2), "calls": (2.0, 2)}


def test_a_function_without_the_parameter_gets_nothing_and_a_column_of_the_name_is_no_need() -> None:
    text = "def f(completions, **columns):\n    assert 'log_metric' not in columns\n    return [1.0]\n"
    assert logged(text, ["a"]) == {}


def test_functions_of_a_sum_log_each() -> None:
    other = LOGS.replace('"calls"', '"others"')
    functions = (given(LOGS), given(other))
    with WeightedWorkers(functions, RewardConfig()) as workers:
        scores = workers.score(["p"], ["aa"], {})
    assert scores[0].value == 1.0  # both have one name, so the last part counts
    assert scores[0].logged == {"length": (4.0, 2), "calls": (1.0, 1), "others": (1.0, 1)}


def test_what_cannot_be_logged_is_an_error_of_the_function() -> None:
    text = LOGS.replace('log_metric("calls", 1)', 'log_metric("calls", "many")')
    with RewardWorkers(given(text), RewardConfig()) as workers:
        (score,) = workers.score(["p"], ["a"], {})
    assert score.outcome is Outcome.ERROR
    assert "the value of 'calls' is 'many', not a number" in score.message


def test_a_name_is_a_short_text_and_names_are_few() -> None:
    log_metric = Logged()
    for name in ("", "x" * 101, "a\nb", 3):
        with pytest.raises(ValueError, match="is not a text of 1 to 100"):
            log_metric(name, 1.0)  # type: ignore[arg-type]
    for number in range(MAX_NAMES):
        log_metric(f"{number}", number)
    log_metric("0", math.nan)
    with pytest.raises(ValueError, match="at most 64 names"):
        log_metric("one more", 1.0)


@pytest.mark.parametrize(
    "bad",
    [[], {"a": 1}, {"a": [1.0]}, {"a": ["1", 1]}, {"a": [1.0, 0]}, {"x" * 101: [1.0, 1]}],
)
def test_a_message_of_another_form_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="logged metric"):
        sums_of(bad)
