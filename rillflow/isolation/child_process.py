"""Child process: start a process in a session of its own, and end it in a bounded time.

    this process ── ChildProcess ──> the child, which Ctrl-C and a closed screen do not reach
         ├─ end: the child ends by itself, alone_s ──> SIGTERM, terminated_s ──> SIGKILL
         └─ ends, kill -9 included ──> the kernel kills a child that called ``end_with``

The kernel watches the thread that started the child, so a bound child is started by a thread that lives as
long as the child. What passes between the two is the owner's: ``isolation.frames`` for JSON, ``workers.wire``
for arrays, ``workers.shared_memory``, or the packets of a SOCK_SEQPACKET socket. Imports only the standard
library, so that a child starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_BEGIN = (
    "import sys; from rillflow.isolation.child_process import begin_child; begin_child(int(sys.argv[1])); "
)
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A process that this one has started.

    Args:
        command: the program and its arguments.
        descriptors: file descriptors that stay open in it.
        output: file or descriptor of its standard output and error; None: those of this process.
        environment: its environment variables; None: those of this process.
        is_bound: whether it calls ``end_with``.
        leaves_signals: whether ending signals are blocked in it until it calls ``begin_child``.

    Raises:
        OSError: the system cannot start the program.

    Example:
        child = ChildProcess(["sleep", "60"])
        code = child.end(terminated_s=1.0)
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        descriptors: Sequence[int] = (),
        output: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        is_bound: bool = False,
        leaves_signals: bool = False,
    ) -> None:
        self._command, self._descriptors, self._output = command, descriptors, output
        self._environment, self._leaves_signals = environment, leaves_signals
        if not is_bound:
            self._process = self._started()
            return
        is_tried, self._refusal = threading.Event(), list[OSError]()
        name = f"parent of {Path(command[0]).name}"
        threading.Thread(target=self._be_parent, args=(is_tried,), name=name, daemon=True).start()
        is_tried.wait()
        if self._refusal:
            raise self._refusal[0]

    def _started(self) -> subprocess.Popen[bytes]:
        if not self._leaves_signals:
            return self._opened()
        from rillflow.runs.ending_signals import blocked

        with blocked():
            return self._opened()

    def _opened(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=self._descriptors,
            env=self._environment,
            start_new_session=True,
        )

    def _be_parent(self, is_tried: threading.Event) -> None:
        """Start the process, and live until it has ended."""
        try:
            self._process = self._started()
            ended = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._refusal.append(error)
            return
        finally:
            is_tried.set()
        poller = select.poll()
        poller.register(ended, select.POLLIN)
        poller.poll()
        os.close(ended)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, or its signal's number below zero; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, unless it has ended; do not wait for its end."""
        self._process.kill()

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, or its signal's number below zero."""
        return self._process.wait()

    def ends_within(self, limit_s: float | None) -> bool:
        """Wait for the end of the process, up to a limit if there is one; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.returncode is not None

    def end_all(self) -> int:
        """Kill the process, unless it has ended, with all processes of its group; return its code.

        They are killed, too, if the process itself has ended.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait()

    def end(
        self, *, alone_s: float = 0.0, terminated_s: float = 0.0, killed_s: float | None = None
    ) -> int | None:
        """End the process; return its exit code, or its signal's number below zero.

        Args:
            alone_s: seconds in which it ends by itself, because the caller has closed its socket.
            terminated_s: seconds that it has after SIGTERM; 0: it gets none.
            killed_s: longest wait after SIGKILL; None: until it has ended.

        Returns:
            The code; None if the kernel does not end the process in ``killed_s``.
        """
        if alone_s and self.ends_within(alone_s):
            return self.poll()
        if terminated_s:
            self._process.terminate()
            if self.ends_within(terminated_s):
                return self.poll()
        self._process.kill()
        if killed_s is None:
            return self.wait()
        self.ends_within(killed_s)
        return self.poll()


def start_python(
    boot: str, *arguments: int, descriptors: Sequence[int], told: Mapping[str, str] | None = None
) -> ChildProcess:
    """Start a Python process that can import what this one can; it leaves ending signals to this one.

    Args:
        boot: its code, which calls ``end_with``; ``sys.argv[1]`` is this process's id, ``arguments`` follow.
        arguments: numbers for the code.
        descriptors: file descriptors that stay open in it.
        told: further environment variables.

    Raises:
        OSError: the system cannot start another process.
    """
    return ChildProcess(
        [sys.executable, "-c", _BEGIN + boot, *map(str, (os.getpid(), *arguments))],
        descriptors=descriptors,
        environment={**python_environment(), **(told or {})},
        is_bound=True,
        leaves_signals=True,
    )


def python_environment() -> dict[str, str]:
    """Return this process's environment variables, for a Python that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def begin_child(driver: int) -> None:
    """Let a process of ``start_python`` outlive the signals and the screen of its driver."""
    from rillflow.runs.ending_signals import leave_to_driver
    from rillflow.runs.standard_streams import keep_going

    leave_to_driver(driver)
    keep_going()


def end_with(driver: int) -> None:
    """Let the kernel kill this process, a child of the driver, when the thread that started it ends.

    That holds for a process that is stopped, too, and for one whose call holds Python's interpreter lock.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # it ended before
        os._exit(1)


def how_ended(code: int) -> str:
    """Return how a process ended, in words: with its exit code, or by a signal."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
