"""A child loads its file while the driver is busy, however long that takes."""

from __future__ import annotations

import select
import time
from pathlib import Path

import pytest

from rillflow.isolation.sandbox import Level
from rillflow.rewards import child
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.workers import RewardWorkers

CODE = """
from pathlib import Path
Path(__file__).with_name("loaded").touch()
def one(prompts, completions, **_):
    return [1.0] * len(prompts)
"""


def wait_for(marker: Path) -> None:
    """Wait until the child has loaded its file."""
    end = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < end, "the file was not loaded"
        time.sleep(0.01)


def test_a_busy_driver_is_not_a_late_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(CODE)
    monkeypatch.setattr(child, "START_LIMIT_S", 0.01)  # long over when the driver returns
    with RewardWorkers(parse_function("reward.py:one", tmp_path), RewardConfig(sandbox=False)) as workers:
        wait_for(tmp_path / "loaded")
        time.sleep(0.5)  # from the end of the file to its message
        assert [score.value for score in workers.score(["a"], ["b"], {})] == [1.0]


def test_the_time_to_load_is_the_childs_own(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(CODE)
    function = parse_function("reward.py:one", tmp_path)
    begun = time.monotonic()
    started = child.Child(function, memory_bytes=10**9, level=Level.NONE)
    poller = select.poll()
    for descriptor, mask in started.events().items():
        if mask == select.POLLIN:
            poller.register(descriptor, mask)
    assert poller.poll(60_000), "the child did not say that it has loaded the file"
    said_s = time.monotonic() - begun
    time.sleep(0.3)
    started.advance()
    started.stop()
    assert 0 < started.start_s <= said_s, "the driver's absence is no part of it"
