"""Joined rank: the process of a rank on any backend that has processes, and its part of the setup.

driver ── host ──> port ── join: Seating ──> Site ── calls ...       has_left, meet_again: after failures
                                               └── abandon: the running call ends, earlier ones are refused
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from rillflow.errors import ClusterError, Signalled
from rillflow.runs.abandoning import ABANDON
from rillflow.runs.environment import usable_cores
from rillflow.workers import nodes
from rillflow.workers.backend import Site
from rillflow.workers.liveness import beat
from rillflow.workers.messages import Slot
from rillflow.workers.nodes import Seating


class JoinedRank(ABC):
    """One rank: the process that runs its calls.

    Args:
        node: address of its node.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        """Address of its node."""
        self.site: Site | None = None
        """What its calls get; None until it has joined its world."""
        self.seating: Seating | None = None
        """The driver's message that made this process a rank."""
        self.store: Any = None
        """The store that it hosts for its world, if it is the first rank."""
        self.deadline_s = 0.0
        """Longest wait in seconds for an argument."""
        self._era, self._running_era = 0, math.inf

    @abstractmethod
    def fetch(self, slots: Sequence[Slot], fields: Collection[str] | None = None) -> list[Any]:
        """Return the values of references; see Site."""

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads."""
        torch.set_num_threads(threads)

    def begin(self, seating: Seating) -> None:
        """Take what the driver's message says; earlier calls of the run were for another process."""
        self.seating, self.deadline_s, self._era = seating, seating.deadline_s, seating.era

    def abandon(self, *_: object) -> None:
        """End the running call, and refuse later calls that were submitted before."""
        self._era += 1
        if self._running_era < self._era:
            raise Signalled

    def _late_argument(self) -> ClusterError:
        """Return the error of an argument that has not come in time."""
        assert self.site is not None, "a call runs on a rank that has joined"
        return ClusterError(
            f"{self.site.place} waited {self.deadline_s:g} s for an argument",
            why="the call that returns it is still running or waiting",
        )


def host(rank: JoinedRank, size: int, deadline_s: float) -> int:
    """Host the store of the world; return its port."""
    rank.store = nodes.hosted_store(rank.node, size, deadline_s)
    return int(rank.store.port)


def join(rank: JoinedRank, seating: Seating) -> None:
    """Become the rank that the driver assigned."""
    if seating.target is not None:
        signal.signal(ABANDON, rank.abandon)
        beat(seating.place, seating.target)
    rank.use_threads(max(1, int(usable_cores()) // seating.neighbours))
    nodes.settle_interface(rank.node)
    ranks = nodes.meet(rank.node, seating, rank.store)
    rank.begin(seating)
    rank.site = Site(
        place=seating.place,
        ranks=ranks,
        pool_size=seating.pool_size,
        fetch=rank.fetch,
        ahead_s=seating.ahead_s,
    )


def has_left(rank: JoinedRank) -> bool:
    """Return whether this rank has left its collectives, once its submitted calls have ended."""
    return nodes.has_left_collectives(rank.site)


def meet_again(rank: JoinedRank, port: int) -> None:
    """Connect to the world again, at the port of a new store."""
    assert rank.site is not None and rank.seating is not None, "it has joined"
    nodes.meet_again(rank.node, replace(rank.seating, port=port), rank.store, rank.site)


def leave(rank: JoinedRank) -> None:
    """Close the resources of this rank."""
    if rank.site is not None:
        rank.site.stack.close()
