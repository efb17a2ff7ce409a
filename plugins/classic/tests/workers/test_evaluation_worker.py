"""Evaluation workers judge each version by its own episodes, and never by a mixed one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow_classic.fragment import FinishedEpisode, Fragment
from rillflow_classic.workers.evaluation_worker import MAX_VERSIONS, EvaluationWorker


def fragment(
    versions: Sequence[int],
    ends: Sequence[tuple[int, int, float]] = (),
    slots: int = 1,
    policy: str = "policy",
    actor: int = 0,
) -> Fragment:
    """Return a fragment of ``len(versions)`` steps with episodes that end at (step, slot) with a return."""
    steps = len(versions)
    terminated = np.zeros((steps, slots), np.bool_)
    valid = np.ones((steps, slots), np.bool_)
    for step, slot, _ in ends:
        terminated[step, slot] = True
        if step + 1 < steps:
            valid[step + 1, slot] = False
    return Fragment(
        observations=np.zeros((steps + 1, slots, 1), np.float32),
        actions=np.zeros((steps, slots), np.int64),
        rewards=np.zeros((steps, slots), np.float32),
        terminated=terminated,
        truncated=np.zeros_like(terminated),
        valid=valid,
        versions=np.array(versions, np.int64),
        episodes=[FinishedEpisode(total_reward=value, length=1, slot=slot) for _, slot, value in ends],
        policy=policy,
        actor=actor,
    )


def test_a_result_comes_after_the_wanted_episodes_of_one_version() -> None:
    worker = EvaluationWorker(3, success=2.0)
    assert worker.add(fragment([5, 5, 5, 5], [(0, 0, 1.0), (2, 0, 2.0)])) == []
    (found,) = worker.add(fragment([5, 5, 5, 5], [(1, 0, 6.0), (3, 0, 100.0)]))
    assert (found.version, found.policy, found.evaluation.count) == (5, "policy", 3)
    assert found.evaluation.mean_reward == 3.0 and found.evaluation.correct == 2
    assert worker.mixed == worker.late == 0


def test_an_episode_of_two_versions_counts_for_neither() -> None:
    """Within a fragment, over two fragments, and over three of which the middle one has no end."""
    worker = EvaluationWorker(1)
    assert worker.add(fragment([1, 1, 2, 2, 2], [(2, 0, 9.0)])) == []
    assert worker.add(fragment([3, 3])) == []
    assert worker.add(fragment([3, 3], [(1, 0, 9.0)])) == []  # it began with version 2, after the end
    assert worker.mixed == 2
    assert worker.add(fragment([3, 3])) == []
    assert worker.add(fragment([4, 4])) == []
    assert worker.add(fragment([4, 4], [(0, 0, 9.0)])) == []
    assert worker.mixed == 3 and worker.waiting == {}


def test_a_version_that_only_resets_a_slot_does_not_count() -> None:
    """The action of a row that resets is ignored, so its version did not act."""
    worker = EvaluationWorker(2)
    (found,) = worker.add(fragment([1, 2, 1, 1], [(0, 0, 1.0), (3, 0, 3.0)]))
    assert found.version == 1 and found.evaluation.mean_reward == 2.0


def test_slots_and_actors_and_lanes_and_policies_are_told_apart() -> None:
    worker = EvaluationWorker(1)
    assert worker.add(fragment([1, 1], slots=2)) == []
    assert worker.add(fragment([7, 7], [(1, 0, 7.0)], actor=1))[0].version == 7
    assert worker.add(fragment([8, 8], [(1, 0, 8.0)]), lane=1)[0].version == 8
    assert worker.add(fragment([1, 1], [(1, 0, 1.0)], policy="other"))[0].policy == "other"
    assert worker.add(fragment([2, 2], [(0, 0, 1.0), (0, 1, 1.0)], slots=2)) == []
    assert worker.mixed == 2


def test_versions_are_judged_side_by_side_and_older_ones_are_dropped() -> None:
    worker = EvaluationWorker(2)
    assert worker.add(fragment([1], [(0, 0, 1.0)])) == []
    assert worker.add(fragment([2], [(0, 0, 2.0)], actor=1)) == []
    assert worker.add(fragment([3], [(0, 0, 3.0)], actor=2)) == []
    assert worker.waiting == {("policy", 1): 1, ("policy", 2): 1, ("policy", 3): 1}
    assert [each.version for each in worker.add(fragment([2], [(0, 0, 4.0)], actor=1))] == [2]
    assert worker.waiting == {("policy", 3): 1}
    assert worker.add(fragment([1], [(0, 0, 1.0)])) == [] and worker.late == 1
    (found,) = worker.add(fragment([3], [(0, 0, 5.0)], actor=2))
    assert (found.version, found.evaluation.mean_reward) == (3, 4.0)


def test_a_reset_drops_unfinished_episodes() -> None:
    worker = EvaluationWorker(1)
    worker.add(fragment([1, 1]))
    worker.reset()
    assert worker.add(fragment([2, 2], [(0, 0, 1.0)]))[0].version == 2


def test_memory_is_bounded() -> None:
    worker = EvaluationWorker(2)
    for version in range(5 * MAX_VERSIONS):
        worker.add(fragment([version], [(0, 0, 1.0)]))
    assert len(worker.waiting) == MAX_VERSIONS
    assert ("policy", 5 * MAX_VERSIONS - 1) in worker.waiting


def test_no_episodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="an evaluation has 0 episodes"):
        EvaluationWorker(0)
