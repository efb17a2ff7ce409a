"""Watchdog: ends what a cluster of ours has left, where the driver could not.

    driver ── started with it ──> watchdog        a process of its own, in a session of its own
       ├── its pipe closed ──> every process with the cluster's mark is killed
       └── gone ─────────────> so too, and the cluster's folder removed

Ray's daemons follow a killed driver at once; their own helpers do so after a minute. Run as a file, it
imports the standard library alone.
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
"""The environment variable that processes of a cluster inherit; its value is the cluster's folder."""
_LEAVE_S = 10.0
"""How long leaving a cluster may take."""
_LOOK_S = 0.5
"""Seconds between two looks at whether the driver is still there."""


def watch(folder: Path) -> subprocess.Popen[bytes]:
    """Start a watchdog over the cluster of this folder; closing its standard input ends both."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end(watchdog: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End the cluster, and wait for it; a fork of ours may hold the watchdog's input open until that ends."""
    assert watchdog.stdin is not None, "watch gives it one"
    watchdog.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        watchdog.wait(timeout_s)


def end_once(watchdog: subprocess.Popen[bytes], is_left: Callable[[], bool]) -> None:
    """End the cluster as soon as the driver has left it, in a thread: waits for nothing else.

    Its daemons block SIGTERM (``cluster.signals``), and Ray waits a second for each to answer one.
    """

    def wait() -> None:
        deadline = time.monotonic() + _LEAVE_S
        while not is_left() and time.monotonic() < deadline:
            time.sleep(0.01)
        if is_left():
            end(watchdog, 0.0)

    threading.Thread(target=wait, name="end of the cluster", daemon=True).start()


def _main(driver: int, folder: str) -> None:
    while os.getppid() == driver and not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        pass
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if _belongs(entry, folder):
                os.kill(int(entry.name), signal.SIGKILL)
    if os.getppid() != driver:  # a driver that lives is in Ray's shutdown, which wants the folder
        shutil.rmtree(folder, ignore_errors=True)


def _belongs(process: Path, folder: str) -> bool:
    """Whether a process has the cluster's mark; where Ray's title stands over it, a file of its folder."""
    if (process / "cmdline").read_bytes().startswith(b"ray::"):
        return any(Path(folder) in each.readlink().parents for each in (process / "fd").iterdir())
    return f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
