"""Exactly once among processes that are killed: the benchmark's own count, of a tenth of its rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_no_row_is_lost_or_doubled_by_workers_that_are_killed() -> None:
    command = [
        sys.executable,
        "benchmarks/ranks/data_plane.py",
        "exactly-once",
        "--rows",
        "100000",
        "--kill-every-s",
        "0.2",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.splitlines()[2].split("|")[1:-1]]
    killed, lost, doubled, wrong = map(int, cells[3:7])
    assert killed > 0 and (lost, doubled, wrong) == (0, 0, 0)
    assert cells[0].startswith("100,000 ") and cells[8] == "0 groups, 0 failed processes"
