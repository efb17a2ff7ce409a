"""Process rank: one rank as a process of the driver's machine; see ``workers.processes``.

Loop of a rank's process
    consumes      calls from its socket, in order
    waits for     the values its arguments refer to, which the driver forwards; at most deadline_s
    unblocked by  the ranks that make them, or the error that ended them
    produces      one reply for each call, and heartbeats from a thread of its own (``workers.liveness``)
    shuts down    with its parent, the driver or the fork server; ``ProcessBackend.close`` kills it
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

from rillflow.errors import ClusterError, RillflowError, Signalled
from rillflow.runs.error_lines import innermost_line
from rillflow.workers import nodes
from rillflow.workers.backend import RankLost
from rillflow.workers.collectives import Stranded
from rillflow.workers.joined_rank import JoinedRank
from rillflow.workers.messages import Slot, cannot_travel
from rillflow.workers.segments import MemorySegment, SegmentPool
from rillflow.workers.shared_memory import Frame, Parcel, receive, send

HERE = "127.0.0.1"
"""Address of every rank: collectives and heartbeats stay on the loopback device."""


class FrameKind(IntEnum):
    """Kind of a frame, and its numbers."""

    CALL = 0
    """To the rank: call, number of results, era. Parcel: function and arguments."""
    SETUP = 1
    """To the rank: a call whose function takes the ProcessRank, not its site."""
    DONE = 2
    """From the rank: call. Parcels: its results."""
    FAILED = 3
    """From the rank: call. Parcel: the error."""
    FETCH = 4
    """From the rank: fetch, names of references."""
    FOUND = 5
    """To the rank: fetch, name. Parcel: the value."""
    LOST = 6
    """To the rank: fetch, name. Parcel: the error that ended the call of the reference."""


class ProcessRank(JoinedRank):
    """One rank: a process of the driver's machine.

    Args:
        connection: socket to the driver.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(HERE)
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._waiting = deque[Frame]()
        self._pool = SegmentPool()
        self._fetches = 0

    def serve(self) -> None:
        """Run calls until the driver has gone."""
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Run the next call; return False if there is none any more. No value outlives it."""
        frame = self._waiting.popleft() if self._waiting else receive(self._connection)
        if frame is None:
            return False
        call = frame.numbers[0]
        try:
            found = self._run(frame)
            done = Frame(kind=FrameKind.DONE, numbers=(call,), parcels=found)
            packet, segments = done.packet(self._pool)
        except KeyboardInterrupt:
            error = Stranded("was abandoned", why="the run was stopped")
            nodes.leave_collectives(self.site)
            packet, segments = self._failed(call, error)
        except BaseException as error:  # noqa: BLE001  the reader of the result raises it
            nodes.leave_collectives(self.site)
            if not isinstance(error, RillflowError) and self.site is not None:
                error.add_note(f"on {self.site.place}, {innermost_line(error)}")
            packet, segments = self._failed(call, error)
        send(self._connection, packet, segments)
        return True

    def _run(self, frame: Frame) -> tuple[Parcel, ...]:
        """Run a call, and return its results.

        Raises:
            Signalled: the run abandoned the call.
        """
        _, results, era = frame.numbers
        work, arguments = frame.parcels[0].open()
        if era < self._era and frame.kind == FrameKind.CALL:
            raise Signalled
        try:
            self._running_era = era
            found = work(self if frame.kind == FrameKind.SETUP else self.site, *arguments)
        finally:
            self._running_era = math.inf
        try:
            return tuple(Parcel.of(each, self._pool) for each in ((found,) if results == 1 else found))
        except Exception as error:  # noqa: BLE001  any error of a result's own pickling
            of = arguments[0] if arguments else work.__name__
            at = "" if self.site is None else f" on {self.site.place}"
            raise cannot_travel(f"the result of {of}{at}", error) from None

    def fetch(self, slots: Sequence[Slot], fields: Collection[str] | None = None) -> list[Any]:
        """Return the values of references; see Site. All fields of a batch are mapped, and none is copied."""
        del fields
        names = [int(slot.name) for slot in slots]
        self._fetches += 1
        request = Frame(kind=FrameKind.FETCH, numbers=(self._fetches, *dict.fromkeys(names)))
        send(self._connection, *request.packet(self._pool))
        found, end = dict[int, Parcel](), time.monotonic() + self.deadline_s
        while len(found) < len({*names}):
            frame = self._awaited(end)
            if frame.kind in (FrameKind.CALL, FrameKind.SETUP):
                self._waiting.append(frame)
            elif frame.numbers[0] != self._fetches:
                continue  # of a fetch that has ended
            elif frame.kind == FrameKind.LOST:
                raise _loss(frame.parcels[0].open()) from None
            else:
                found[frame.numbers[1]] = frame.parcels[0]
        assert self.site is not None, "a call runs on a rank that has joined"
        self.site.fetched_bytes += sum(len(parcel.content) for parcel in found.values())
        return [found[name].open() for name in names]

    def _awaited(self, end: float) -> Frame:
        """Return the next frame.

        Raises:
            ClusterError: there is none before ``end``.
            Signalled: the run abandoned the running call.
        """
        if not self._poller.poll(max(0.0, end - time.monotonic()) * 1000):
            raise self._late_argument()
        held, self._running_era = self._running_era, math.inf  # a signal must not lose the frame
        frame = receive(self._connection)
        self._running_era = held
        if frame is None:
            os._exit(1)
        if held < self._era:
            raise Signalled
        return frame

    def _failed(self, call: int, error: BaseException) -> tuple[bytes, list[MemorySegment]]:
        """Return the packet of a call's error; an error that cannot travel becomes a ClusterError."""
        try:
            parcel = Parcel.of(error, self._pool)
            parcel.open()
        except Exception:  # noqa: BLE001  any error of an exception's own pickling
            why = f"raised at {innermost_line(error)}"
            parcel = Parcel.of(ClusterError(f"{type(error).__name__}: {error}", why=why), self._pool)
        return Frame(kind=FrameKind.FAILED, numbers=(call,), parcels=(parcel,)).packet(self._pool)


def main(descriptor: int) -> None:
    """Serve the driver at the other end of a socket."""
    ProcessRank(socket.socket(fileno=descriptor)).serve()


def _loss(error: BaseException) -> BaseException:
    """Return the error of a call whose argument was lost."""
    if not isinstance(error, RankLost):
        return error
    return Stranded(error.of("the rank of an argument"), why=error.why, fix=error.fix)
