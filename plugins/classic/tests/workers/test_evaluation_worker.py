"""Each version is judged by whole episodes that it played alone, from the actor to the run's evaluations."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow_classic.fragment import FinishedEpisode, Fragment
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.evaluation_worker import MAX_VERSIONS, EvaluationWorker

sys.path.insert(0, str(Path(__file__).parent))
from counting import AffinePolicy, CountingEnvironment


def episodes(version: int, *returns: float) -> list[FinishedEpisode]:
    return [FinishedEpisode(total_reward=each, length=1, version=version) for each in returns]


def test_a_result_comes_after_the_wanted_episodes_of_one_version() -> None:
    worker = EvaluationWorker(3, success=2.0)
    assert worker.add("policy", episodes(5, 1.0, 2.0)) == []
    (found,) = worker.add("policy", episodes(5, 6.0, 100.0))
    assert (found.more["version"], found.more["policy"], found.count, found.set) == (
        5,
        "policy",
        3,
        "training",
    )
    assert found.mean_reward == 3.0 and found.correct == 2
    assert worker.waiting == {}


def test_versions_and_policies_are_told_apart_and_older_versions_are_dropped() -> None:
    worker = EvaluationWorker(2)
    assert worker.add("policy", [*episodes(1, 1.0), *episodes(2, 2.0), *episodes(3, 3.0)]) == []
    assert worker.add("other", episodes(2, 9.0)) == []
    assert [each.more["version"] for each in worker.add("policy", episodes(2, 4.0))] == [2]
    assert sorted(worker.waiting) == [("other", 2), ("policy", 3)]
    assert worker.add("policy", episodes(1, 1.0, 1.0)) == []
    (found,) = worker.add("policy", episodes(3, 5.0))
    assert (found.more["version"], found.mean_reward) == (3, 4.0)


def test_episodes_of_several_versions_count_for_none() -> None:
    worker = EvaluationWorker(1)
    assert worker.add("policy", episodes(-1, 1.0, 2.0)) == []
    assert worker.waiting == {}


def test_memory_is_bounded() -> None:
    worker = EvaluationWorker(2)
    for version in range(5 * MAX_VERSIONS):
        worker.add("policy", episodes(version, 1.0))
    assert len(worker.waiting) == MAX_VERSIONS
    assert ("policy", 5 * MAX_VERSIONS - 1) in worker.waiting


def test_no_episodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="an evaluation has 0 episodes"):
        EvaluationWorker(0)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_an_actor_knows_which_episodes_one_version_played(steps: int) -> None:
    """Against the versions of all rows of an episode, over fragments of any length."""
    slots, rng = 3, np.random.default_rng(steps)
    actor = Actor([CountingEnvironment(slots)], {"policy": AffinePolicy()}, steps)
    begun: list[set[int]] = [set() for _ in range(slots)]
    seen = 0
    for number in range(200):
        if rng.random() < 0.2:
            actor.load(number, {"bias": np.array([0])})
        fragment = actor.sample()
        assert isinstance(fragment, Fragment)
        found = {slot: [each for each in fragment.episodes if each.slot == slot] for slot in range(slots)}
        for step in range(steps):
            for slot in range(slots):
                if fragment.valid[step, slot]:
                    begun[slot].add(int(fragment.versions[step]))
                if fragment.ended[step, slot]:
                    versions, begun[slot] = begun[slot], set()
                    expected = versions.pop() if len(versions) == 1 else -1
                    assert found[slot].pop(0).version == expected
                    seen += expected >= 0
    assert seen > 5
