"""Backend: pools of ranks, and what runs calls on them; what inline and Ray have in common."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from rillflow.cluster.ranks import Ranks
from rillflow.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Some devices. Roles of one pool share them in turn; other pools run side by side.

    Example:
        Pool(name="main", size=4)
    """

    name: str
    """How a recipe calls it."""
    size: int
    """Its ranks, one to a device."""
    takes_device: bool = False
    """Whether its ranks compute on accelerators, where there are any."""


@dataclass(frozen=True, order=True)
class Place:
    """One rank."""

    pool: str
    """The pool's name."""
    rank: int
    """Within the pool, from 0."""

    def __str__(self) -> str:
        return f"rank {self.rank} of pool {self.pool!r}"


@dataclass(kw_only=True)
class Site:
    """One rank from inside: what a call finds where it runs."""

    place: Place
    """Which rank this is."""
    ranks: Ranks
    """The other ranks of the pool, for collectives."""
    fetch: Callable[..., list[Any]]
    """The values of references; of batches, given names beside them, these fields at least."""
    objects: dict[str, Any] = field(default_factory=dict)
    """What calls left here for later ones: the role programs."""
    stack: ExitStack = field(default_factory=ExitStack)
    """What is closed when the rank ends: children, files."""
    fetched_bytes: int = 0
    """Of the messages that were fetched; inline there are none."""
    ahead_s: float = 0.0
    """Seconds by which the clock here is ahead of the driver's."""

    def clock(self) -> float:
        """Seconds since the epoch, as the driver counts them."""
        return time.time() - self.ahead_s


@dataclass(frozen=True, kw_only=True)
class Node:
    """The machine that a rank is on."""

    address: str
    """As the cluster knows it."""
    ahead_s: float
    """Seconds by which its clock is ahead of the driver's; what ranks say of time is told without them."""


RankCall = Callable[..., Any]
"""A function of a module, called as ``work(site, *arguments)``."""


@dataclass(kw_only=True)
class Traffic:
    """What went through the controller's process, serialised; inline nothing is, so nothing does."""

    sent_bytes: int = 0
    """Calls and their arguments."""
    read_bytes: int = 0
    """Values it read, and small results that came back with them whether it wanted them or not."""
    calls: int = 0
    """Calls submitted."""


class RankLost(ClusterError):
    """A rank is gone, or what it had made; ``what`` goes on from its name: "has died"."""


class RankDied(ClusterError):
    """A rank died, or what it had made went with it, while somebody waits for its answer."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, pool: str = "") -> None:
        super().__init__(what, why, fix)
        self.pool = pool
        """The rank's pool."""


class Backend(Protocol):
    """Runs calls on the ranks of pools."""

    traffic: Traffic
    """Counted since the start."""
    pools: dict[str, int]
    """Ranks of every open pool, by its name."""
    devices: dict[str, str]
    """What the ranks of every open pool compute on, by its name: ``cpu``, ``cuda``."""
    nodes: Mapping[Place, Node]
    """Where every rank is; empty where all are on the driver's own machine."""

    def open(self, pools: Sequence[Pool], device: str = "cpu") -> None:
        """Start every rank.

        Args:
            pools: the ranks.
            device: what they compute on where their pool takes one: ``cpu``, ``cuda``; on Ray ``auto`` is
                ``cuda`` where the cluster has accelerators.

        Raises:
            ClusterError: a pool does not fit; it says what is there and what is missing.
        """

    def pack(self, value: Any, what: str) -> Any:
        """Make an argument ready to travel to several ranks; it arrives as it was. Errors call it ``what``.

        Raises:
            ClusterError: it cannot travel, or is too large for an argument.
        """

    def table(self, references: tuple[Any, ...]) -> Any:
        """Make some that hold references ready for any number of calls: they arrive as they are, or, of
        many, as a reference that a rank can fetch them by."""

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """Run ``work(site, *arguments)`` at a place, after what was submitted there before.

        Returns:
            ``results`` references, of the parts of the tuple it returns (of the value itself for one).
        """

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        """The values of several references; the first error there is, whoever it comes from, at once.

        Raises:
            TimeoutError: one is not there in time.
            RankLost: a rank has died, or a value is gone.
            Exception: what a call raised.
        """

    def is_ready(self, reference: Any) -> bool:
        """Whether reading would not wait."""

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """Wait until reading one of several references would not wait; whether that was in time."""

    def mend(self, pools: Collection[str], deadline_s: float) -> None:
        """After a call that failed: let the ranks of these pools meet again, once none of them is at work."""

    def close(self) -> None:
        """End every rank; nothing is left behind. Calling it again changes nothing."""


def places(pools: Sequence[Pool]) -> list[Place]:
    """Every rank of every pool.

    Raises:
        ClusterError: there is no pool, two have one name, or one has no rank.
    """
    if not pools:
        raise ClusterError("there is no pool", why="a role runs on the ranks of one")
    name, count = Counter(pool.name for pool in pools).most_common(1)[0]
    if count > 1:
        raise ClusterError(f"{count} pools are called {name!r}", why="a role finds its pool by name")
    for pool in pools:
        if pool.size < 1:
            raise ClusterError(f"pool {pool.name!r} has size {pool.size}", why="a pool has a rank at least")
    return [Place(pool.name, rank) for pool in pools for rank in range(pool.size)]
