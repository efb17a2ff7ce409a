"""The watchdog: processes with its cluster's mark end with the driver, and no others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rillflow.workers.watchdog import MARK, end, watch

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


def _sleepers(*marks: Path) -> list[subprocess.Popen[bytes]]:
    """Start one process with each mark."""
    return [subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(mark)}) for mark in marks]


def _still_runs(process: subprocess.Popen[bytes]) -> None:
    """Assert that a process still runs, and end it."""
    assert process.poll() is None
    process.kill()
    process.wait(30)
