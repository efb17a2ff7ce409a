"""Whole updates against a plain loop over rows, with the command that the pages name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_update_has_the_gradient_of_a_plain_loop(tmp_path: Path) -> None:
    """Covers estimators, divergence in loss and reward, truncated rows, aggregations, on- and off-policy."""
    table = tmp_path / "differential.md"
    command = [
        sys.executable,
        "benchmarks/training/differential.py",
        "--only",
        "updates",
        "--write",
        str(table),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("grpo", "dapo", "remax", "reinforce_pp", "ppo", "safe_rlhf truncated=bootstrap"):
        assert f"| {name}" in table.read_text()
