"""Program watch: end what a row's program leaves behind, before the function learns that the program ended.

    function, process 1 of its namespace ── fork, vfork, clone, wait4, waitid ── seccomp ──> ProgramWatch, in
                                    <── go on, or "not yet" ──────────────────────────  the warm process

    consumes      notifications of the namespace's filter; the ends of processes for which the function waits
    waits for     nothing; ``isolated_process`` polls its descriptors
    unblocked by  a notification, or the end of a process
    produces      a reply to each: a call that starts a process goes on at once; a wait of the function for a
                  program goes on when the program has ended and everything that it left is killed
    shuts down    with the namespace, whose end closes the notifications

Every process of a namespace needs a reply before it can fork, so nothing is born while leftovers are killed.
A leftover is a process that descends from no running child of the function. A child that the function started
is told from an orphan, which process 1 adopts, by the order of replies: between two of them only one can be
born. Standard library only.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst, "Userspace Notification".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rillflow.isolation.kernel import COUNT_PROGRAMS, waiting_calls

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTICE = struct.Struct("=QIIiIQ6Q")
_REPLY = struct.Struct("=QqiI")
_GO_ON = 1
"""SECCOMP_USER_NOTIF_FLAG_CONTINUE."""
_FORKED = 0x40
"""PF_FORKNOEXEC: the process has not loaded a program since its fork."""
_KILL_LIMIT_S = 2.0
_BIRTH_LIMIT_S = 0.05
_PAUSE_S = 0.0002


@dataclass(frozen=True, kw_only=True)
class _Process:
    """One process below the namespace's process 1, read from /proc."""

    process: int
    """Process id."""
    parent: int
    """Process id of its parent."""
    started: int
    """Start time in clock ticks; with the id it names the process."""
    is_dead: bool
    """Whether all its threads have ended."""
    has_program: bool
    """Whether it has loaded a program."""


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A call of the function that waits for a child."""

    notice: int
    """Number of the notification."""
    caller: int
    """The waiting process."""
    child: int
    """Process id, in the namespace, of the child; 0: any."""


class ProgramWatch:
    """Watch over the programs of one namespace.

    Args:
        first: process 1 of the namespace.
        control: socket through which process 1 sends the descriptor of its notifications.
    """

    def __init__(self, first: int, control: socket.socket) -> None:
        self._first, self._control = first, control
        self._listener = -1
        self._children: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._seen: set[tuple[int, int]] = set()
        self._starter = 0
        self._waits: list[_Wait] = []

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll."""
        source = self._listener if self._listener >= 0 else self._control.fileno()
        return [*([source] if source >= 0 else ()), *self._ends.values()]

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (self._listener, *self._ends.values()):
            if descriptor >= 0:
                os.close(descriptor)
        self._control.close()

    def advance(self, ready: set[int]) -> None:
        """Reply to a notification, and to waits that are over."""
        if self._listener < 0 and self._control.fileno() in ready:
            _, descriptors, *_ = socket.recv_fds(self._control, 16, 1)
            self._control.close()
            self._listener = descriptors[0] if descriptors else -1
        elif self._listener in ready:
            self._hear()
        if ready & set(self._ends.values()):
            self._settle(0)
        waits, self._waits = self._waits, []
        for wait in waits:
            self._answer(wait, may_hold=True)

    def _hear(self) -> None:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, notice)
        except OSError:  # the caller has ended, or the namespace
            if not _exists(self._first):
                os.close(self._listener)
                self._listener = -1
            return
        number, thread, _, call, _, _, first, second, third, fourth, *_ = _NOTICE.unpack(notice)
        caller = _group_of(thread)
        if call not in waiting_calls():
            if caller != self._first:
                self._note_birth(list(self._processes()) if self._starter else [], thread)
            else:
                self._settle(thread)
                self._seen = {(each.process, each.started) for each in self._processes()}
                self._starter = thread
            self._reply(number)
            return
        if call == waiting_calls()[1] and first & 0xFFFFFFFF == COUNT_PROGRAMS:
            self._settle(thread)
            running = [each for each in self._processes() if each.has_program and not each.is_dead]
            self._reply(number, value=len(running))
            return
        is_by_id = call == waiting_calls()[1]
        options = fourth if is_by_id else third
        child = _signed(second if is_by_id else first)
        if is_by_id and first & 0xFFFFFFFF != os.P_PID:
            child = 0
        wait = _Wait(notice=number, caller=caller, child=max(0, child))
        if self._is_functions(caller):
            self._settle(thread)
            self._answer(wait, may_hold=not options & os.WNOHANG)
        else:
            self._reply(number)

    def _answer(self, wait: _Wait, *, may_hold: bool) -> None:
        """Let a wait go on if a child of it has ended or there is none; else hold it, or answer "not yet"."""
        children = [each for each in self._processes() if each.parent == wait.caller]
        if wait.child:
            children = [each for each in children if _id_inside(each.process) == wait.child]
        if not children:
            self._reply(wait.notice)
        elif any(each.is_dead for each in children):
            self._settle(0)
            self._reply(wait.notice)
        elif may_hold:
            self._waits.append(wait)
            for each in children:
                self._watch(each.process)
        else:
            self._reply(wait.notice, value=0, goes_on=False)

    def _reply(self, number: int, value: int = -1, *, goes_on: bool = True) -> None:
        """Reply to a notification: the call goes on, or returns a value."""
        goes_on = goes_on and value < 0
        reply = _REPLY.pack(number, 0 if goes_on else value, 0, _GO_ON if goes_on else 0)
        with contextlib.suppress(OSError):  # a signal has interrupted the call, or its process has ended
            fcntl.ioctl(self._listener, _SEND, reply)

    def _is_functions(self, process: int) -> bool:
        """Return whether a process is the function, or a fork of it that has loaded no program."""
        every = {each.process: each for each in self._processes()}
        while process != self._first:
            if process not in every or every[process].has_program:
                return False
            process = every[process].parent
        return True

    def _settle(self, thread: int) -> None:
        """Note the child that the function started last; kill every process that a program left behind.

        Args:
            thread: thread whose call is open; 0: none.
        """
        until = time.monotonic() + _KILL_LIMIT_S
        while True:
            every = list(self._processes())
            self._note_birth(every, thread)
            for process in [*self._ends]:
                if process not in {each.process for each in every if not each.is_dead}:
                    os.close(self._ends.pop(process))
                    self._children.pop(process, None)
            left = [each for each in every if not each.is_dead and not self._is_held(each, every)]
            if not left:
                return
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.process, signal.SIGKILL)
            if time.monotonic() > until:  # the kernel waits for a device: the row ends
                os.kill(self._first, signal.SIGKILL)
                return
            time.sleep(_PAUSE_S)

    def _note_birth(self, every: list[_Process], thread: int) -> None:
        """Find the child whose start was let go on last: the only process since then."""
        until = time.monotonic() + _BIRTH_LIMIT_S
        while self._starter:
            own = [each for each in every if each.parent == self._first]
            born = [each for each in own if (each.process, each.started) not in self._seen]
            for each in born:
                self._children[each.process] = each.started
                if not each.is_dead:
                    self._watch(each.process)
            if born or thread == self._starter or time.monotonic() > until:
                self._starter = 0
                return
            time.sleep(_PAUSE_S)
            every[:] = self._processes()

    def _is_held(self, process: _Process, every: list[_Process]) -> bool:
        """Return whether a process descends from a running child of the function."""
        parents = {each.process: each for each in every}
        while process.parent in parents:
            process = parents[process.parent]
        return self._children.get(process.process) == process.started and not process.is_dead

    def _watch(self, process: int) -> None:
        if process not in self._ends:
            with contextlib.suppress(ProcessLookupError):
                self._ends[process] = os.pidfd_open(process)

    def _processes(self) -> Iterator[_Process]:
        """Yield all processes of the namespace but process 1."""
        every = {each.process: each for each in _all_processes()}
        for each in every.values():
            parent = each.parent
            while parent != self._first and parent in every:
                parent = every[parent].parent
            if parent == self._first:
                yield each


def _all_processes() -> Iterator[_Process]:
    for entry in os.scandir("/proc"):
        name = entry.name
        if not name.isdigit():
            continue
        try:
            known = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        yield _Process(
            process=int(name),
            parent=int(known[1]),
            started=int(known[19]),
            is_dead=known[0] in b"ZX" and int(known[17]) <= 1,
            has_program=not int(known[6]) & _FORKED,
        )


def _status_of(process: int, field: str) -> list[int]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return [0]
    return [int(each) for line in lines if line.startswith(f"{field}:") for each in line.split()[1:]] or [0]


def _group_of(thread: int) -> int:
    """Return the process of a thread."""
    return _status_of(thread, "Tgid")[0]


def _id_inside(process: int) -> int:
    """Return the id of a process in its own, innermost pid namespace."""
    return _status_of(process, "NSpid")[-1]


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _exists(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
