"""The first signal asks, the second one ends, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from rillflow.controller.interrupt import Interruption, RunStage, stopped
from rillflow.errors import Interrupted, Signalled
from rillflow.runs.abandoning import ABANDON, whole
from rillflow.runs.ending_signals import REPEAT_S, signal_name


def training(interruption: Interruption) -> Interruption:
    """An interruption of a run whose steps have begun."""
    interruption.stage = RunStage.TRAINING
    return interruption


WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM, signal.SIGPROF)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *WARNINGS])
def test_first_asks_and_second_ends(number: signal.Signals) -> None:
    before, clock_s = signal.getsignal(number), [0.0]
    with training(Interruption(clock=lambda: clock_s[0])) as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), number)
        assert interruption.requested
        clock_s[0] = REPEAT_S
        with pytest.raises(Signalled) as caught:
            os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, *WARNINGS])
def test_the_error_that_ends_the_run_has_the_signal(number: signal.Signals) -> None:
    with (
        training(Interruption()) as interruption,
        pytest.raises(Interrupted) as caught,
        interruption.orderly(),
    ):
        os.kill(os.getpid(), number)
        raise stopped(3, Path("step-000003"), by=interruption.by)
    assert caught.value.number == number
    assert caught.value.what == f"stopped after step 3, as requested by {signal_name(number)}"


@pytest.mark.parametrize(
    ("step", "abandoned", "what", "why"),
    [
        (0, "", "before the first step", "no step had finished"),
        (0, "step 1 was abandoned", "before the first step", "step 1 was abandoned; no step is saved"),
        (3, "", "after step 3", "everything up to that step is saved in s-3"),
        (
            3,
            "4 was left",
            "after step 3",
            "4 was left; everything up to that step is saved in s-3",
        ),
    ],
)
def test_the_end_on_request_says_what_is_saved(step: int, abandoned: str, what: str, why: str) -> None:
    ended = stopped(step, Path("s-3") if step else None, abandoned, by=" by SIGTERM")
    assert ended.what == f"stopped {what}, as requested by SIGTERM" and ended.why == why


def test_a_sigterm_that_a_launcher_forwards_at_once_is_the_first_one_again() -> None:
    clock_s = [0.0]
    with training(Interruption(clock=lambda: clock_s[0])) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        clock_s[0] = REPEAT_S / 2
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_at_once(number: signal.Signals) -> None:
    told: SimpleQueue[str] = SimpleQueue()
    with (
        Interruption(told.put) as interruption,
        pytest.raises(Interrupted, match="before a step began"),
        interruption.orderly(),
    ):
        os.kill(os.getpid(), number)
        pytest.fail("the start goes on")
    assert "stopping before a step begins" in told.get(timeout=60)


def test_an_error_that_the_end_of_a_start_causes_is_told_as_the_end() -> None:
    with Interruption() as interruption, pytest.raises(Interrupted), interruption.orderly():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise OSError("half a cluster cannot be closed") from None


def test_errors_of_a_start_that_nobody_interrupts_stay() -> None:
    with Interruption() as interruption, pytest.raises(OSError), interruption.orderly():
        raise OSError("the disk went away")


def test_the_second_signal_is_told_as_it_is() -> None:
    with (
        training(Interruption()) as interruption,
        pytest.raises(KeyboardInterrupt),
        interruption.orderly(),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_is_answered_while_the_step_still_runs() -> None:
    told: SimpleQueue[str] = SimpleQueue()
    with training(Interruption(told.put)) as interruption:
        interruption.pace = " (the last one took 12 s)"
        os.kill(os.getpid(), signal.SIGTERM)
        answer = told.get(timeout=60)
        assert interruption.requested
    assert answer.startswith(
        "SIGTERM: finishing this step (the last one took 12 s), then writing a checkpoint"
    )
    assert "repeat to stop at once" in answer
    assert told.empty()


def wait(seconds: float = 60.0) -> None:
    """A wait of the main thread, which a signal may end."""
    threading.Event().wait(seconds)


def test_abandonable_work_ends_when_the_time_for_a_stop_is_over() -> None:
    with training(Interruption(stop_s=0.1)) as interruption:
        with pytest.raises(Signalled), interruption.abandonable():
            os.kill(os.getpid(), signal.SIGTERM)
            wait()
        assert interruption.is_over


def test_work_that_begins_after_the_time_is_over_ends_at_once() -> None:
    with training(Interruption(stop_s=0.0)) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        while not interruption.is_over:
            wait(0.01)
        with pytest.raises(Signalled), interruption.abandonable():
            pytest.fail("the work begins")


def test_work_that_must_be_whole_is_not_abandoned_and_the_work_around_it_is() -> None:
    done = []
    with (
        training(Interruption(stop_s=0.0)) as interruption,
        pytest.raises(Signalled),
        interruption.abandonable(),
    ):
        with interruption.abandonable(False):
            os.kill(os.getpid(), signal.SIGTERM)
            while not interruption.is_over:
                wait(0.01)
            done.append("whole")
        done.append("around")
    assert done == ["whole"]


def test_a_run_that_ends_in_time_is_left_alone() -> None:
    before = signal.getsignal(ABANDON)
    with training(Interruption(stop_s=0.2)) as interruption, interruption.abandonable():
        os.kill(os.getpid(), signal.SIGTERM)
    wait(0.5)
    assert signal.getsignal(ABANDON) is before
    assert not interruption.is_over


class LateInterruption(Interruption):
    """An interruption whose time for a stop is over just before the run ends."""

    _is_over = False

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        super().__init__(stop_s=0.0)

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        return self._is_over

    @is_over.setter
    def is_over(self, value: bool) -> None:
        if value:
            self.begun.set()
            self.ended.wait(60)
        self._is_over = value


def test_a_run_that_ends_while_its_time_runs_out_gets_no_signal() -> None:
    received: list[int] = []
    before = signal.signal(ABANDON, lambda number, _: received.append(number))
    try:
        late = LateInterruption()
        with training(late):
            (answering,) = (each for each in threading.enumerate() if each.name == "interruption")
            os.kill(os.getpid(), signal.SIGTERM)
            assert late.begun.wait(60)
        late.ended.set()
        answering.join(60)
        assert late.is_over
    finally:
        signal.signal(ABANDON, before)
    assert not received


def test_weights_that_change_in_place_are_changed_completely() -> None:
    made = []
    with (
        training(Interruption(stop_s=0.0)) as interruption,
        pytest.raises(Signalled),
        interruption.abandonable(),
    ):
        with whole():
            os.kill(os.getpid(), signal.SIGTERM)
            while not interruption.is_over:
                wait(0.01)
            wait(0.1)
            made.append("half")
            made.append("whole")
        made.append("after")
    assert made == ["half", "whole"]


def test_outside_the_main_thread_it_is_harmless() -> None:
    seen: list[bool] = []

    def enter() -> None:
        with Interruption() as interruption:
            seen.append(interruption.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert seen == [False]


INSIDE_EXEC = """
import sys
from rillflow.controller.interrupt import Interruption

with Interruption():
    try:
        exec("import signal; signal.raise_signal(signal.{name})")
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_python_runs_a_string_leaves_the_exit_code_alone(name: str) -> None:
    """Dataclasses run strings when they are imported; Python would end the process by SIGINT."""
    assert subprocess.run([sys.executable, "-c", INSIDE_EXEC.format(name=name)]).returncode == 130
