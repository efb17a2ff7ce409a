"""Kernel: Linux system calls that Python 3.11 lacks, through the C library. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from functools import cache

USERS, PIDS, MOUNTS = 0x10000000, 0x20000000, 0x00020000
"""CLONE_NEWUSER, CLONE_NEWPID and CLONE_NEWNS."""
NETWORK, IPC, HOST_NAME = 0x40000000, 0x08000000, 0x04000000
"""CLONE_NEWNET, CLONE_NEWIPC and CLONE_NEWUTS."""
READ_ONLY, NO_SET_USER, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
BIND, MOVE, RECURSIVE, PRIVATE, SLAVE = 0x1000, 0x2000, 0x4000, 0x40000, 0x80000
ALL_BELOW = 0x8000
"""AT_RECURSIVE."""

_MOUNT_SETATTR, _AT_FDCWD = 442, -100
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION, _LAST_CAPABILITY = 0x20080522, 63


def ask(call: str, *arguments: object, about: str = "") -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if _library()[call](*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}{f' {about}' if about else ''}: {os.strerror(number)}")


@cache
def _library() -> ctypes.CDLL:
    """Return the C library, cached: a cell takes about twenty calls, and opening it costs more than most."""
    return ctypes.CDLL(None, use_errno=True)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    arguments = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    ask("mount", *arguments[:3], ctypes.c_ulong(flags), arguments[3], about=target)


def set_attributes(target: str, flags: int, add: int = 0, remove: int = 0) -> None:
    """mount_setattr(2); its read-only and no-set-user-id bits equal those of mount(2)."""
    wanted = struct.pack("QQQQ", add, remove, 0, 0)
    ask("syscall", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, wanted, len(wanted), about=target)


def enter(namespace: int, kind: int) -> None:
    """Move this process, or its next forks, into a namespace given by its descriptor."""
    ask("setns", namespace, kind)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants."""
    ask("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ask("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Close this process to ptrace and to /proc/PID/mem, fd and environ, also for the same user."""
    ask("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_bounding_capabilities() -> None:
    """Prevent programs started from here from gaining any capability."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            ask("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:  # this kernel has fewer
            return


def drop_capabilities() -> None:
    """Drop every capability permanently."""
    ask("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ask("capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))
