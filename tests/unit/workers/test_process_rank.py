"""A process rank: calls that come while it waits for an argument, calls of before a stop, notes of errors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rillflow.errors import RecordError
from rillflow.workers.backend import Place, Site
from rillflow.workers.collectives import SingleRank, Stranded
from rillflow.workers.joined_rank import has_left
from rillflow.workers.messages import Slot
from rillflow.workers.nodes import Seating
from rillflow.workers.process_rank import FrameKind, ProcessRank
from rillflow.workers.segments import SegmentPool
from rillflow.workers.shared_memory import Frame, Parcel, receive, send

POOL = SegmentPool()


class StoppedSocket(socket.socket):
    """A socket during whose reads the run may be stopped."""

    stops: Callable[[], None] | None = None
    """Called once, while a frame is read."""
    reads = 0

    def recvmsg(self, *sizes: Any) -> Any:
        frame = super().recvmsg(*sizes)
        self.reads += 1
        if self.stops is not None and self.reads == 2:
            self.stops()
        return frame


class DriverEnd:
    """The driver's end of a rank's socket; the rank serves in the test's own thread."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = StoppedSocket(fileno=theirs.detach())
        self.rank = ProcessRank(self.theirs)
        self.rank.deadline_s = 10.0
        self.rank.site = Site(place=Place("main", 1), ranks=SingleRank(), fetch=self.rank.fetch)

    def put(self, kind: FrameKind, *numbers: int, value: Any) -> None:
        """Send a frame with one value."""
        frame = Frame(kind=kind, numbers=numbers, parcels=(Parcel.of(value, POOL),))
        send(self.socket, *frame.packet(POOL))

    def call(self, number: int, work: Any, *arguments: Any, era: int = 0) -> None:
        """Send a call with one result."""
        self.put(FrameKind.CALL, number, 1, era, value=(work, arguments))

    def replies(self) -> list[tuple[int, int, Any]]:
        """Let the rank serve what was sent; return kind, first number and value of each frame it sent."""
        self.socket.shutdown(socket.SHUT_WR)
        self.rank.serve()
        self.theirs.close()
        found = []
        while (frame := receive(self.socket)) is not None:
            value = frame.parcels[0].open() if frame.parcels else None
            found.append((frame.kind, frame.numbers[0], value))
        return found


@pytest.fixture
def driver() -> Iterator[DriverEnd]:
    made = DriverEnd()
    with made.socket:
        yield made


def same(_: Site, value: Any) -> Any:
    return value


def fetched(site: Site, name: int) -> Any:
    return site.fetch([Slot(str(name))])[0]


def complain(_: Site) -> None:
    raise RecordError("the batch has no field 'z'", fix="add it")


def divide(_: Site) -> float:
    return 1 / 0


def test_a_call_that_comes_while_another_waits_for_its_argument_runs_after_it(driver: DriverEnd) -> None:
    driver.call(1, fetched, 7)
    driver.call(2, same, "second")
    driver.put(FrameKind.FOUND, 1, 7, value="argument")
    assert driver.replies() == [
        (FrameKind.FETCH, 1, None),
        (FrameKind.DONE, 1, "argument"),
        (FrameKind.DONE, 2, "second"),
    ]


def test_a_stopped_rank_refuses_calls_of_before_the_stop_and_runs_later_ones(driver: DriverEnd) -> None:
    driver.rank.abandon()
    driver.call(1, same, "before")
    driver.call(2, same, "after", era=1)
    refused, done = driver.replies()
    assert refused[:2] == (FrameKind.FAILED, 1)
    assert isinstance(refused[2], Stranded) and refused[2].what == "was abandoned"
    assert done == (FrameKind.DONE, 2, "after")


def test_a_rank_that_replaces_another_one_after_a_stop_refuses_calls_of_before_the_next(
    driver: DriverEnd,
) -> None:
    seating = Seating(
        place=Place("main", 1),
        pool_size=2,
        index=0,
        size=1,
        host="127.0.0.1",
        port=0,
        backend="gloo",
        neighbours=1,
        ahead_s=0.0,
        deadline_s=10.0,
        collective_s=10.0,
        target=None,
        era=3,
    )
    driver.rank.begin(seating)
    driver.call(1, same, "of its time", era=3)
    driver.rank.abandon()
    driver.call(2, same, "after", era=4)
    driver.put(FrameKind.SETUP, 3, 1, 3, value=(has_left, ()))
    refused, done, asked = driver.replies()
    assert refused[:2] == (FrameKind.FAILED, 1) and refused[2].what == "was abandoned"
    assert done == (FrameKind.DONE, 2, "after")
    assert asked == (FrameKind.DONE, 3, False), "the setup of before the stop is not a call of the run"


def test_a_stop_while_an_argument_arrives_ends_the_call_that_waits_for_it(driver: DriverEnd) -> None:
    driver.theirs.stops = driver.rank.abandon
    driver.call(1, fetched, 7)
    driver.put(FrameKind.FOUND, 1, 7, value="argument")
    driver.call(2, same, "after", era=1)
    _, (kind, number, error), done = driver.replies()
    assert (kind, number) == (FrameKind.FAILED, 1) and error.what == "was abandoned"
    assert done == (FrameKind.DONE, 2, "after")


def test_the_line_of_an_error_is_noted_unless_the_error_explains_itself(driver: DriverEnd) -> None:
    driver.call(1, complain)
    driver.call(2, divide)
    (_, _, ours), (_, _, python) = driver.replies()
    assert str(ours) == str(RecordError("the batch has no field 'z'", fix="add it"))
    assert "__notes__" not in vars(ours)
    (note,) = python.__notes__
    assert note.startswith("on rank 1 of pool 'main'") and "in divide" in note
