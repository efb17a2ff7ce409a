"""Processes: run every rank as a process of this machine, without Ray.

    driver ── one Unix socket per rank ──> ProcessRank 0, 1, ...      one call at a time, in order
       │   <── replies, fetches ──            │ large arrays: anonymous shared memory (``workers.parcels``)
       └── holds the content of every result, and the descriptors of its arrays, and forwards them

A result's arrays stay where its rank has put them: the driver passes their descriptor to a rank that fetches
the result, and that rank maps them. A rank ends with the driver, also after its kill -9, and its memory with
the last process that holds it. Ranks on the CPU are forks of one process (``workers.fork_server``).

Loop of the driver's thread: see ``workers.local_ranks``; of a replacement's thread: see ``workers.ray``.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from rillflow.errors import ClusterError
from rillflow.workers import process_rank
from rillflow.workers.backend import (
    Backend,
    Place,
    Pool,
    RankCall,
    RankLost,
    Replacement,
    devices_of,
)
from rillflow.workers.fork_server import ForkServer
from rillflow.workers.liveness import Heartbeats
from rillflow.workers.local_ranks import EventLoop, LocalProcess, LocalRank, ProcessReference, SentCall
from rillflow.workers.messages import cannot_travel, heaviest
from rillflow.workers.nodes import Seating
from rillflow.workers.parcels import Frame, Parcel
from rillflow.workers.pending import await_replies, broken_worlds
from rillflow.workers.process_rank import HERE, FrameKind
from rillflow.workers.segments import SegmentPool
from rillflow.workers.watchdog import start_child

_ABANDON_S = 5.0
"""Seconds in which a rank ends its running call."""
_CLOSE_S = 3.0
"""Seconds that ranks have to close their resources before they are killed."""
_START_EACH_S = 15.0
"""Additional start time in seconds per rank: imports take time, and ranks share the machine's cores."""
_BOOT = (
    "import sys; from rillflow.workers.watchdog import end_with; end_with(int(sys.argv[1])); "
    "from rillflow.workers.process_rank import main; main(int(sys.argv[2]))"
)
"""Start of a rank without the fork server."""


class ProcessBackend(Backend):
    """Backend that runs calls on processes of this machine.

    Args:
        deadline_s: longest wait of a rank for another one's result.
        start_s: longest start of the processes; each rank adds some seconds.
        load_s: see Backend.
        heartbeat_s: silence of a rank after which it is lost; 0: no heartbeats.
        forks: starts ranks on the CPU. Its owner closes it, or the backend, if no rank is on the CPU. None:
            one of its own, without modules.

    Example:
        backend = ProcessBackend()
        backend.open([Pool(name="actors", size=4, world=1)])
    """

    def __init__(
        self,
        deadline_s: float = 3600.0,
        *,
        start_s: float = 60.0,
        load_s: float = 0.0,
        heartbeat_s: float = 5.0,
        forks: ForkServer | None = None,
    ) -> None:
        super().__init__(deadline_s, load_s=load_s)
        self._start_s, self._heartbeat_s, self._forks = start_s, heartbeat_s, forks or ForkServer([])
        self._owns_forks = forks is None
        self._ranks: dict[Place, LocalRank] = {}
        self._replacing: dict[Place, tuple[LocalRank, threading.Thread]] = {}
        self._references: WeakValueDictionary[int, ProcessReference] = WeakValueDictionary()
        self._names = itertools.count()
        self._accelerators: dict[Place, str] = {}
        self.pool = SegmentPool()
        """Shared memory of arguments."""
        self._era = 0
        self._counting = threading.Lock()
        self._loop: EventLoop | None = None
        self._heartbeats: Heartbeats | None = None

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.devices = devices_of(pools, device)
        self._assign([place for place in found if self.devices[place.pool] != "cpu"])
        self._loop = EventLoop()
        if self._heartbeat_s:
            self._heartbeats = Heartbeats(HERE, self._heartbeat_s)
        if len(self._accelerators) == len(found):
            self._forks.close()  # no rank is a fork
        for place in found:
            self._ranks[place] = self._spawned(place)
        self._join(self._ranks)

    def _assign(self, found: Sequence[Place]) -> None:
        """Give each rank an accelerator of its own.

        Raises:
            ClusterError: there are too few.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        there = [str(index) for index in range(torch.cuda.device_count())] if found else []
        there = visible.split(",")[: len(there)] if visible else there
        if len(found) > len(there):
            raise ClusterError(
                f"the pools need {len(found)} accelerators, but this machine has {len(there)}",
                why="every rank of a pool that computes on accelerators takes one",
                fix="make a pool smaller, or let roles share one",
            )
        self._accelerators = dict(zip(found, there, strict=False))

    @property
    def _wait_s(self) -> float:
        """Longest start of all processes."""
        return self._start_s + _START_EACH_S * len(self._worlds)

    def _spawned(self, place: Place) -> LocalRank:
        """Start the process of a rank; CUDA may not work in a fork, because imports can initialise it."""
        assert self._loop is not None, "the backend is open"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process: LocalProcess
        with theirs:
            end = theirs.fileno()
            if place in self._accelerators:
                told = {"CUDA_VISIBLE_DEVICES": self._accelerators[place]}
                process = self._loop.run(partial(start_child, _BOOT, end, descriptors=[end], told=told))
            else:
                process = self._forks.start(end, self._wait_s)
        return LocalRank(process, ours, self._loop, self)

    def _join(self, fresh: Mapping[Place, LocalRank]) -> None:
        """Make processes the ranks of their places, and connect the ranks of each world."""
        first = [at for at in fresh if self._worlds[at][0] == at and len(self._worlds[at]) > 1]
        hosting = {
            at: self._ask(fresh[at], process_rank.host, len(self._worlds[at]), self._collective_s)
            for at in first
        }
        ports = self._asked("opening the store of its world", hosting)
        joining = {}
        for at, rank in fresh.items():
            world = self._worlds[at]
            if self._heartbeats is not None:
                pid = rank.process.pid
                rank.target = self._heartbeats.watch(at, rank.lose, node=HERE, local_pid=pid)
            seating = Seating(
                place=at,
                pool_size=self.pools[at.pool],
                index=world.index(at),
                size=len(world),
                host=HERE,
                port=ports.get(world[0], 0),
                backend="gloo" if self.devices[at.pool] == "cpu" else "cpu:gloo,cuda:nccl",
                neighbours=len(self._worlds),
                ahead_s=0.0,
                deadline_s=self._deadline_s,
                collective_s=self._collective_s,
                target=rank.target,
            )
            joining[at] = self._ask(rank, process_rank.join, seating)
        self._asked("joining its world", joining)

    def _ask(self, rank: LocalRank, work: Callable[..., Any], *arguments: Any) -> ProcessReference:
        """Run a function of ``process_rank`` on a process."""
        return self._sent(rank, FrameKind.SETUP, Parcel.of((work, arguments), self.pool), 1)[0]

    def _asked(self, doing: str, calls: Mapping[Place, ProcessReference]) -> dict[Place, Any]:
        return await_replies(doing, calls, self, self._wait_s, fix="raise placement.start_s")

    def mend(self, pools: Collection[str], deadline_s: float) -> None:
        """See Backend."""
        there = [at for at in self._ranks if at.pool in pools and len(self._worlds[at]) > 1]
        left = {at: self._ask(self._ranks[at], process_rank.has_left) for at in there}
        for world in broken_worlds(left, self._worlds, self, deadline_s):
            size = len(world)
            host = self._ask(self._ranks[world[0]], process_rank.host, size, self._collective_s)
            port = self._asked("opening a new store of its world", {world[0]: host})[world[0]]
            joining = {at: self._ask(self._ranks[at], process_rank.meet_again, port) for at in world}
            self._asked("joining its world again", joining)

    def pack(self, value: Any, what: str) -> Any:
        """See Backend; large arrays are copied once, into memory that all ranks map."""
        try:
            return Parcel.of(value, self.pool, ProcessReference)
        except Exception as error:  # noqa: BLE001  any error of an argument's own pickling
            named = heaviest(value, lambda each: Parcel.of(each, self.pool, ProcessReference).nbytes)
            raise cannot_travel(what + named, error) from None

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        try:
            parcel = Parcel.of((work, arguments), self.pool, ProcessReference)
        except Exception as error:  # noqa: BLE001  any error of an argument's own pickling
            raise cannot_travel("an argument of a call", error) from None
        self.count(calls=1, sent_bytes=parcel.nbytes)
        return self._sent(self._ranks[place], FrameKind.CALL, parcel, results)

    def _sent(
        self, rank: LocalRank, kind: FrameKind, parcel: Parcel, results: int
    ) -> tuple[ProcessReference, ...]:
        made = tuple(ProcessReference(next(self._names)) for _ in range(results))
        for each in made:
            self._references[each.name] = each
        frame = Frame(kind=kind, numbers=(made[0].name, results, self._era), parcels=(parcel,))
        rank.submit(frame, SentCall(results=made, held=parcel.references))
        return made

    def forward(self, rank: LocalRank, fetch: int, name: int) -> None:
        """Send a rank the value of a reference once it is there."""

        def answer(made: Future[Parcel]) -> None:
            error = made.exception()
            parcel = made.result() if error is None else Parcel.of(error, self.pool)
            kind = FrameKind.FOUND if error is None else FrameKind.LOST
            self.count(sent_bytes=len(parcel.content))
            rank.send(Frame(kind=kind, numbers=(fetch, name), parcels=(parcel,)))

        made = self._references.get(name)
        if made is None:
            made = ProcessReference(name)
            made.set_exception(RankLost("has a reference that nobody holds", why="the call had ended"))
        made.add_done_callback(answer)

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        """See Backend."""
        if len(references) > 1:
            done, late = wait({*references}, timeout=deadline_s, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
            if late:
                raise TimeoutError
        parcels = [each.result(deadline_s) for each in references]
        self.count(read_bytes=sum(parcel.nbytes - len(parcel.content) for parcel in parcels))
        return [parcel.open() for parcel in parcels]

    def count(self, *, calls: int = 0, sent_bytes: int = 0, read_bytes: int = 0) -> None:
        """Count traffic, from either thread: a content when it passes, arrays when they are read."""
        with self._counting:
            self.traffic.calls += calls
            self.traffic.sent_bytes += sent_bytes
            self.traffic.read_bytes += read_bytes

    def is_ready(self, reference: Any) -> bool:
        """See Backend."""
        return bool(reference.done())

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """See Backend."""
        return bool(wait({*references}, timeout=deadline_s, return_when=FIRST_COMPLETED).done)

    def abandon(self) -> float:
        """See Backend; a rank without heartbeats finishes its running call."""
        self._era += 1
        if self._heartbeats is not None:
            self._heartbeats.abandon()
        return min(_ABANDON_S, self._deadline_s)

    @property
    def refused(self) -> int:
        """See Backend."""
        return sum(rank.refused for rank in self._ranks.values())

    def replace(self, places: Collection[Place]) -> Replacement:
        """See Backend."""
        ended = self._all_of(places)
        if again := [place for place in ended if place in self._replacing]:
            raise ClusterError(
                f"{again[0]} is being replaced",
                why="its new process is still starting",
                fix="wait until the replacement is ready",
            )
        for place in ended:
            old = self._ranks[place]
            old.lose(RankLost("was replaced", why="a new process has its place"))
            if self._heartbeats is not None and old.target is not None:
                self._heartbeats.forget(old.target)
        fresh, done = dict[Place, LocalRank](), Future[None]()
        try:
            for place in ended:
                fresh[place] = self._spawned(place)
        except ClusterError as error:
            for rank in fresh.values():
                rank.lose(RankLost("could not be started", why=str(error)))
            done.set_exception(error)
            return Replacement(ended, done)
        thread = threading.Thread(target=self._restart, args=(fresh, done), name="replacement", daemon=True)
        self._replacing |= {place: (rank, thread) for place, rank in fresh.items()}
        thread.start()
        return Replacement(ended, done)

    def _restart(self, fresh: Mapping[Place, LocalRank], done: Future[None]) -> None:
        """Make new processes the ranks of their places."""
        found: BaseException | None = None
        try:
            self._join(fresh)
        except BaseException as error:  # noqa: BLE001  the reader of the replacement raises it
            found = error
        for place, rank in fresh.items():
            if found is None:
                rank.refused = self._ranks[place].refused
                self._ranks[place] = rank
                self.epochs[place] += 1
            else:
                rank.lose(RankLost("could not be started", why=str(found)))
            del self._replacing[place]
        if found is None:
            done.set_result(None)
        else:
            done.set_exception(found)

    def close(self) -> None:
        """See Backend."""
        if self._loop is None:
            return
        closed = RankLost("was closed", why="the backend was closed")
        starting = list(self._replacing.values())
        for rank, _ in starting:  # first, or a replacement would end well while ranks leave
            rank.lose(closed)
        leaving = [self._ask(rank, process_rank.leave) for rank in self._ranks.values()]
        wait(leaving, timeout=_CLOSE_S)  # a busy or dead rank cannot close; it is killed anyway
        every = [*self._ranks.values(), *(rank for rank, _ in starting)]
        for rank in every:
            rank.lose(closed)
        for _, thread in starting:
            thread.join(_CLOSE_S)
        for rank in every:
            rank.process.wait()
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None
        if self._owns_forks:
            self._forks.close()
        self._loop.close()
        self._loop = None
        for held in (self.pools, self.devices, self._ranks):
            held.clear()
