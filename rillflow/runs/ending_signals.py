"""Ending signals: the signals that end a process by default, and who handles them.

    command, before it trains    first signal: Signalled ends it
    run (``controller.interrupt``)   first signal: saves, then ends; a second one: ends at once
    server                       first signal: answers what is open, then ends
    rank, fork server, environment   nothing: the driver receives the signal too, saves, and ends its children

A signal that is ignored when the process starts stays ignored, as ``nohup`` needs it for SIGHUP. A handler
that a program or a library has installed stays too, except for SIGINT and SIGTERM. Python itself ignores
SIGPIPE and SIGXFSZ: a write then fails with an error. Signals of faults (SIGSEGV, SIGBUS, SIGILL, SIGFPE,
SIGTRAP, SIGSYS) are left alone, because a handler would return to the fault. Standard library only.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

_FAULTS = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS),
}
_NOT_ENDING = {
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH),
}
ENDING = tuple(sorted(signal.valid_signals() - {signal.SIGKILL} - _FAULTS - _NOT_ENDING))
"""Numbers of the signals that end a process by default and that it can handle, real-time signals included."""
REPEAT_S = 1.0
"""A signal that comes again within this many seconds counts as the first. A launcher such as ``timeout`` or
``srun`` forwards to its child the signal that the whole process group already received; a shell sends SIGHUP
to its jobs after the kernel did."""
CPU_MARGIN = 0.1
"""Share of a hard limit of processor time that is left when the run receives SIGXCPU."""
_CPU_MARGIN_S = 5
_BY_HAND = {signal.SIGINT, signal.SIGQUIT}


def signal_name(number: int) -> str:
    """Return the name of a signal. Example: ``signal_name(15) == "SIGTERM"``, or ``"SIGRTMIN+3"``."""
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"SIGRTMIN+{number - signal.SIGRTMIN}"


class SignalHandler:
    """A handler of this module; another one may replace it while it is in charge.

    Args:
        receive: called with the number of the signal, in the main thread.
    """

    def __init__(self, receive: Callable[[int], None]) -> None:
        self._receive = receive

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """See ``signal.signal``."""
        del frame
        self._receive(number)


class RepeatedSignals:
    """Tells which signals after the first one mean: end at once.

    Ctrl-C and Ctrl-backslash do, always. Another signal does if it comes again after REPEAT_S. A SIGTERM
    after Ctrl-C does too; after a warning such as SIGUSR1 it is the second step of a scheduler, and counts as
    the first. SIGXCPU never does: the kernel repeats it every second.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_s: dict[int, float] = {}

    def add(self, number: int) -> bool:
        """Record a signal; return whether it means to end at once. The first one never does."""
        before, now_s = dict(self._first_s), self._clock()
        self._first_s.setdefault(number, now_s)
        if not before or number == signal.SIGXCPU:
            return False
        if number in _BY_HAND or (number == signal.SIGTERM and _BY_HAND & before.keys()):
            return True
        return now_s - before.get(number, math.inf) >= REPEAT_S


def install(handler: SignalHandler) -> dict[int, Any]:
    """Handle all ending signals that this process may handle; return the handlers that were there.

    Outside the main thread Python allows no signal handler: nothing is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    elsewhere = _caught()
    return {number: signal.signal(number, handler) for number in ENDING if _is_free(number, elsewhere)}


def restore(handlers: Mapping[int, Any]) -> None:
    """Put handlers back that ``install`` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def handled(receive: Callable[[int], None]) -> Iterator[None]:
    """Call a function with the number of each ending signal."""
    before = install(SignalHandler(receive))
    try:
        yield
    finally:
        restore(before)


def leave_to_driver(driver: int = 0) -> None:
    """Make this process, a child of a run, outlive ending signals: the driver needs it to save.

    Programs that it starts have the default again: ``exec`` resets a Python handler, but would keep SIG_IGN.

    Args:
        driver: process that is told when this one reaches its limit of processor time; 0: none.
    """

    def receive(number: int) -> None:
        if driver and number == signal.SIGXCPU:
            with suppress(ProcessLookupError):
                os.kill(driver, number)

    for number in install(SignalHandler(receive)):
        signal.siginterrupt(number, False)  # a library's system call goes on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextmanager
def blocked() -> Iterator[None]:
    """Block ending signals in this thread; a child that it starts has them blocked until it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warn_before_cpu_limit() -> Callable[[], None]:
    """Have SIGXCPU come before the end of a limit of processor time; return the function that undoes it.

    At its hard limit a process is killed. ``ulimit -t`` sets both limits, so that nothing would come before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    warned = int(hard - max(_CPU_MARGIN_S, CPU_MARGIN * hard))
    if hard == resource.RLIM_INFINITY or 0 <= soft <= warned or warned <= 0:
        return lambda: None
    resource.setrlimit(resource.RLIMIT_CPU, (warned, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _is_free(number: int, elsewhere: int) -> bool:
    """Return whether nobody else handles or ignores a signal.

    Args:
        number: the signal.
        elsewhere: see ``_caught``.
    """
    handler = signal.getsignal(number)
    if handler in (signal.SIG_IGN, None):
        return False
    if number in (signal.SIGINT, signal.SIGTERM) or isinstance(handler, SignalHandler):
        return True
    return handler is signal.SIG_DFL and not elsewhere >> (number - 1) & 1


def _caught() -> int:
    """Return the set of signals with a handler, also of a library in C, which Python does not know."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16)
    return 0
