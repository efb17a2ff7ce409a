"""Backend: pools of ranks, and the interface that the inline and the Ray backend share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rillflow.errors import ClusterError
from rillflow.workers.collectives import Ranks


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A set of devices. Roles of one pool take turns; different pools run in parallel.

    Example:
        Pool(name="main", size=4)
    """

    name: str
    """Name in the recipe."""
    size: int
    """Number of ranks, one per device."""
    takes_device: bool = False
    """Whether its ranks compute on accelerators, if there are any."""


@dataclass(frozen=True, order=True)
class Place:
    """One rank of one pool."""

    pool: str
    """Name of the pool."""
    rank: int
    """Rank within the pool, from 0."""

    def __str__(self) -> str:
        return f"rank {self.rank} of pool {self.pool!r}"


@dataclass(kw_only=True)
class Site:
    """The environment of one rank, passed to every call that runs on it."""

    place: Place
    """Place of this rank."""
    ranks: Ranks
    """All ranks of the pool, for collectives."""
    fetch: Callable[..., list[Any]]
    """Returns the values of references; given field names, batches have at least these fields."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Objects that calls keep for later ones: the role programs."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Resources to close when the rank ends: child processes, files."""
    fetched_bytes: int = 0
    """Bytes of fetched messages; always 0 inline."""
    ahead_s: float = 0.0
    """Seconds by which this machine's clock is ahead of the driver's."""

    def clock(self) -> float:
        """Return seconds since the epoch on the driver's clock."""
        return time.time() - self.ahead_s


@dataclass(frozen=True, kw_only=True)
class Node:
    """The machine of a rank."""

    address: str
    """Address in the cluster."""
    ahead_s: float
    """Seconds by which its clock is ahead of the driver's; times of its ranks are reported without them."""


RankCall = Callable[..., Any]
"""A module's function, called as ``work(site, *arguments)``."""


@dataclass(kw_only=True)
class Traffic:
    """Serialised bytes through the controller's process; inline serialises nothing, so they stay 0."""

    sent_bytes: int = 0
    """Bytes of calls and their arguments."""
    read_bytes: int = 0
    """Bytes of the values it read, and of small results that came back with them."""
    calls: int = 0
    """Number of submitted calls."""


class RankLost(ClusterError):
    """A rank, or a result on it, is gone; ``what`` continues a sentence after its name: "has died"."""


class RankDied(ClusterError):
    """A rank, or a result on it, is lost while a caller waits for its result."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, pool: str = "") -> None:
        super().__init__(what, why, fix)
        self.pool = pool
        """Pool of the rank."""


class Backend(ABC):
    """Pools of ranks, and the calls that run on them.

    Args:
        deadline_s: longest wait of a rank for another one.
    """

    def __init__(self, deadline_s: float = 3600.0) -> None:
        self.traffic = Traffic()
        """Traffic since the start."""
        self.pools: dict[str, int] = {}
        """Number of ranks of every open pool, by pool name."""
        self.devices: dict[str, str] = {}
        """Device type of every open pool, by pool name: ``cpu``, ``cuda``."""
        self.nodes: Mapping[Place, Node] = {}
        """Machine of every rank; empty if all ranks are on the driver's machine."""
        self._deadline_s = deadline_s

    def open(self, pools: Sequence[Pool], device: str = "cpu") -> None:
        """Start every rank.

        Args:
            pools: the pools.
            device: device type of pools that take a device: ``cpu``, ``cuda``; on Ray ``auto`` is ``cuda`` if
                the cluster has accelerators.

        Raises:
            ClusterError: a pool does not fit; the message lists available and missing devices.
        """
        found = places(pools)
        try:
            self._start(pools, found, device)
            self.pools = {pool.name: pool.size for pool in pools}
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        """Start every rank of the pools, and set ``devices``; ``found`` are their places."""

    def pack(self, value: Any, what: str) -> Any:  # noqa: ARG002
        """Serialise an argument once for several ranks, which receive the original value.

        Args:
            value: the argument.
            what: name of the argument in errors.

        Raises:
            ClusterError: it cannot be serialised, or is too large for an argument.
        """
        return value

    def table(self, references: tuple[Any, ...]) -> Any:
        """Prepare references for any number of calls.

        Ranks receive them directly, or, if there are many, as one reference that they fetch.
        """
        return references

    @abstractmethod
    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """Run ``work(site, *arguments)`` at a place, after the calls submitted there before.

        Returns:
            ``results`` references to the elements of the returned tuple (to the value itself for one).
        """

    @abstractmethod
    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        """Return the values of several references, or raise the first error of any of them at once.

        Raises:
            TimeoutError: a value is not ready in time.
            RankLost: a rank has died, or a value is gone.
            Exception: an error that a call raised.
        """

    @abstractmethod
    def is_ready(self, reference: Any) -> bool:
        """Return whether a read would return without waiting."""

    @abstractmethod
    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """Wait until one of several references can be read without waiting; return False on timeout."""

    def mend(self, pools: Collection[str], deadline_s: float) -> None:  # noqa: B027
        """After a failed call, let the ranks of these pools use collectives again once all are idle."""

    def now(self) -> float:
        """Return seconds on the clock of the controller's waits; a simulation has its own."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let ranks work for some seconds of that clock."""
        time.sleep(seconds)

    @abstractmethod
    def close(self) -> None:
        """End every rank and release all resources. A second call has no effect."""


def devices_of(pools: Sequence[Pool], device: str) -> dict[str, str]:
    """Return the device type of every pool, if ``device`` is that of pools that take one."""
    return {pool.name: device if pool.takes_device else "cpu" for pool in pools}


def places(pools: Sequence[Pool]) -> list[Place]:
    """Return every rank of every pool.

    Raises:
        ClusterError: there is no pool, two pools share a name, or a pool has no rank.
    """
    if not pools:
        raise ClusterError("there is no pool", why="every role needs the ranks of a pool")
    name, count = Counter(pool.name for pool in pools).most_common(1)[0]
    if count > 1:
        raise ClusterError(f"{count} pools are called {name!r}", why="a role finds its pool by name")
    for pool in pools:
        if pool.size < 1:
            raise ClusterError(f"pool {pool.name!r} has size {pool.size}", why="a pool has at least 1 rank")
    return [Place(pool.name, rank) for pool in pools for rank in range(pool.size)]
