"""A child loads its file while the driver does something else, however long that takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rillflow.rewards import child
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.workers import RewardWorkers


def test_a_busy_driver_is_not_a_late_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text("def one(prompts, completions, **_):\n    return [1.0] * len(prompts)\n")
    monkeypatch.setattr(child, "START_LIMIT_S", 1.5)
    with RewardWorkers(parse_function("reward.py:one", tmp_path), RewardConfig()) as workers:
        time.sleep(2.5)
        assert [score.value for score in workers.score(["a"], ["b"], {})] == [1.0]
