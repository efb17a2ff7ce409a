"""The watchdog: processes with its cluster's mark end with the driver, and no others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rillflow.workers.watchdog import MARK, end, end_once, watch

_DRIVER = """
import pathlib, sys
from rillflow.workers.watchdog import watch
watchdog = watch(pathlib.Path(sys.argv[1]))
print(watchdog.pid, flush=True)
sys.stdin.read()
"""
"""A driver that starts a watchdog, prints its process id and waits to be killed."""


def test_a_driver_that_leaves_ends_marked_processes_and_keeps_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    ours, theirs = _sleepers(folder, tmp_path / "another")
    watchdog = watch(folder)
    end(watchdog, 30.0)
    assert watchdog.poll() == 0
    assert ours.wait(30) == -signal.SIGKILL and folder.exists()
    _still_runs(theirs)


def test_marked_processes_and_the_folder_go_with_a_killed_driver(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    ours, theirs = _sleepers(folder, tmp_path / "another")
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None and int(driver.stdout.readline()) > 0
    driver.kill()
    driver.communicate(timeout=30)
    assert ours.wait(30) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    _still_runs(theirs)


def test_a_cluster_ends_in_the_background_only_once_its_driver_has_left(tmp_path: Path) -> None:
    (ours,) = _sleepers(tmp_path)
    watchdog, answers = watch(tmp_path), iter((False, False, False))
    asked = list[int | None]()

    def is_left() -> bool:
        asked.append(ours.poll())
        return next(answers, True)

    end_once(watchdog, is_left)
    assert watchdog.wait(30) == 0 and ours.wait(30) == -signal.SIGKILL
    assert asked[:4] == [None] * 4, "nothing ends while the driver is there"


def _sleepers(*marks: Path) -> list[subprocess.Popen[bytes]]:
    """Start one process with each mark."""
    return [subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(mark)}) for mark in marks]


def _still_runs(process: subprocess.Popen[bytes]) -> None:
    """Assert that a process still runs, and end it."""
    assert process.poll() is None
    process.kill()
    process.wait(30)
