"""Watchdog: end Ray's processes so that nothing is left over, also if the driver is killed.

    driver ── starts ──> watchdog        a separate process in its own session
       ├── sends a byte ──> every process with the cluster's mark is killed
       └── has died ──────> the same, and the cluster's folder is removed

Ray's daemons end at once after a killed driver, but their helper processes need a minute. The watchdog runs
as a script and imports only the standard library.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "RILLFLOW_CLUSTER"
"""Environment variable that processes of a cluster inherit; its value is the cluster's folder."""
_LEAVE_S = 10.0
"""Longest time in seconds to leave a cluster."""
_LOOK_S = 0.5
"""Seconds between two checks that the driver is alive."""


def watch(folder: Path) -> subprocess.Popen[bytes]:
    """Start a watchdog over the cluster of this folder; ``end`` ends both."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end(watchdog: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End the cluster and wait for the watchdog, up to a timeout; a second call only waits.

    The byte tells a driver that leaves from one that died, whose pipe closes as well.
    """
    assert watchdog.stdin is not None, "watch opens a pipe to it"
    if not watchdog.stdin.closed:
        with suppress(BrokenPipeError):  # the watchdog has ended already
            watchdog.stdin.write(b"e")
            watchdog.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        watchdog.wait(timeout_s)


def end_once(watchdog: subprocess.Popen[bytes], is_left: Callable[[], bool]) -> None:
    """End the cluster in a background thread as soon as the driver has left it.

    Its daemons block SIGTERM (``workers.ray_cluster``), and Ray waits a second for each to react to one.
    """

    def wait() -> None:
        deadline = time.monotonic() + _LEAVE_S
        while not is_left() and time.monotonic() < deadline:
            time.sleep(0.01)
        if is_left():
            end(watchdog, 0.0)

    threading.Thread(target=wait, name="end of the cluster", daemon=True).start()


def _main(driver: int, folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it ends with the driver, not before
    is_told = False
    while os.getppid() == driver:
        if select.select([sys.stdin], [], [], _LOOK_S)[0]:
            is_told = bool(os.read(sys.stdin.fileno(), 1))
            break
    _kill_all(folder)
    deadline = time.monotonic() + _LEAVE_S
    # A driver that tells is in Ray's shutdown, which needs the folder; a killed one needs nothing any more.
    while not is_told and Path(folder).exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)  # fails while a process that is ending still writes into it
        _kill_all(folder)
        time.sleep(0.05)


def _kill_all(folder: str) -> None:
    """Kill every process of the cluster."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if _belongs(entry, folder):
                os.kill(int(entry.name), signal.SIGKILL)


def _belongs(process: Path, folder: str) -> bool:
    """Return whether a process belongs to the cluster.

    It has the cluster's mark, or, if Ray's title has overwritten the mark, an open file in its folder.
    """
    if (process / "cmdline").read_bytes().startswith(b"ray::"):
        return any(Path(folder) in each.readlink().parents for each in (process / "fd").iterdir())
    return f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
