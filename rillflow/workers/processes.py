"""Processes: run every rank as a process of this machine, without Ray.

    driver ── one Unix socket per rank ──> ProcessRank 0, 1, ...      one call at a time, in order
       │   <── replies, fetches ──            │ large arrays: ``workers.shared_memory``
       └── holds the content of every result, and the descriptors of its arrays, and forwards them

A result's arrays stay where its rank has put them: the driver passes their descriptor to a rank that fetches
the result, and that rank maps them. A rank ends with the driver, also after its kill -9, and its memory with
the last process that holds it. Ranks on the CPU are forks of one process (``workers.fork_server``).

Loop of the driver's thread: see ``workers.local_ranks``; of a replacement's thread: ``workers.multiprocess``.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any
from weakref import WeakValueDictionary

import torch

from rillflow.errors import ClusterError
from rillflow.isolation.child_process import start_python
from rillflow.workers.backend import Place, Pool, RankCall, RankLost, devices_of
from rillflow.workers.fork_server import ForkServer
from rillflow.workers.liveness import Heartbeats
from rillflow.workers.local_ranks import EventLoop, LocalProcess, LocalRank, ProcessReference, SentCall
from rillflow.workers.messages import cannot_travel, heaviest
from rillflow.workers.multiprocess import MultiprocessBackend
from rillflow.workers.process_rank import HERE, FrameKind
from rillflow.workers.segments import SegmentPool
from rillflow.workers.shared_memory import Frame, Parcel

_BOOT = (
    "import sys; from rillflow.isolation.child_process import end_with; end_with(int(sys.argv[1])); "
    "from rillflow.workers.process_rank import main; main(int(sys.argv[2]))"
)
"""Start of a rank without the fork server."""


class ProcessBackend(MultiprocessBackend[LocalRank]):
    """Backend that runs calls on processes of this machine.

    Args:
        deadline_s: longest wait of a rank for another one's result.
        start_s: see MultiprocessBackend, as for the other two.
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
        super().__init__(deadline_s, start_s=start_s, load_s=load_s, heartbeat_s=heartbeat_s)
        self._forks, self._owns_forks = forks or ForkServer([]), forks is None
        self._references: WeakValueDictionary[int, ProcessReference] = WeakValueDictionary()
        self._names = itertools.count()
        self._accelerators: dict[Place, str] = {}
        self.pool = SegmentPool()
        """Shared memory of arguments."""
        self._counting, self._refused = threading.Lock(), 0
        self._loop: EventLoop | None = None

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
            self._ranks[place] = self._spawned(place, None)
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

    def _spawned(self, place: Place, old: LocalRank | None) -> LocalRank:  # noqa: ARG002
        """See MultiprocessBackend; CUDA may not work in a fork, because imports can initialise it."""
        assert self._loop is not None, "the backend is open"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process: LocalProcess
        with theirs:
            end = theirs.fileno()
            if place in self._accelerators:
                told = {"CUDA_VISIBLE_DEVICES": self._accelerators[place]}
                process = start_python(_BOOT, end, descriptors=[end], told=told)
            else:
                process = self._forks.start(end, self._wait_s)
        return LocalRank(process, ours, self._loop, self)

    def _ask(self, process: LocalRank, work: Callable[..., Any], *arguments: Any) -> ProcessReference:
        """See MultiprocessBackend."""
        return self._sent(process, FrameKind.SETUP, Parcel.of((work, arguments), self.pool), 1)[0]

    def _wait_for_all(self, references: Sequence[Any], deadline_s: float) -> None:
        """See MultiprocessBackend."""
        wait({*references}, timeout=deadline_s, return_when=ALL_COMPLETED)

    def _end(self, process: LocalRank, reason: RankLost) -> None:
        """See MultiprocessBackend."""
        process.lose(reason)

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

    @property
    def refused(self) -> int:
        """See Backend."""
        return self._refused

    def refuse(self) -> None:
        """Count a reply that came after its rank was lost; only the driver's thread calls this."""
        self._refused += 1

    def _release(self, processes: Sequence[LocalRank]) -> None:
        """See MultiprocessBackend."""
        if self._loop is None:
            return
        for rank in processes:
            rank.process.wait()
        if self._owns_forks:
            self._forks.close()
        self._loop.close()
        self._loop = None
