"""Supervisor: the process between the driver and the user's function that leaves no process behind.

    driver ─ spawns ─> supervisor ─ fork ─> keeper ─ fork ─> child: the user's function ─> its own processes
       │                  │    └ new pid namespace: the keeper is process 1, so its death ends all of them
       │<── status ───────┴──── the keeper reports how the child ended
       └─ frames <───────────────────────────────────> child

    supervisor    consumes the ends of processes and SIGTERM; waits for either, 50 ms at most; then checks
                  that the driver lives and that the function has not started too many processes; produces,
                  if any of these applies, the end of every process below it
    keeper        consumes the ends of processes; waits for the child's; unblocked by it or by being killed;
                  produces one line on the status pipe
    shuts down    healthy: SIGTERM from the driver; driver killed: detected within a tenth of a second;
        supervisor
                  killed: the kernel kills the keeper (its parent-death signal), and with it the namespace

There are two ways to end all processes. The kernel ends a pid namespace, which the sandbox includes. If no
namespace is available, the supervisor adopts orphans (child subreaper) and kills the process group and its
descendants in /proc. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from rillflow.isolation.kernel import PIDS, USERS, adopt_orphans, build_filter, end_with_parent, has_filter
from rillflow.isolation.sandbox import (
    SHUT_IN,
    Level,
    MemoryGroup,
    enclose,
    isolate,
    python_folders,
    show_own_processes,
)
from rillflow.rewards.calling import serve
from rillflow.rewards.isolated_process import IsolatedRows, NamespaceRules, describe_end, fork
from rillflow.rewards.programs import serve_programs
from rillflow.rewards.supervised import REFUSED, RUNNER, Supervised

MAX_PROCESSES = 512
"""Largest number of processes of one reward function; more count as a fork bomb."""

_TICK_S = 0.05
_KILL_LIMIT_S = 1.0
_NOTICED = MAX_PROCESSES // 8
_LINUX = sys.platform == "linux"

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_NO_NAMESPACE = (
    "no pid namespace: a process that a reward function detaches may outlive a killed supervisor"
    if _LINUX
    else "not Linux: a process that leaves the reward function's process group keeps running"
)


def main() -> NoReturn:
    """Run one child until it ends or must end; the command line has the package's root and a plan."""
    plan = Supervised.told(sys.argv[2])
    for descriptor in plan.passed:
        os.set_inheritable(descriptor, False)  # programs of the function do not inherit it
    try:
        held = _contain(plan)
    except OSError as error:
        os.write(plan.status, _refused(error).encode())
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
        _keep(plan, held)

    keeper = fork(keep)
    for descriptor in plan.passed - {plan.status}:
        os.close(descriptor)
    reason = _watch(keeper, plan.driver, woken)
    if reason:
        with contextlib.suppress(OSError):
            os.write(plan.status, reason.encode())
    _end_all(keeper)
    if held.group is not None:
        held.group.remove()
    os._exit(0)


def _note(number: int, frame: object) -> None:
    """Do nothing, so that a signal wakes the supervisor instead of ending it."""


# ---- the supervisor


def _watch(keeper: int, driver: int, woken: int) -> str:
    """Wait until all processes must end; return a message for the driver, or an empty text."""
    crowd = _Crowd(keeper)
    while os.getppid() == driver:
        select.select([woken], [], [], _TICK_S)
        numbers = os.read(woken, 4096) if select.select([woken], [], [], 0)[0] else b""
        if signal.SIGTERM in numbers or _reap(keeper):
            return ""
        size = crowd.size()
        if size > MAX_PROCESSES:
            return f"started {size} processes"
    return ""


def _reap(keeper: int | None = None) -> bool:
    """Reap ended processes; return whether the keeper was among them, or no child is left."""
    try:
        while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if process == keeper:
                return True
    except ChildProcessError:
        return True
    return False


class _Crowd:
    """Counter of descendants that counts only when the machine has many more tasks than at the last count.

    It stops the processes while it counts: otherwise a fork bomb would grow faster than the count.
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
    """Return the number of tasks of the machine, the one figure that is cheap to read ten times a second."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1]) if _LINUX else 0


def _descendants() -> list[int]:
    """Return the processes below this one, parents before children."""
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
    """Kill and reap every process below this one; stopping them first leaves none the time to fork."""
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


# ---- the keeper, and the child's work before the user's code


def _keep(plan: Supervised, held: _Held) -> None:
    """Run the child, reap orphans, and report how the child ended."""
    os.setsid()
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _go_first()
    if held.group is not None:
        held.group.join()
    if held.has_namespace and not held.level.is_sandbox:
        show_own_processes()
    try:
        runner = _shut_in(plan, held) if held.level.is_sandbox else None
    except OSError as error:
        os.write(plan.status, _refused(error).encode())
        return

    def run() -> None:
        os.close(plan.status)
        end_with_parent()
        faulthandler.enable()
        isolated = None
        if runner is not None:
            os.environ[RUNNER] = str(runner.fileno())
            sys.dont_write_bytecode = True
            kept = (plan.requests, plan.answers)
            isolated = IsolatedRows(rules=_rules(plan, held), kept=kept, folder=plan.visible.folder)
        serve(
            plan.requests,
            plan.answers,
            level=held.level,
            shortcomings=held.shortcomings,
            isolated=isolated,
        )

    child = held.runner if runner is None and held.runner else fork(run)
    for descriptor in filter(lambda each: each >= 0, (plan.requests, plan.answers)):
        os.close(descriptor)
    while True:
        process, ended = os.wait()
        if process == child:
            os.write(plan.status, describe_end(ended).encode())
            return


def _shut_in(plan: Supervised, held: _Held) -> socket.socket | None:
    """Enter the sandbox and start its runner; return the socket for requests, None if the driver has it."""
    enclose(plan.visible)
    if plan.door >= 0:
        _open_door(plan.door)
    if plan.programs >= 0:
        ours, theirs = None, socket.socket(fileno=plan.programs)
    else:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run_programs() -> None:
        end_with_parent()
        for descriptor in {plan.requests, plan.answers, plan.status} - {-1}:
            os.close(descriptor)
        if ours is not None:
            ours.close()
        serve_programs(theirs, _rules(plan, held), plan.visible)

    held.runner = fork(run_programs)
    theirs.close()
    if ours is not None and not ours.recv(16):
        raise OSError(0, "the process that runs programs ended at once")
    return ours


def _open_door(door: int) -> None:
    """Enable the loopback device and send a socket that listens on it."""
    with socket.socket(fileno=door) as driver, socket.socket() as listening:
        fcntl.ioctl(listening, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        socket.send_fds(driver, [b"door"], [listening.fileno()])


def _rules(plan: Supervised, held: _Held) -> NamespaceRules:
    is_counted = held.group is not None
    return NamespaceRules(
        has_users=held.level is Level.FULL,
        call_filter=build_filter(is_memory_counted=is_counted),
        watched_filter=build_filter(is_memory_counted=is_counted, is_watched=True),
        has_door=plan.door >= 0,
        python=_below_tmp([*python_folders(), *plan.visible.packages]),
        visible=_below_tmp([plan.visible.folder, *plan.visible.copies, *plan.visible.shown]),
    )


def _below_tmp(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("/tmp/")]


def _go_first() -> None:
    """Make the kernel kill this process and its forks before the trainer when memory runs out."""
    if _LINUX:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def _refused(error: OSError) -> str:
    reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error)
    return f"{REFUSED}: {reason}"


# ---- namespaces, memory group and sandbox


@dataclass(kw_only=True)
class _Held:
    """The containment of all processes below a supervisor."""

    level: Level = Level.NONE
    """Level that this machine provides."""
    has_namespace: bool = True
    """Whether the processes have a pid namespace."""
    group: MemoryGroup | None = None
    """Memory group of the sandbox."""
    shortcomings: list[str] = field(default_factory=list)
    """Guarantees that this machine lacks."""
    runner: int = 0
    """Process that runs programs."""


def _contain(plan: Supervised) -> _Held:
    """Apply the strongest available containment, up to the wanted level.

    Raises:
        OSError: a sandbox is wanted, and not available.
    """
    if plan.level.is_sandbox and not _LINUX:
        raise OSError(0, f"the sandbox needs Linux, and this is {sys.platform}")
    if _LINUX:
        adopt_orphans()
    if plan.level.is_sandbox:
        return _sandboxed(plan)
    for namespaces in (PIDS, PIDS | USERS) if _LINUX and plan.level is Level.NONE else ():
        # Tried in a fork first: a process cannot leave a namespace that fails halfway.
        if os.waitpid(fork(partial(_try, namespaces)), 0)[1] == 0:
            isolate(namespaces)
            return _Held()
    return _Held(has_namespace=False, shortcomings=[_NO_NAMESPACE])


def _sandboxed(plan: Supervised) -> _Held:
    if not has_filter():
        raise OSError(0, f"no seccomp filter exists for {os.uname().machine}")
    held = _Held()
    try:
        held.group = MemoryGroup.make(plan.memory_bytes) if plan.memory_bytes else None
    except OSError as error:
        held.shortcomings.append(f"no memory cgroup limits the sandbox as a whole ({error.strerror})")
    try:
        has_users = isolate(SHUT_IN, further_users=plan.level is Level.FULL)
    except OSError:
        if held.group is not None:
            held.group.remove()
        raise
    held.level = Level.FULL if has_users else Level.SHARED_USER
    return held


def _try(namespaces: int) -> int:
    try:
        isolate(namespaces)
    except OSError:
        return 1
    return 0
