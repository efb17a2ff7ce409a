"""A driver that may open no further file, while a rank sends it an array in shared memory."""

from __future__ import annotations

import subprocess
import sys

FEW_FILES = """
import os, resource
from contextlib import suppress
import numpy as np
from rillflow.workers.backend import Place, Pool
from rillflow.workers.processes import ProcessBackend

def large(site):
    return np.zeros(2**20)

with_rank = ProcessBackend(20.0)
with_rank.open([Pool(name="main", size=1)])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with suppress(OSError):
    while True:
        os.open("/dev/null", os.O_RDONLY)
try:
    with_rank.read_all(with_rank.submit(Place("main", 0), large), 20.0)
finally:
    with_rank.close()
"""


def test_a_driver_with_too_many_open_files_says_so_and_does_not_wait() -> None:
    run = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=60)
    assert "RankLost: cannot be heard" in run.stderr and "has too many open files" in run.stderr
    assert "raise the limit with ulimit -n" in run.stderr
