"""The example: a sampler and a trainer that are not ours learn through the service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("starlette", reason="the service is the extra `service`")
ROOT = Path(__file__).parents[4]


def test_a_foreign_sampler_and_a_foreign_trainer_learn_through_the_service() -> None:
    command = [sys.executable, str(ROOT / "examples/foreign_engines.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [json.loads(line)["reward"] for line in done.stdout.splitlines()]
    assert len(rewards) == 60 and mean(rewards[:3]) < 0.3 and mean(rewards[-5:]) > 0.8
