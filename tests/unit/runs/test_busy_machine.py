"""Sharing cores: bounded spinning and short slices, unless the user decided otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rillflow.runs.busy_machine import SLICE_NS, SPINS, share_cores

SHOWS = """
import os, subprocess, sys
{before}
from rillflow.runs.busy_machine import share_cores
share_cores()
def slice_of(lines): return next((line.split()[-1] for line in lines if line.startswith("se.slice")), None)
print(os.environ.get("GOMP_SPINCOUNT"), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
print(slice_of(open("/proc/self/sched")))
print(slice_of(subprocess.check_output(["cat", "/proc/self/sched"], text=True).splitlines()))
"""


def shown(before: str = "", **variables: str) -> list[str]:
    """Return what a process and its child have after ``share_cores``."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT",)}
    code = SHOWS.format(before=before)
    return subprocess.check_output([sys.executable, "-c", code], env=kept | variables, text=True).splitlines()


def test_a_user_who_chose_how_threads_wait_keeps_it() -> None:
    for chosen in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}):
        variables = dict(chosen)
        share_cores(variables)
        assert variables == chosen
    variables = {}
    share_cores(variables)
    assert variables == {"GOMP_SPINCOUNT": SPINS}


@pytest.mark.skipif(sys.platform != "linux", reason="schedulers of Linux")
def test_priority_and_policy_of_the_user_stay() -> None:
    assert shown("os.nice(3)")[0] == f"{SPINS} {os.SCHED_OTHER} {os.nice(0) + 3}"
    batch = "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    assert shown(batch)[0].split()[1] == str(os.SCHED_BATCH)


def has_slices() -> bool:
    """Return whether the kernel has slices of threads and shows them."""
    major, minor = map(int, platform.release().split(".")[:2]) if sys.platform == "linux" else (0, 0)
    return (major, minor) >= (6, 12) and Path("/proc/self/sched").exists()


@pytest.mark.skipif(not has_slices(), reason="slices of threads need Linux 6.12 and /proc/self/sched")
def test_slices_are_short_in_the_process_and_its_children() -> None:
    assert shown()[1:] == [str(SLICE_NS), str(SLICE_NS)]
