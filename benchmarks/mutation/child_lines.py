"""Record the lines that a test's child process runs; copy.pth loads this module if WATCH_LINES is set.

    test ── WATCH_LINES, WATCH_TEST in the environment ──> child ── at its end ──> a data file in WATCH_LINES

A killed child leaves no file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from multiprocessing import util
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import CoverageException
from studied import packages


def begin() -> None:
    """Record from here to the end of the process."""
    folder = Path(os.environ["WATCH_LINES"])
    measured = Coverage(
        data_file=folder / "child",
        data_suffix=True,
        source=[*map(str, packages(folder.parent))],
        config_file=False,
        context=os.environ["WATCH_TEST"],
    )
    measured.set_option("run:sigterm", True)
    measured.start()

    def save() -> None:
        measured.stop()
        with contextlib.suppress(OSError, CoverageException):  # a sandbox allows no writes
            measured.save()

    atexit.register(save)
    util.Finalize(None, save, exitpriority=0)  # processes of multiprocessing end without atexit


begin()
