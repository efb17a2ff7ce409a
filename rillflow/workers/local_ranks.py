"""Local ranks: the driver's side of ranks that are processes of this machine; see ``workers.processes``.

Loop of the driver's thread, one for all ranks
    consumes      packets of ranks, and the ends of their processes
    waits for     either, with epoll
    unblocked by  a packet, room in a socket that was full, a process that ends, ``close``
    produces      results of references; what ranks fetch
    shuts down    ``close``, after every process has ended; or with the driver
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rillflow.errors import ClusterError
from rillflow.isolation.child_process import how_ended
from rillflow.workers.backend import RankLost
from rillflow.workers.liveness import HeartbeatTarget
from rillflow.workers.process_rank import HERE, FrameKind
from rillflow.workers.segments import MemorySegment, SegmentPool
from rillflow.workers.shared_memory import Frame, Parcel, receive, send


class ProcessReference(Future[Parcel]):
    """One result of a call.

    Args:
        name: its name in messages.
    """

    def __init__(self, name: int) -> None:
        super().__init__()
        self.name = name


@dataclass(frozen=True, kw_only=True)
class SentCall:
    """A call that has not been answered."""

    results: Sequence[ProcessReference]
    held: tuple[Any, ...]
    """References among its arguments, which stay readable until it ends."""


class Switchboard(Protocol):
    """What a rank's packets ask of the backend."""

    pool: SegmentPool
    """Shared memory of arguments."""

    def forward(self, rank: LocalRank, fetch: int, name: int) -> None:
        """Send a rank the value of a reference once it is there."""

    def count(self, *, calls: int = 0, sent_bytes: int = 0, read_bytes: int = 0) -> None:
        """Count traffic."""

    def refuse(self) -> None:
        """Count a reply that came after its rank was lost."""


class LocalProcess(Protocol):
    """Process of a rank: a ChildProcess, or a ForkedProcess."""

    @property
    def pid(self) -> int:
        """Number of the process."""

    def kill(self) -> None:
        """Kill the process, unless it has ended."""

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, or its signal's number below zero."""


class LocalRank:
    """The driver's side of one process of a rank.

    Args:
        process: the process.
        connection: socket to it.
        loop: the driver's thread.
        backend: forwards the references that it fetches, and counts its traffic.
    """

    def __init__(
        self,
        process: LocalProcess,
        connection: socket.socket,
        loop: EventLoop,
        backend: Switchboard,
    ) -> None:
        self.process, self.connection = process, connection
        self.target: HeartbeatTarget | None = None
        """Where its heartbeats go, if it sends any."""
        self._loop, self._backend = loop, backend
        self._lock = threading.Lock()
        self._unsent = deque[tuple[bytes, list[MemorySegment]]]()
        self._calls: dict[int, SentCall] = {}
        self._lost: RankLost | None = None
        connection.setblocking(False)
        self._end = os.pidfd_open(process.pid)
        loop.add(connection.fileno(), select.EPOLLIN, self._handle)
        loop.add(self._end, select.EPOLLIN, self._ended)

    @property
    def node(self) -> str:
        """Address of its node."""
        return HERE

    @property
    def local_pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    def submit(self, frame: Frame, sent: SentCall) -> None:
        """Send a call after those before it."""
        with self._lock:
            lost = self._lost
            if lost is None:
                self._calls[frame.numbers[0]] = sent
        if lost is None:
            self.send(frame)
        else:
            for each in sent.results:
                each.set_exception(lost)

    def send(self, frame: Frame) -> None:
        """Send a frame after those before it; wait for nothing."""
        packet, segments = frame.packet(self._backend.pool)
        with self._lock:
            if self._lost is not None:
                return
            self._unsent.append((packet, segments))
            if len(self._unsent) == 1:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                send(self.connection, *self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.change(self.connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except OSError:  # the process has ended, and ``_ended`` tells of that
            self._unsent.clear()

    def lose(self, reason: RankLost) -> None:
        """End the process; its calls that have not been answered, and later ones, raise the reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            calls, self._calls = self._calls, {}
            self._unsent.clear()
        self.process.kill()
        for call in calls.values():
            for each in call.results:
                each.set_exception(reason)

    def _handle(self, events: int) -> None:
        """Handle an event of the socket."""
        if events & select.EPOLLOUT:
            with self._lock:
                self._loop.change(self.connection.fileno(), select.EPOLLIN)
                self._flush()
        if events & select.EPOLLIN:
            self._receive()
        elif events & select.EPOLLHUP:  # the process closed it, and ``_ended`` tells why
            self._loop.remove(self.connection.fileno())

    def _receive(self) -> bool:
        """Handle the next frame; return False if there is none."""
        try:
            frame = receive(self.connection)
        except OSError:
            return False
        except ClusterError as error:
            self.lose(RankLost("cannot be heard", why=f"{error.what}: {error.why}", fix=error.fix))
            return False
        if frame is None:
            return False
        if frame.kind == FrameKind.FETCH:
            for name in frame.numbers[1:]:
                self._backend.forward(self, frame.numbers[0], name)
            return True
        self._backend.count(read_bytes=sum(len(parcel.content) for parcel in frame.parcels))
        with self._lock:
            call = self._calls.pop(frame.numbers[0], None)
        if call is None:
            self._backend.refuse()
        elif frame.kind == FrameKind.DONE:
            for made, parcel in zip(call.results, frame.parcels, strict=True):
                made.set_result(parcel)
        else:
            raised = frame.parcels[0].open()
            for made in call.results:
                made.set_exception(raised)
        return True

    def _ended(self, _: int) -> None:
        """Take what the process has sent before it ended, and lose it."""
        self._loop.remove(self._end)
        self._loop.remove(self.connection.fileno())
        os.close(self._end)
        while self._receive():
            pass
        self.connection.close()
        how = how_ended(self.process.wait())
        self.lose(
            RankLost(
                "has died",
                why=f"process {self.process.pid} ended {how}",
                fix="read the end of its output; dmesg lists processes that were killed for memory",
            )
        )


class EventLoop:
    """The driver's thread: handles the events of descriptors, one after the other."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wake = os.eventfd(0)
        self._is_closed = False
        self.add(self._wake, select.EPOLLIN, self._woken)
        self._thread = threading.Thread(target=self._run, name="local ranks", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, events: int, handle: Callable[[int], None]) -> None:
        """Call a function with the events of a descriptor, from the thread."""
        self._handlers[descriptor] = handle
        self._poll.register(descriptor, events)

    def change(self, descriptor: int, events: int) -> None:
        """Handle other events of a descriptor."""
        with suppress(FileNotFoundError):  # its process has ended
            self._poll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Handle no more events of a descriptor; a second call has no effect."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._poll.close()
        os.close(self._wake)

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake)

    def _run(self) -> None:
        while not self._is_closed:
            for descriptor, events in self._poll.poll():
                if (handle := self._handlers.get(descriptor)) is not None:
                    handle(events)
