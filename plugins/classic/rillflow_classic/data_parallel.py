"""Data parallelism: a learner on every trainer rank, each with a part of the slots.

Fragment ─ slots split ─┬─> rank 0: forward, backward ─┐
                        ├─> rank 1: forward, backward ─┼─ gradients summed ─> the same step on every rank
                        └─> rank 2: forward, backward ─┘

Every loss is a sum over rows, divided by the number of rows of all ranks. So any division of the slots gives
the same gradient, up to rounding, and all ranks keep equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np

from rillflow.errors import TrainingError
from rillflow.records.metrics import Metrics, merge_metrics
from rillflow.workers.backend import Backend, Site
from rillflow.workers.collectives import Ranks
from rillflow_classic.checkpointed import State
from rillflow_classic.fragment import Fragment
from rillflow_classic.policy import ActorPolicy, Learner, Weights
from rillflow_classic.worker_set import WorkerSet


class RankLearner(Learner, Protocol):
    """A learner that sums its gradients over ranks."""

    ranks: Ranks
    """The trainer ranks."""


class DataParallelLearner:
    """A learner whose work is divided among trainer ranks.

    Args:
        backend: an open backend.
        pool: pool of the trainer ranks, one world.
        make: makes the learner of a rank; all have the same seed.
        policy: acts with copies of the weights, which ``update`` refreshes.
    """

    def __init__(
        self, backend: Backend, pool: str, make: Callable[[int], RankLearner], policy: ActorPolicy
    ) -> None:
        self.version = 0
        self.policy = policy
        self._workers = WorkerSet(backend, pool, make)
        for call in self._workers.submit_all(_join):
            call.read()
        self.policy.load(0, self.weights())

    def update(self, data: Fragment) -> Metrics:
        """See Learner; each rank takes the steps with its slots of the fragment.

        Raises:
            TrainingError: the fragment has fewer slots than there are ranks.
            NotFiniteError: a loss or a gradient is not finite, on any rank.
        """
        parts = split_by_slots(data, self._workers.size)
        calls = [self._workers.call(rank, "update", part) for rank, part in enumerate(parts)]
        metrics = merge_metrics([call.read() for call in calls])
        self.version += 1
        self.policy.load(self.version, self.weights())
        return metrics

    def weights(self) -> Weights:
        """See Learner; all ranks have the same."""
        return cast(Weights, self._workers.call(0, "weights").read())

    def state(self) -> State:
        """See Learner; all ranks have the same."""
        return cast(State, self._workers.call(0, "state").read())

    def restore(self, state: State) -> None:
        """See Learner; any number of ranks restores the state of any other."""
        self._workers.read_all("restore", state)
        self.version = cast(int, state["version"])
        self.policy.load(self.version, self.weights())


def split_by_slots(fragment: Fragment, count: int) -> list[Fragment]:
    """Return parts of a fragment with about equally many slots; ``joined`` undoes it.

    Raises:
        TrainingError: it has fewer slots than parts.
    """
    slots = fragment.valid.shape[1]
    if slots < count:
        raise TrainingError(
            f"a fragment of {slots} slots is divided among {count} trainers",
            why="each trainer needs a slot at least",
            fix="lower workers.trainers, or use more environments",
        )
    bounds = [slots * index // count for index in range(count + 1)]
    return [_slots(fragment, slice(first, last), first == 0) for first, last in pairwise(bounds)]


def _slots(fragment: Fragment, part: slice, is_first: bool) -> Fragment:
    names = ("observations", "actions", "rewards", "terminated", "truncated", "valid")
    arrays: dict[str, Any] = {name: np.ascontiguousarray(getattr(fragment, name)[:, part]) for name in names}
    return replace(
        fragment,
        **arrays,
        outputs={name: np.ascontiguousarray(value[:, part]) for name, value in fragment.outputs.items()},
        state=None if fragment.state is None else fragment.state[part],
        episodes=fragment.episodes if is_first else (),
    )


def _join(site: Site, name: str) -> None:
    site.objects[name].ranks = site.ranks
