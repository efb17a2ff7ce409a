"""Server process: start the process of vLLM's server, end it if it is stopped, and tell how it ended.

    ServerProcess ── ChildProcess ──> python of another environment ── standard output and error ──> log file
         └─ thread: is it stopped while a request is open? ── for STOPPED_S ──> kill

The kernel kills the server with this process, also a stopped server.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import rillflow
from rillflow.errors import RolloutError
from rillflow.isolation.child_process import ChildProcess, how_ended
from rillflow_parts.vllm.requests import ENVIRONMENT, LOUDNESS

STOPPED_S = 5.0
"""Seconds for which a server may be stopped while a request is open."""
_LOOK_S = 0.5
_END_S = 1.0
"""Seconds in which a server ends whose connection was closed; then it is killed."""
_LOG_BYTES = 2**14
_LINES, _LINE_LETTERS = 3, 200
_NOISE = re.compile(
    r"^\[?[WID]\d{4} "  # torch's and glog's
    r"|^(\(\S+( pid=\d+)?\) )?(WARNING|INFO|DEBUG) \d"  # vLLM's
    r"|^\S+:\d+: \w*Warning: |^\s"  # Python's, and the line that it quotes
    r"|^Traceback \(most recent call last\)"
)
"""Lines of a log that do not tell why a server ended."""
_BOOT = """
import importlib.util, sys
from pathlib import Path
for place in map(Path, sys.argv[1:3]):
    found = importlib.util.spec_from_file_location(place.name, place / "__init__.py")
    sys.modules[place.name] = package = importlib.util.module_from_spec(found)
    found.loader.exec_module(package)
from rillflow_parts.vllm.server import main
main(int(sys.argv[3]), parent=int(sys.argv[4]))
"""
"""Code of the server: it imports these very packages, whatever the other environment has."""


class ServerProcess:
    """The process of a server, in a session of its own, so that Ctrl-C reaches only the run.

    Args:
        python: Python of the environment with vLLM.
        log: file that its output is added to; None for one without a name.

    Raises:
        RolloutError: there is no such Python, or the log cannot be written.
    """

    def __init__(self, python: Path, log: Path | None) -> None:
        self.python, self.log = python, log
        ours, theirs = socket.socketpair()
        try:
            self._output: IO[bytes] = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115  it is the server's too
            self._begin = os.fstat(self._output.fileno()).st_size
            self._process = ChildProcess(
                [python, "-E", "-P", "-c", _BOOT, *map(str, (*_PACKAGES, theirs.fileno(), os.getpid()))],
                descriptors=[theirs.fileno()],
                output=self._output,
                environment={LOUDNESS: "ERROR", **os.environ, **ENVIRONMENT},
                is_bound=True,
            )
        except OSError as error:
            ours.close()
            raise RolloutError(
                f"{python} cannot start vLLM's server",
                why=str(error),
                fix="set rollout.server to the Python interpreter of an environment with vLLM",
            ) from None
        finally:
            theirs.close()
        self.connection = ours
        """Socket to the server."""
        self._asked, self._was_stopped = threading.Event(), threading.Event()
        looking = (self._process, self._asked, self._was_stopped)
        threading.Thread(target=_end_stopped, args=looking, name="vLLM's server", daemon=True).start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def __str__(self) -> str:
        return f"vLLM's server (process {self.pid}, {self.python})"

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Mark the time of a request, in which the server must not be stopped."""
        self._asked.set()
        try:
            yield
        finally:
            self._asked.clear()

    def end(self) -> None:
        """Close the connection, on which the server ends by itself; kill it if it does not."""
        self.connection.close()
        self._process.end(alone_s=_END_S)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.end()

    def how_lost(self) -> str:
        """End the process, whose connection broke, and return how it ended, as the end of a sentence."""
        if self._was_stopped.is_set():
            self.kill()
            return f"was stopped for {STOPPED_S:g} s and then killed"
        if not self._process.ends_within(_END_S):
            self.kill()
            return "closed its connection and was killed"
        return f"ended {how_ended(self._process.wait())}"

    def was_killed(self) -> bool:
        """Return whether a signal has ended the process."""
        return (self._process.poll() or 0) < 0

    def last_lines(self) -> str:
        """Return the last lines of its output without warnings; empty if there are none."""
        size = os.fstat(self._output.fileno()).st_size
        begin = max(self._begin, size - _LOG_BYTES)
        text = os.pread(self._output.fileno(), size - begin, begin).decode(errors="replace")
        told = [line.strip()[:_LINE_LETTERS] for line in text.splitlines() if not _NOISE.search(line)]
        return "; ".join([*dict.fromkeys(filter(None, told))][-_LINES:])


_PACKAGES = (Path(rillflow.__file__).parent, Path(__file__).parents[1])


def _end_stopped(process: ChildProcess, asked: threading.Event, was_stopped: threading.Event) -> None:
    """Kill a process that is stopped while it is asked; only looks count that this thread made on time."""
    looks = 0
    while process.poll() is None:
        if not asked.wait(_LOOK_S):
            looks = 0
            continue
        looks = looks + 1 if _is_stopped(process.pid) else 0
        if looks > STOPPED_S / _LOOK_S:
            was_stopped.set()
            process.kill()
            return
        process.ends_within(_LOOK_S)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
