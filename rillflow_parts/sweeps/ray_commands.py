"""RayCommands: run commands as processes on the nodes of a Ray cluster, for sweeps.

    start(words, log) ── an actor with its cores ──> Popen ── poll ──> None, or the exit code
                                                           ── interrupt ──> SIGINT

An actor waits in Ray's queue until its cores are free. The working directory, the recipe and the run
directories must be on a file system that all nodes share. The driver's death ends the actors; a run that then
goes on alone is found by its lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as faults

from rillflow.workers.ray_cluster import RayCluster

LOST = 1
"""Exit code of a command whose actor died."""
_ANSWER_S = 30.0


class CommandActor:
    """Actor: one process on its node."""

    def __init__(self, words: Sequence[str], log: str, folder: str, path: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with Path(log).open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable if words[0] == "python" else words[0], *words[1:]],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_with_signals,
                env={**kept, "PYTHONPATH": path},
            )

    def poll(self) -> int | None:
        """Return the exit code, or None."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process, or SIGKILL to its group."""
        if number == signal.SIGKILL and self._process.poll() is None:
            os.killpg(self._process.pid, number)
        elif self._process.poll() is None:
            self._process.send_signal(number)


def _with_signals() -> None:
    """Let a new process have SIGINT and SIGTERM, which Ray's workers ignore, and all that they block."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class RayCommand:
    """A command that was started.

    Args:
        actor: the actor that runs it.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it waits for cores or runs."""
        if self._code is not None:
            return self._code
        self._asked = self._asked or self._actor.poll.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return None
        try:
            self._code = ray.get(self._asked)
        except faults.RayError:
            self._code = LOST
        self._asked = None
        if self._code is not None:
            ray.kill(self._actor)  # its cores are free for the next one
        return self._code

    def interrupt(self) -> None:
        """Send SIGINT; a command that still waits for cores is dropped."""
        self._send(signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._code is not None:
            return
        sent = self._actor.send.remote(number)
        if not ray.wait([sent], timeout=_ANSWER_S if number == signal.SIGKILL else 5.0)[0]:
            ray.kill(self._actor)  # it has not begun
            self._code = LOST


class RayCommands(ExitStack):
    """A cluster that runs commands; a context manager.

    Args:
        command: words before those of each command; "python" is the interpreter of the node.
        address: see RayCluster.
        cores: cores that each command takes.
        at_once: commands at the same time, for a cluster of our own.
    """

    def __init__(self, command: Sequence[str], address: str | None, *, cores: int, at_once: int) -> None:
        super().__init__()
        self._command = [*command]
        cluster = RayCluster(address)
        self.callback(cluster.leave)
        cluster.enter(cores * at_once)
        self._make = ray.remote(num_cpus=cores)(CommandActor)

    def start(self, words: Sequence[str], log: Path) -> RayCommand:
        """Start a command, whose output goes to a file."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        given = ([*self._command, *words], str(log.absolute()), str(Path.cwd()), path)
        return RayCommand(self._make.remote(*given))
