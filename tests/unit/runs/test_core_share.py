"""Core share: a run that waits for cores of other programs says so; its own threads alone do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rillflow.runs.core_share import CoreShare, CoreTime, between, thread_times


def test_times_of_a_process_and_its_descendants_are_read(tmp_path: Path) -> None:
    for process, parent, counters in [(5, 1, "2000000000 500000000 7"), (6, 5, "1 2 3"), (7, 1, "9 9 9")]:
        folder = tmp_path / str(process)
        (folder / "task" / str(process)).mkdir(parents=True)
        (folder / "stat").write_text(f"{process} (a (name) 3) S {parent} 0 0")
        (folder / "task" / str(process) / "schedstat").write_text(counters)
    (tmp_path / "6" / "task" / "61").mkdir()  # a thread that has ended
    assert thread_times(5, tmp_path) == {
        "5": CoreTime(ran_s=2.0, waited_s=0.5),
        "6": CoreTime(ran_s=1e-9, waited_s=2e-9),
    }


def test_threads_that_only_one_look_saw_do_not_count() -> None:
    before = {"1": CoreTime(ran_s=1.0, waited_s=1.0), "2": CoreTime(ran_s=50.0)}
    after = {"1": CoreTime(ran_s=1.5, waited_s=3.0), "3": CoreTime(ran_s=90.0)}
    assert between(before, after) == CoreTime(ran_s=0.5, waited_s=2.0)


@pytest.mark.parametrize(
    ("used", "lacks"),
    [
        (CoreTime(ran_s=10.0, waited_s=10.0), False),  # all cores of the run: its own threads wait
        (CoreTime(ran_s=4.0, waited_s=6.0), True),
        (CoreTime(ran_s=4.0, waited_s=1.0), False),  # it has little to compute
        (CoreTime(ran_s=0.1, waited_s=0.2), False),
        (CoreTime(), False),
    ],
)
def test_a_run_lacks_cores_if_it_waits_for_cores_that_it_does_not_use(used: CoreTime, lacks: bool) -> None:
    assert used.lacks_cores(10.0) == lacks


START = """
import subprocess, sys
loop = [sys.executable, "-S", "-c", "while True: pass"]
for _ in range(int(sys.argv[1])):
    print(subprocess.Popen(loop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""


def orphans(count: int) -> list[int]:
    """Start busy loops that are no children of this process, and return their ids."""
    command = [sys.executable, "-S", "-c", START, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's counters of Linux")
def test_a_busy_machine_is_noted_once_and_at_the_end() -> None:
    notes, others = list[str](), len(os.sched_getaffinity(0)) * 3
    loops = orphans(others)
    try:
        with CoreShare(notes.append, len(os.sched_getaffinity(0)), look_s=0.2):
            ends = time.monotonic() + 60
            while not notes and time.monotonic() < ends:
                sum(range(10_000))
    finally:
        for loop in loops:
            os.kill(loop, signal.SIGKILL)
    assert "other programs use the rest" in notes[0]
    assert len(notes) == 2 and "on average" in notes[1]
    assert "core share" not in {thread.name for thread in threading.enumerate()}
