"""The remaining time, and the progress output on each stream."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.records.metrics import Max, Mean, Metric, Metrics, Min, Sum
from rillflow.runs.formatting import duration, number, size
from rillflow.runs.progress import Estimate, Progress, TimeLeft

STEPS = {"sft": 3, "grpo": 2}
METRICS = {"reward/score/mean": Mean(total=3.0, count=4), "rollout/tokens/sum": Sum(value=9.0)}


def scored(low: float | None, high: float | None) -> Metrics:
    """Return the metrics of a step with rewards between these bounds."""
    share = Mean(total=0.0 if low is None else 8.0, count=8.0)
    if low is None or high is None:
        return {"reward/score/share": share}
    ends: Metrics = {"reward/score/min": Min(value=low), "reward/score/max": Max(value=high)}
    return {"reward/score/share": share, **ends}


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_time_left_is_a_lower_bound_until_every_phase_was_timed() -> None:
    left = TimeLeft(STEPS)
    assert left.estimate() == Estimate(seconds=0.0, is_complete=False)
    left.observe("sft", 1, 2.0)
    assert left.estimate() == Estimate(seconds=4.0, is_complete=False)
    left.observe("sft", 2, 2.0)
    left.observe("sft", 3, 2.0)
    assert left.estimate() == Estimate(seconds=0.0, is_complete=False)
    left.observe("grpo", 4, 5.0)
    assert left.estimate() == Estimate(seconds=5.0, is_complete=True)
    left.observe("grpo", 5, 5.0)
    assert left.estimate() == Estimate(seconds=0.0, is_complete=True)


def test_a_phase_that_is_still_to_come_has_done_nothing() -> None:
    left = TimeLeft({"sft": 10, "grpo": 20})
    left.observe("sft", 3, 1.0)
    assert (left.done("sft"), left.done("grpo")) == (3, 0)


def test_time_left_after_a_resume_counts_what_was_done_before() -> None:
    left = TimeLeft({"sft": 350, "grpo": 60})
    left.observe("grpo", 400, 2.0)
    assert (left.done("sft"), left.done("grpo")) == (350, 50)
    assert left.estimate() == Estimate(seconds=20.0, is_complete=True)


@settings(max_examples=50)
@given(st.floats(0.01, 10), st.floats(0.01, 1e6), st.integers(0, 19))
def test_one_odd_step_does_not_move_the_time_left(usual: float, odd: float, place: int) -> None:
    left = TimeLeft({"grpo": 100})
    for step in range(20):
        left.observe("grpo", step + 1, odd if step == place else usual)
    assert left.estimate().seconds == pytest.approx(80 * usual)


def test_a_log_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    with Progress(total_steps=STEPS, stream=stream) as progress:
        progress.step("sft", 1, {}, 0.25)
        progress.note("held-out accuracy [red]0.5[/red] " + "x" * 300)
        progress.step("sft", 3, {}, 0.25)
        progress.step("grpo", 4, METRICS, 2.0)
        progress.step("grpo", 5, METRICS, 2.0)
    assert stream.getvalue().splitlines() == [
        "sft 1/3  step 1  250 ms  more than 500 ms left",
        "held-out accuracy [red]0.5[/red] " + "x" * 300,
        "sft 3/3  step 3  250 ms",
        "grpo 1/2  step 4  reward 0.750  2.0 s  2.0 s left",
        "grpo 2/2  step 5  reward 0.750  2.0 s  done",
    ]
    stream = io.StringIO()
    with Progress(total_steps={"grpo": 2}, stream=stream) as progress:
        progress.step("grpo", 1, METRICS, 2.0)
    assert stream.getvalue() == "grpo 1/2  reward 0.750  2.0 s  2.0 s left\n"


def test_three_steps_in_a_row_without_a_lesson_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        with Progress(total_steps={"grpo": 12}, stream=stream) as progress:
            for step, reward in enumerate([1.0, 1.0, 0.5, None, None, None, None, 1.0, 1.0, 1.0], 1):
                progress.step("grpo", step, scored(reward, reward), 1.0)
        said = [line for line in stream.getvalue().splitlines() if "warning" in line]
        assert len(said) == 2
        assert "no answer has a reward in steps 4 to 6" in said[0]
        assert "every reward is 1 in steps 8 to 10" in said[1]


def ahead(mean: float, oldest: float, **more: Metric) -> Metrics:
    """Return the metrics of a step with tokens of this age."""
    age: Metrics = {
        "staleness/versions/mean": Mean(total=8 * mean, count=8.0),
        "staleness/versions/max": Max(value=oldest),
    }
    return {**age, **more}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        (ahead(2.0, 2.0), "age 2  "),
        (ahead(1.24, 2.0), "age 1.2 (max 2)  "),
        (
            ahead(
                1.24,
                2.0,
                **{
                    "flight/waited_seconds/mean": Mean(total=0.4, count=1.0),
                    "flight/given_up/sum": Sum(value=3.0),
                },
            ),
            "age 1.2 (max 2)  waited 400 ms  dropped 3  ",
        ),
        (
            ahead(
                0.0,
                0.0,
                **{
                    "flight/waited_seconds/mean": Mean(total=0.0, count=1.0),
                    "flight/given_up/sum": Sum(value=0.0),
                },
            ),
            "age 0  waited 0 ms  ",
        ),
    ],
)
def test_the_line_of_a_step_ahead_shows_age_waits_and_drops(metrics: Metrics, shown: str) -> None:
    stream = io.StringIO()
    with Progress(total_steps={"grpo": 2}, stream=stream) as progress:
        progress.step("grpo", 1, {**METRICS, **metrics}, 2.0)
    assert stream.getvalue() == f"grpo 1/2  reward 0.750  {shown}2.0 s  2.0 s left\n"


def test_a_sampler_that_is_far_behind_is_warned_of_once_in_a_phase() -> None:
    far = ahead(2.0, 2.0, **{"staleness/kl/mean": Mean(total=0.48, count=8.0)})
    stream = io.StringIO()
    with Progress(total_steps={"sft": 2, "grpo": 12}, stream=stream) as progress:
        for step in (1, 2):
            progress.step("sft", step, {}, 1.0)
        for step in range(3, 15):
            progress.step("grpo", step, far, 1.0)
    (said,) = [line for line in stream.getvalue().splitlines() if "warning" in line]
    assert said.startswith("warning: staleness/kl/mean is 0.0600 nats in step 5, and above 0.05")


def test_a_note_cannot_send_commands_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        with Progress(total_steps=STEPS, stream=stream) as progress:
            progress.note("reward raised \x1b[31mred")
        assert "reward raised \u241b[31mred" in stream.getvalue()


def test_quiet_shows_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(total_steps=STEPS, stream=stream, quiet=True) as progress:
            progress.step("sft", 1, METRICS, 0.25)
            progress.note("note")
        assert stream.getvalue() == ""


def test_a_terminal_shows_a_bar_a_phase_and_is_left_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with Progress(total_steps=STEPS, stream=stream) as progress:
        for step in (1, 2, 3):
            progress.step("sft", step, {}, 0.5)
        progress.note("held-out accuracy [bold] 0.5")
        progress.step("grpo", 4, METRICS, 2.0)
    shown = stream.getvalue()
    assert "held-out accuracy [bold] 0.5" in shown
    assert "3/3" in shown and "1/2" in shown and "2.0 s left" in shown and "reward 0.750" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_the_terminal_is_left_in_order_by_a_crash_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(ZeroDivisionError), Progress(total_steps=STEPS, stream=stream):
        raise ZeroDivisionError
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_numbers_are_worded_for_people() -> None:
    texts = [number(value) for value in (0.0, 0.01234, 0.5, 12.345, 123.4, 12345.0, -0.25, 1.5e-7, 999.96)]
    assert texts == ["0", "0.0123", "0.500", "12.3", "123", "12,345", "-0.250", "1.5e-7", "1000"]
    assert number(float("nan")) == "not a number" and number(float("-inf")) == "-infinite"
    assert [duration(value) for value in (0.0, 0.25, 1.26, 9.96, 75, 3599.6, 7384)] == [
        "0 ms",
        "250 ms",
        "1.3 s",
        "10 s",
        "1 min 15 s",
        "1 h 00 min",
        "2 h 03 min",
    ]
    assert [size(value) for value in (12, 3 * 2**20, 2**50)] == ["12 bytes", "3.0 MiB", "1024.0 TiB"]
