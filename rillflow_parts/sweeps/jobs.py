"""Jobs: where the runs of a sweep run: in processes of this machine, or on the nodes of a Ray cluster.

start(words, log) ─> SweepJob ── poll ──> None while it runs, then its exit code
                         ── interrupt ──> as Ctrl-C: it writes a checkpoint and ends
"""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rillflow.isolation.child_process import ChildProcess
from rillflow.runs import layout


class SweepJob(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Return the exit code of the run, or None while it runs."""

    def interrupt(self) -> None:
        """Ask it to write a checkpoint and to end."""

    def kill(self) -> None:
        """End it at once."""


class Jobs(Protocol):
    """A place where runs run."""

    def start(self, words: Sequence[str], log: Path) -> SweepJob:
        """Start a command, whose output goes to a file."""


class LocalJobs:
    """Processes of this machine, each in a session of its own.

    Args:
        command: words before those of a run, such as the interpreter and a module.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def start(self, words: Sequence[str], log: Path) -> SweepJob:
        """See Jobs."""
        with log.open("wb") as out:
            return _LocalJob(ChildProcess([*self._command, *words], output=out))


class _LocalJob:
    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.end_all()


class ForeignJob:
    """A run that another process runs, such as the child of a killed sweep; it ends when its lock is free.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run

    def poll(self) -> int | None:
        """See SweepJob; the exit code is unknown, so it counts as interrupted: the directory has the rest."""
        return None if is_held(self._run) else INTERRUPTED

    def interrupt(self) -> None:
        """Do nothing: whoever started it ends it."""

    def kill(self) -> None:
        """Do nothing."""


INTERRUPTED = 130
"""Exit code of a run that was stopped on request."""


def is_held(run: Path) -> bool:
    """Return whether a process runs this run directory."""
    try:
        with (run / layout.LOCK).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError:
        pass
    return False
