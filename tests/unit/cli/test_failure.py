"""Errors become three lines and an exit code; unexpected exceptions keep their traceback."""

from __future__ import annotations

import signal

import pytest

from rillflow.cli.failure import exit_code, explain_failure
from rillflow.errors import (
    ConfigError,
    DataError,
    Interrupted,
    ModelError,
    RewardError,
    RillflowError,
    RunDirectoryError,
    Signalled,
    TrainingError,
)


def raised(error: BaseException) -> BaseException:
    """Return the error with a traceback, as a command would raise it."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigError, 2),
        (DataError, 2),
        (ModelError, 2),
        (RewardError, 2),
        (RunDirectoryError, 2),
        (Interrupted, 130),
        (RillflowError, 2),
    ],
)
def test_an_expected_error_says_what_why_and_fix(
    kind: type[RillflowError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raised(kind("the value is 7", why="it must be 8", fix="write 8"))
    assert explain_failure(error, debug=False) == code
    shown = capsys.readouterr()
    assert shown.err.endswith("the value is 7\n  why: it must be 8\n  fix: write 8\n")
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("kind", [ConfigError, DataError, RewardError, TrainingError])
def test_a_run_that_failed_on_the_way_ends_with_1(kind: type[RillflowError]) -> None:
    error = kind("the loss is nan")
    error.is_underway = True
    assert explain_failure(raised(error), debug=False) == 1


def test_an_error_says_where_it_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    error = TrainingError("the loss is nan", fix="lower policy.lr")
    error.add_note("in policy.update on rank 1 of pool 'main'")
    explain_failure(raised(error), debug=False)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: the loss is nan"
    assert said[-1] == "  where: in policy.update on rank 1 of pool 'main'"


def test_an_interruption_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    explain_failure(raised(Interrupted("stopped after step 3, as requested")), debug=False)
    assert capsys.readouterr().err == "stopped after step 3, as requested\n"


def test_a_second_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_failure(raised(KeyboardInterrupt()), debug=False) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_end_by_a_signal_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_failure(raised(Signalled(signal.SIGHUP)), debug=False) == 129
    assert capsys.readouterr().err.startswith("interrupted by SIGHUP; ")


def test_a_stop_by_a_signal_has_its_code() -> None:
    assert exit_code(Interrupted("stopped after step 3", number=signal.SIGXCPU)) == 128 + signal.SIGXCPU


def test_an_unexpected_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_failure(raised(ZeroDivisionError("oh")), debug=False) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: oh" in shown
    assert "report it" in shown


def test_debug_shows_every_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    explain_failure(raised(ConfigError("wrong")), debug=True)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "error: wrong" in shown
