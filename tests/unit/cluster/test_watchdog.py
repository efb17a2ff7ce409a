"""The watchdog: what has its cluster's mark goes with the driver, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from rillflow.cluster.watchdog import MARK, watch


def test_marked_processes_and_the_folder_go_when_the_pipe_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    ours, theirs = (
        subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(mark)})
        for mark in (folder, tmp_path / "another")
    )
    watchdog = watch(folder)
    assert watchdog.stdin is not None
    watchdog.stdin.close()
    assert watchdog.wait(30) == 0
    assert ours.wait(30) == -signal.SIGKILL and not folder.exists()
    assert theirs.poll() is None
    theirs.kill()
    theirs.wait(30)
