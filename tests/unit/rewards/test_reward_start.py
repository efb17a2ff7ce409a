"""A child loads its file while the driver does something else, however long that takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rillflow.rewards import child
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.supervisor import Containment
from rillflow.rewards.workers import RewardWorkers


def test_a_busy_driver_is_not_a_late_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(
        "def one(prompts, completions, **_):\n    return [1.0] * len(prompts)\n"
    )
    monkeypatch.setattr(child, "START_LIMIT_S", 1.5)
    with RewardWorkers(parse_function("reward.py:one", tmp_path), RewardConfig()) as workers:
        time.sleep(2.5)
        assert [score.value for score in workers.score(["a"], ["b"], {})] == [1.0]


def test_the_time_to_load_is_the_childs_own(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def one(completions): ...\n")
    function = parse_function("reward.py:one", tmp_path)
    started = child.Child(function, memory_bytes=10**9, containment=Containment.NAMESPACE)
    time.sleep(2.5)
    started.advance()
    started.stop()
    assert 0 < started.start_s < 2.0, "the driver's absence is no part of it"
