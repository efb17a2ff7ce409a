"""Backend: pools of ranks, and the interface that the inline and the Ray backend share.

    pool ── worlds: groups of ranks with collectives of their own ── ranks, each a process or a thread

A rank that is lost takes its world along, and no other rank. ``replace`` starts new processes for a whole
world under the same places; the epoch of a place counts its processes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from rillflow.errors import ClusterError
from rillflow.workers.collectives import Ranks

RECENT = 512
"""Number of results among which the cause of a broken collective is searched."""


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
    world: int = 0
    """Number of consecutive ranks with collectives among themselves; 0: all ranks of the pool."""

    @property
    def world_size(self) -> int:
        """Number of ranks of each world."""
        return self.world or self.size


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
    """The ranks of this rank's world, for collectives."""
    pool_size: int = 1
    """Number of ranks of the pool."""
    fetch: Callable[..., list[Any]]
    """Returns the values of references; given field names, batches have at least these fields."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Objects that calls keep for later ones: the role programs."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Resources to close when the rank ends: child processes, files."""
    fetched_bytes: int = 0
    """Bytes of fetched messages; always 0 inline. Local processes map large arrays, which do not count."""
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

    place: Place | None = None
    """The rank, if a call on it raised the error: its process lives, and an engine of it is gone."""

    def of(self, rank: str) -> str:
        """Return the sentence of a rank of this name."""
        return f"{rank} {self.what}"

    def death(self, place: Place, node: str = "") -> RankDied:
        """Return the error for whoever waits for the rank at a place; a call that raised this knows better.

        Args:
            place: the rank of the awaited result.
            node: address of its node; empty for the driver's machine.
        """
        place = self.place or place
        where = f" on node {node}" if node else ""
        return RankDied(self.of(f"{place}{where}"), why=self.why, fix=self.fix, place=place)


class RankDied(ClusterError):
    """A rank, or a result on it, is lost while a caller waits for its result."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, place: Place | None = None) -> None:
        super().__init__(what, why, fix)
        self.place = place
        """The rank."""

    @property
    def pool(self) -> str:
        """Pool of the rank."""
        return "" if self.place is None else self.place.pool


class Replacement:
    """The start of new processes for some ranks.

    Args:
        places: the ranks.
        done: ends when the last of them has joined its world, or with the error of the start.

    Example:
        replacement = backend.replace([error.place])
        ...                                        # other ranks work on
        if replacement.is_ready:
            replacement.read()
            group.restart([place.rank for place in replacement.places], factory, load_s)
    """

    def __init__(self, places: Sequence[Place], done: Future[None]) -> None:
        self.places = tuple(places)
        """All ranks that are replaced: every rank of every world that was named."""
        self._done = done

    @property
    def is_ready(self) -> bool:
        """Whether the new processes take calls, or their start has failed."""
        return self._done.done()

    def read(self, deadline_s: float = 3600.0) -> None:
        """Wait until the new processes take calls.

        Raises:
            TimeoutError: they are not ready in time.
            RillflowError: the error that ended their start; the old processes are gone all the same.
        """
        self._done.result(deadline_s)


class Backend(ABC):
    """Pools of ranks and their calls: inline, in processes of this machine, or on Ray.

    Args:
        deadline_s: longest wait of a rank for an argument.
        load_s: longest time to make a role; a collective waits for a rank as long as the longer of the two.
    """

    def __init__(self, deadline_s: float = 3600.0, *, load_s: float = 0.0) -> None:
        self.traffic = Traffic()
        """Traffic since the start."""
        self.pools: dict[str, int] = {}
        """Number of ranks of every open pool, by pool name."""
        self.devices: dict[str, str] = {}
        """Device type of every open pool, by pool name: ``cpu``, ``cuda``."""
        self.nodes: Mapping[Place, Node] = {}
        """Machine of every rank; empty if all ranks are on the driver's machine."""
        self.epochs: dict[Place, int] = {}
        """Number of the present process of every rank, from 0; a replacement adds 1."""
        self.recent = deque[ReferenceType[Any]](maxlen=RECENT)
        """Results that the controller may still hold, newest last; a failed one may have caused an error."""
        self._deadline_s = deadline_s
        self._collective_s = max(deadline_s, load_s)
        self._worlds: dict[Place, tuple[Place, ...]] = {}

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
        self._worlds, self.pools = worlds(pools), {pool.name: pool.size for pool in pools}
        try:
            self._start(pools, found, device)
            self.epochs = dict.fromkeys(found, 0)
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

    def mend(self, pools: Collection[str], deadline_s: float) -> None:
        """After a failed call, let the ranks of these pools use collectives again once all are idle.

        Earlier errors are no longer searched for the cause of a later one.
        """
        self.recent.clear()
        self._connect_again(pools, deadline_s)

    def _connect_again(self, pools: Collection[str], deadline_s: float) -> None:  # noqa: B027
        """Connect the worlds of these pools whose ranks have left their collectives, once all are idle."""

    def abandon(self) -> float:
        """End all submitted calls, with an error, so that ranks are free for later calls.

        A running call ends at its next instruction of Python or wait, but not while it changes weights; the
        call of a rank that is a thread runs to its end. Ranks that wait in a collective stay there.

        Returns:
            The longest time in seconds in which ranks become free.
        """
        return self._deadline_s

    @property
    @abstractmethod
    def refused(self) -> int:
        """Number of late messages of lost or replaced ranks, which were dropped."""

    def world_of(self, place: Place) -> tuple[Place, ...]:
        """Return the ranks that share collectives with a rank, itself included."""
        return self._worlds[place]

    @abstractmethod
    def replace(self, places: Collection[Place]) -> Replacement:
        """End the processes of some ranks and start new ones under the same places; return at once.

        If one rank of a world is named, all ranks of that world are replaced; they join a new world. Calls
        of other ranks go on. Pending calls to the old processes raise RankLost, and so do new calls to these
        places until the replacement is ready. The new processes have no roles: see ``Group.restart``. What
        the old processes had computed stays readable where it is still stored; otherwise it raises RankLost.

        Raises:
            ClusterError: there is no such rank, or a replacement of it is not ready yet.
        """

    def _all_of(self, places: Collection[Place]) -> list[Place]:
        """Return every rank of the worlds of some ranks.

        Raises:
            ClusterError: there is no such rank.
        """
        for place in places:
            if place not in self._worlds:
                raise ClusterError(f"there is no {place}", why=f"the pools are {self.pools}")
        return sorted({each for place in places for each in self._worlds[place]})

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
        ClusterError: there is no pool, two pools share a name, a pool has no rank, or its worlds do not fit.
    """
    if not pools:
        raise ClusterError("there is no pool", why="every role needs the ranks of a pool")
    name, count = Counter(pool.name for pool in pools).most_common(1)[0]
    if count > 1:
        raise ClusterError(f"{count} pools are called {name!r}", why="a role finds its pool by name")
    for pool in pools:
        if pool.size < 1:
            raise ClusterError(f"pool {pool.name!r} has size {pool.size}", why="a pool has at least 1 rank")
        if pool.world < 0 or pool.size % pool.world_size:
            raise ClusterError(
                f"pool {pool.name!r} of {pool.size} has worlds of {pool.world} ranks",
                why="every rank is in exactly one world",
                fix="choose a world that divides the pool's size, or 0 for one world",
            )
    return [Place(pool.name, rank) for pool in pools for rank in range(pool.size)]


def worlds(pools: Sequence[Pool]) -> dict[Place, tuple[Place, ...]]:
    """Return the world of every rank of every pool."""
    return {
        Place(pool.name, rank): tuple(
            Place(pool.name, each) for each in range(first, first + pool.world_size)
        )
        for pool in pools
        for first in range(0, pool.size, pool.world_size)
        for rank in range(first, first + pool.world_size)
    }
