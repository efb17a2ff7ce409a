"""Compute beside other programs: threads wait briefly, and are scheduled soon after they wake.

The threads of PyTorch meet at the end of every operation. While one of them has no core, the others wait:

    alone         the last thread arrives within microseconds: waiting threads spin, and go on at once
    busy machine  it arrives when another program's time slice ends, milliseconds later: threads that spin
                  until then spend their own share of the core, so the operation after it waits as well

OpenMP's default spins for milliseconds. ``share_cores`` bounds the spinning to tens of microseconds, and asks
the scheduler for short slices: a thread that wakes then runs before a program that computes without end. The
settings hold for all threads and child processes that start later.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import MutableMapping

SPINS = "5000"
"""Polls of a waiting OpenMP thread before it sleeps: some tens of microseconds."""
SLICE_NS = 100_000
"""Longest time on a core before another program's turn, in nanoseconds: the least that Linux accepts."""
WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which a user decides how threads wait."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call ``sched_setattr``, by machine."""


class _SchedulingAttributes(ctypes.Structure):
    """``struct sched_attr`` of Linux, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def share_cores(variables: MutableMapping[str, str] = os.environ) -> None:
    """Bound the spinning of OpenMP threads and shorten the time slices of this process.

    OpenMP reads the bound when torch is imported, so call this before. A user's own ``OMP_WAIT_POLICY`` or
    ``GOMP_SPINCOUNT`` counts. Linux before 6.12 and other systems keep their slices.

    Args:
        variables: the environment that the bound is written to.
    """
    if not any(name in variables for name in WAITS):
        variables[WAITS[0]] = SPINS
    shorten_slices()


def shorten_slices() -> None:
    """Ask for short time slices for this thread and all that it starts, unless it has a policy of its own."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    wanted = _SchedulingAttributes(
        size=ctypes.sizeof(_SchedulingAttributes),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime=SLICE_NS,
    )
    ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)  # a refusal changes nothing
