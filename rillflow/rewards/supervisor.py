"""The process between the driver and the user's function: it sees to it that nothing survives.

    driver ─ spawns ─> supervisor ─ fork ─> keeper ─ fork ─> child: the user's function ─> its own processes
       │                  │    └ new pid namespace: the keeper is its process 1, so its death ends them all
       │<── status ───────┴──── the keeper tells how the child ended
       └─ frames <───────────────────────────────────> child

    supervisor    consumes the ends of processes and SIGTERM; waits for either, 50 ms at most;
                  then looks whether the driver lives and whether the function bred too many processes;
                  produces, when any of these comes true, the end of every process below it
    keeper        consumes the ends of processes; waits for the child's; unblocked by it or by being killed;
                  produces one line on the status pipe
    shuts down    healthy: SIGTERM from the driver; driver killed: seen within a tenth of a second; supervisor
                  killed: the kernel kills the keeper (its parent-death signal), and with it the namespace

There are two ways: the kernel ends a namespace, which the sandbox is one of; or, where none is to be had, the
supervisor adopts orphans (child subreaper) and kills the process group and what /proc shows below it.
Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NoReturn

from rillflow.rewards import sandbox
from rillflow.rewards.calling import serve
from rillflow.rewards.sandbox import PIDS, USERS, ask, enclose, isolate, show_own_processes

MAX_PROCESSES = 512
"""Processes one reward function may have at a time; more are taken for a fork bomb."""

_TICK_S = 0.05
_KILL_LIMIT_S = 1.0
_NOTICED = MAX_PROCESSES // 8
_LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Containment(StrEnum):
    """How the processes of a reward function are held together, the strongest first."""

    SANDBOX = "sandbox"
    """Namespaces of every kind and a root of its own, or an error; see rewards/sandbox.py."""
    NAMESPACE = "namespace"
    """A pid namespace: the kernel ends every process in it at once."""
    DESCENDANTS = "descendants"
    """Orphans are adopted, and what /proc shows below; without a /proc, the process group alone."""


_NO_NAMESPACE = (
    "there is no pid namespace: a process that a reward function detaches may outlive a killed supervisor"
    if _LINUX
    else "this is no Linux: a process that leaves the reward function's process group lives on"
)


def main() -> NoReturn:
    """Run one child until it ends or must end.

    The command line tells the package's root, the descriptors of requests, answers and status, the driver's
    process id, the containment wanted and, for the sandbox, the function's folder.
    """
    requests, answers, status, driver = (int(argument) for argument in sys.argv[2:6])
    for descriptor in (requests, answers, status):
        os.set_inheritable(descriptor, False)  # programs the function starts have no part in this
    try:
        containment = _contain(Containment(sys.argv[6]))
    except OSError as error:
        os.write(status, _refused(error).encode())
        os._exit(1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, _note)
    signal.set_wakeup_fd(wake)

    def keep() -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in (woken, wake):
            os.close(descriptor)
        _keep(requests, answers, status, containment)

    keeper = _fork(keep)
    for descriptor in (requests, answers):
        os.close(descriptor)
    reason = _watch(keeper, driver, woken)
    if reason:
        with contextlib.suppress(OSError):
            os.write(status, reason.encode())
    _end_all(keeper)
    os._exit(0)


def _note(number: int, frame: object) -> None:
    """Make a signal wake the supervisor instead of ending it."""


def _fork(run: Callable[[], None]) -> int:
    """Fork a process that runs this function and then ends, whatever happens in it."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        run()
        code = 0
    except BaseException:  # noqa: BLE001  the supervision boundary: a fork must not return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


# ---- the supervisor


def _watch(keeper: int, driver: int, woken: int) -> str:
    """Wait until everything has to end; return what the driver should be told, if it should."""
    crowd = _Crowd(keeper)
    while os.getppid() == driver:
        select.select([woken], [], [], _TICK_S)
        numbers = os.read(woken, 4096) if select.select([woken], [], [], 0)[0] else b""
        if signal.SIGTERM in numbers or _reap(keeper):
            return ""
        size = crowd.size()
        if size > MAX_PROCESSES:
            return f"bred {size} processes"
    return ""


def _reap(keeper: int | None = None) -> bool:
    """Collect the processes that ended; say whether the keeper was among them, or nothing is left."""
    try:
        while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if process == keeper:
                return True
    except ChildProcessError:
        return True
    return False


class _Crowd:
    """Counts descendants, but only when the whole machine has many more tasks than when last counted.

    They stand still meanwhile: a fork bomb grows with the processor time that it takes from the count.
    """

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._tasks = _num_tasks()

    def size(self) -> int:
        tasks = _num_tasks()
        if tasks < self._tasks + _NOTICED:
            self._tasks = min(self._tasks, tasks)
            return 0
        self._tasks = tasks
        _signal_group(self._keeper, signal.SIGSTOP)
        size = len(_descendants())
        if size <= MAX_PROCESSES:
            _signal_group(self._keeper, signal.SIGCONT)
        return size


def _num_tasks() -> int:
    """Tasks of the whole machine: the one figure that is cheap to read ten times a second."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1]) if _LINUX else 0


def _descendants() -> list[int]:
    """The processes below this one, parents before children."""
    if not _LINUX:
        return []
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_bytes().rpartition(b")")[2]
                children.setdefault(int(after_name.split()[1]), []).append(int(entry.name))
    found = list(children.get(os.getpid(), ()))
    for process in found:
        found.extend(children.get(process, ()))
    return found


def _end_all(keeper: int) -> None:
    """Kill and collect every process below this one; stopping them first leaves none the time to fork."""
    _signal_group(keeper, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(keeper, signal.SIGKILL)
    until = time.monotonic() + _KILL_LIMIT_S
    while not _reap() and time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in _descendants():
                with contextlib.suppress(OSError):
                    os.kill(process, number)
        time.sleep(0.001)


def _signal_group(keeper: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(keeper, number)


# ---- the keeper, and what the child does before the user's code


def _keep(requests: int, answers: int, status: int, containment: Containment) -> None:
    """Run the child, collect orphans, and tell how the child ended."""
    os.setsid()
    _end_with_parent()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _go_first()
    if containment is Containment.NAMESPACE:
        show_own_processes()
    elif containment is Containment.SANDBOX:
        try:
            enclose(sys.argv[7])
        except OSError as error:
            os.write(status, _refused(error).encode())
            return

    def run() -> None:
        os.close(status)
        _end_with_parent()
        faulthandler.enable()
        serve(requests, answers, [_NO_NAMESPACE] if containment is Containment.DESCENDANTS else [])

    child = _fork(run)
    for descriptor in (requests, answers):
        os.close(descriptor)
    while True:
        process, ended = os.wait()
        if process == child:
            os.write(status, _describe_end(ended).encode())
            return


def _go_first() -> None:
    """When memory runs out, this process and those it forks should go, not the trainer."""
    if _LINUX:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def _refused(error: OSError) -> str:
    return f"could not be shut in, as reward.sandbox asks: {error}"


def _describe_end(ended: int) -> str:
    code = os.waitstatus_to_exitcode(ended)
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "no name"
    memory = ", as happens when the machine runs out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}){memory}"


# ---- the kernel's part


def _contain(wanted: Containment) -> Containment:
    """Take the strongest containment there is, up to the one wanted.

    Raises:
        OSError: the sandbox is wanted, and not to be had.
    """
    if not _LINUX and wanted is Containment.SANDBOX:
        raise OSError(0, f"user namespaces: this is {sys.platform}, and Linux has them")
    if not _LINUX:
        return Containment.DESCENDANTS
    ask("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if wanted is Containment.SANDBOX:
        isolate(sandbox.SHUT_IN)
        return wanted
    for namespaces in (PIDS, PIDS | USERS) if wanted is Containment.NAMESPACE else ():
        # Asked of a fork first: a namespace that turns out half made cannot be left again.
        if os.waitpid(_fork(partial(_try, namespaces)), 0)[1] == 0:
            isolate(namespaces)
            return wanted
    return Containment.DESCENDANTS


def _try(namespaces: int) -> None:
    try:
        isolate(namespaces)
    except OSError:
        os._exit(1)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    if _LINUX:
        ask("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
