"""Failure: the message and the exit code of a command that raises."""

from __future__ import annotations

import signal
import sys
import traceback

from rillflow.errors import Interrupted, RillflowError, signal_of
from rillflow.runs.ending_signals import signal_name
from rillflow.runs.error_lines import own_line
from rillflow.runs.formatting import visible

DONE, FAILED, USAGE, SIGNAL = 0, 1, 2, 128
"""Exit codes: done; failed after the start; refused before the start; the last one plus a signal's number."""


def explain_failure(error: BaseException, *, debug: bool) -> int:
    """Print on stderr why a command ended; return its exit code."""
    expected, own = isinstance(error, RillflowError | KeyboardInterrupt), own_line(error)
    if debug or not (expected or own):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, RillflowError):
        mark = "" if isinstance(error, Interrupted) else "error: "
        print(visible(f"{mark}{error}"), file=sys.stderr)
        for note in (*vars(error).get("__notes__", ()), *([f"at {own}"] if own else ())):
            print(visible(f"  where: {note}"), file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        number = signal_of(error)
        by = "" if number == signal.SIGINT else f" by {signal_name(number)}"
        print(f"interrupted{by}; a run keeps everything up to its last checkpoint", file=sys.stderr)
    elif own:
        print(
            f"error: {visible(''.join(traceback.format_exception_only(error))).strip()}\n"
            f"  why: raised at {own}\n"
            "  fix: correct that line; --debug shows the traceback",
            file=sys.stderr,
        )
    else:
        print(
            f"error: unexpected {type(error).__name__}, which is a bug in Rillflow\n"
            "  fix: report it with the lines above; the same command resumes from the last checkpoint",
            file=sys.stderr,
        )
    return exit_code(error)


def explain_lost_output(error: OSError) -> int:
    """Print why the standard output cannot be written, unless its reader has gone; return the exit code."""
    if isinstance(error, BrokenPipeError):
        return SIGNAL + signal.SIGPIPE
    print(f"error: the standard output cannot be written: {error.strerror}", file=sys.stderr)
    return FAILED


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that raised."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return SIGNAL + signal_of(error)
    return USAGE if isinstance(error, RillflowError) and not error.is_underway else FAILED
