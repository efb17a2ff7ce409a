"""Multiprocess: what backends share whose ranks are processes, on this machine or on Ray.

    places ── _spawned, _seat ──> processes ── _join: stores, Seating ──> ranks, connected by worlds
      │  replace                     ▲                                       │  mend: join again
      └── _end, _spawned ────────────┘ in a thread of its own                └─ ``workers.joined_rank``

A backend says how a process starts, runs a setup function, and ends.

Loop of a replacement's thread
    consumes      the new processes of the worlds that are replaced
    waits for     their start, their nodes, their meeting; every wait ends at the deadline of a start
    unblocked by  those processes, or their end
    produces      the ranks under the old places, a new epoch; or the error of the start
    shuts down    with the last step. ``close`` ends the processes and waits for the thread
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from rillflow.errors import ClusterError
from rillflow.workers import joined_rank
from rillflow.workers.awaited import await_replies, broken_worlds
from rillflow.workers.backend import Backend, Place, RankLost, Replacement
from rillflow.workers.liveness import Heartbeats, HeartbeatTarget
from rillflow.workers.nodes import Seating

_ABANDON_S = 5.0
"""Seconds in which a rank ends its running call."""
_CLOSE_S = 3.0
"""Seconds that ranks have to close their resources before they are killed."""
_START_EACH_S = 15.0
"""Additional start time in seconds per rank: imports take time, and ranks of one machine share its cores."""


class StartedProcess(Protocol):
    """One process of a rank, as the driver holds it."""

    target: HeartbeatTarget | None
    """Where its heartbeats go, if it sends any."""

    @property
    def node(self) -> str:
        """Address of its node."""

    @property
    def local_pid(self) -> int:
        """Number of the process; 0 on another machine."""


P = TypeVar("P", bound=StartedProcess)


class MultiprocessBackend(Backend, Generic[P]):
    """Backend whose ranks are processes.

    Args:
        deadline_s: longest wait of a rank for another one's result.
        start_s: longest start of the processes; each rank adds some seconds.
        load_s: see Backend.
        heartbeat_s: silence of a rank after which it is lost; 0: no heartbeats.
    """

    def __init__(self, deadline_s: float, *, start_s: float, load_s: float, heartbeat_s: float) -> None:
        super().__init__(deadline_s, load_s=load_s)
        self._start_s, self._heartbeat_s = start_s, heartbeat_s
        self._ranks: dict[Place, P] = {}
        self._replacing: dict[Place, tuple[P, threading.Thread]] = {}
        self._heartbeats: Heartbeats | None = None
        self._era = 0

    @abstractmethod
    def _spawned(self, place: Place, old: P | None) -> P:
        """Start the process of a rank, where the old one was; do not wait for it.

        Raises:
            ClusterError: it cannot be started.
        """

    def _seat(self, fresh: Mapping[Place, P]) -> None:
        """Wait until processes have started and their nodes are known."""

    @abstractmethod
    def _ask(self, process: P, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function of ``workers.joined_rank`` on a process; return the reference of its result."""

    @abstractmethod
    def _wait_for_all(self, references: Sequence[Any], deadline_s: float) -> None:
        """Wait until all references can be read without waiting, or for the longest wait."""

    @abstractmethod
    def _end(self, process: P, reason: RankLost) -> None:
        """End a process; its calls that have not been answered, and later ones, raise the reason."""

    def _silent(self, process: P, reason: RankLost) -> None:
        """End a process whose heartbeats have stopped."""
        self._end(process, reason)

    @abstractmethod
    def _release(self, processes: Sequence[P]) -> None:
        """Release what the backend holds, once these processes, which are all, were told to end."""

    def _start_advice(self) -> str:
        """Return the advice of a start that takes too long."""
        return "raise placement.start_s"

    @property
    def _wait_s(self) -> float:
        """Longest start of all processes."""
        return self._start_s + _START_EACH_S * len(self._worlds)

    def _asked(self, doing: str, calls: Mapping[Place, Any]) -> dict[Place, Any]:
        """Return the replies of processes during the start."""
        return await_replies(doing, calls, self, self._wait_s, fix=self._start_advice())

    def _join(self, fresh: Mapping[Place, P]) -> None:
        """Make processes the ranks of their places, and connect the ranks of each world."""
        neighbours = Counter(each.node for each in {**self._ranks, **fresh}.values())
        first = [at for at in fresh if self._worlds[at][0] == at and len(self._worlds[at]) > 1]
        ports = self._asked("opening the store of its world", {at: self._host(at, fresh[at]) for at in first})
        joining = {}
        for at, process in fresh.items():
            world = self._worlds[at]
            if self._heartbeats is not None:
                silent, pid = partial(self._silent, process), process.local_pid
                process.target = self._heartbeats.watch(at, silent, node=process.node, local_pid=pid)
            seating = Seating(
                place=at,
                pool_size=self.pools[at.pool],
                index=world.index(at),
                size=len(world),
                host=fresh[world[0]].node,
                port=ports.get(world[0], 0),
                backend="gloo" if self.devices[at.pool] == "cpu" else "cpu:gloo,cuda:nccl",
                neighbours=neighbours[process.node],
                ahead_s=self.nodes[at].ahead_s if at in self.nodes else 0.0,
                deadline_s=self._deadline_s,
                collective_s=self._collective_s,
                target=process.target,
                era=self._era,
            )
            joining[at] = self._ask(process, joined_rank.join, seating)
        self._asked("joining its world", joining)

    def _host(self, first: Place, process: P) -> Any:
        """Let the first rank of a world host its store."""
        return self._ask(process, joined_rank.host, len(self._worlds[first]), self._collective_s)

    def _connect_again(self, pools: Collection[str], deadline_s: float) -> None:
        """See Backend."""
        there = [at for at in self._ranks if at.pool in pools and len(self._worlds[at]) > 1]
        left = {at: self._ask(self._ranks[at], joined_rank.has_left) for at in there}
        for world in broken_worlds(left, self._worlds, self, deadline_s):
            hosting = {world[0]: self._host(world[0], self._ranks[world[0]])}
            port = self._asked("opening a new store of its world", hosting)[world[0]]
            joining = {at: self._ask(self._ranks[at], joined_rank.meet_again, port) for at in world}
            self._asked("joining its world again", joining)

    def abandon(self) -> float:
        """See Backend; a rank without heartbeats finishes its running call."""
        self.recent.clear()
        self._era += 1
        if self._heartbeats is not None:
            self._heartbeats.abandon()
        return min(_ABANDON_S, self._deadline_s)

    def replace(self, places: Collection[Place]) -> Replacement:
        """See Backend."""
        ended = self._all_of(places)
        self.recent.clear()  # their errors have been dealt with
        if again := [place for place in ended if place in self._replacing]:
            raise ClusterError(
                f"{again[0]} is being replaced",
                why="its new process is still starting",
                fix="wait until the replacement is ready",
            )
        for place in ended:
            old = self._ranks[place]
            self._end(old, RankLost("was replaced", why="a new process has its place"))
            if self._heartbeats is not None and old.target is not None:
                self._heartbeats.forget(old.target)
        fresh, done = dict[Place, P](), Future[None]()
        try:
            for place in ended:
                fresh[place] = self._spawned(place, self._ranks[place])
        except ClusterError as error:
            self._end_unstarted(fresh, error)
            done.set_exception(error)
            return Replacement(ended, done)
        thread = threading.Thread(target=self._restart, args=(fresh, done), name="replacement", daemon=True)
        self._replacing |= {place: (process, thread) for place, process in fresh.items()}
        thread.start()
        return Replacement(ended, done)

    def _restart(self, fresh: Mapping[Place, P], done: Future[None]) -> None:
        """Make new processes the ranks of their places."""
        failure: BaseException | None = None
        try:
            self._seat(fresh)
            self._join(fresh)
        except BaseException as error:  # noqa: BLE001  the reader of the replacement raises it
            failure = error
            self._end_unstarted(fresh, error)
        for place, process in fresh.items():
            if failure is None:
                self._ranks[place] = process
                self.epochs[place] += 1
            del self._replacing[place]
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)

    def _end_unstarted(self, fresh: Mapping[Place, P], error: BaseException) -> None:
        """End new processes that do not become ranks."""
        for process in fresh.values():
            self._end(process, RankLost("could not be started", why=str(error)))

    def close(self) -> None:
        """See Backend."""
        closed = RankLost("was closed", why="the backend was closed")
        starting = list(self._replacing.values())
        for process, _ in starting:  # first, or a replacement would end well while ranks leave
            self._end(process, closed)
        if self._ranks:  # a busy or dead rank cannot close its resources; it is killed anyway
            leaving = [self._ask(process, joined_rank.leave) for process in self._ranks.values()]
            self._wait_for_all(leaving, _CLOSE_S)
        processes = [*self._ranks.values(), *(process for process, _ in starting)]
        for process in processes:
            self._end(process, closed)
        for _, thread in starting:
            thread.join(_CLOSE_S)
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None
        self._release(processes)
        for held in (self.pools, self.devices, self._ranks):
            held.clear()
