"""Tables and another machine's store in one event loop: what each asks of the other, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rillflow.data_plane.schema import ColumnType, StageColumns
from rillflow.errors import RillflowError, StreamError
from rillflow.workers.wire import Message, packed
from rillflow_service.plane import SEGMENT, Plane
from rillflow_service.remote_store import RemoteStore
from rillflow_service.requests import CELLS, IDS, ROWS, Begin, Create, Done, Kind, Reserve
from rillflow_service.segments import Memory
from rillflow_service.session import Session
from rillflow_service.store import Store

X = np.arange(6, dtype=np.float32)
STREAM = Create(
    stream="s",
    columns={"x": ColumnType(dtype="float32"), "y": ColumnType(dtype="float32")},
    stages=[
        StageColumns(name="sample", reads=("x",), writes=("y",)),
        StageColumns(name="train", reads=("x", "y")),
    ],
    capacity=4,
)


class Joined:
    """Tables, and a store that has joined them."""

    def __init__(self) -> None:
        self.tables, self.store = (Plane(Store(Memory(), capacity_bytes=2**20)) for _ in range(2))
        self.asked: list[Message] = []
        self.is_closed = False
        self._session = Session(self.store, "tables", is_table=True)
        self.there = RemoteStore("b:1", self._send, self._close)
        self.number = self.tables.join(self.there)
        self.tables.create(STREAM, "task")
        self.tables.settle("w#1", "b:1", "w#9")

    async def _send(self, message: Message) -> None:
        self.asked.append(message)
        try:
            answer = await self._session.answer(message)
        except RillflowError as error:
            answer = Message(kind=Kind.ERROR, says={"what": error.what, "why": error.why, "fix": error.fix})
        self.there.answered(answer)

    def _close(self) -> None:
        self.is_closed = True

    async def put(self, **columns: np.ndarray) -> int:
        """Write columns of single rows into the store, as its worker does; the segment."""
        arrays: dict[str, Any] = {ROWS: np.ones(len(next(iter(columns.values()))), np.int64), **columns}
        frame = packed(SEGMENT, {}, arrays)
        number = await self.store.reserve(Reserve(nbytes=frame.nbytes), "w#9")
        frame.write_into(self.store.store.segments.opened(number, is_shared=True))
        return number


async def granted(plane: Plane, stage: str, holder: str, count: int = 9) -> Message:
    says = {"stream": "s", "stage": stage, "count": count, "wait_s": 5.0}
    return await Session(plane, holder).answer(Message(kind=Kind.TAKE, says=says, arrays={}))


def test_columns_stay_where_they_were_written_and_are_freed_there() -> None:
    async def run() -> None:
        both = Joined()
        segment = await both.put(x=X)
        with pytest.raises(StreamError, match="6 groups"):
            await both.tables.begin(Begin(stream="s", segment=segment, wait_s=0.0), None, "w#1")
        segment = await both.put(x=X[:3])
        begun = await both.tables.begin(Begin(stream="s", segment=segment), None, "w#1")
        assert begun.tolist() == [0, 1, 2]
        lease = await granted(both.tables, "sample", "w#1")
        assert lease.says["stores"] == [[both.number, "b:1"]]
        assert lease.arrays[f"{CELLS}0"].tolist() == [[both.number, segment, place] for place in range(3)]
        cells = lease.arrays[f"{CELLS}0"][:, 1:]
        fetch = Message(kind=Kind.FETCH, says={"columns": ["x"]}, arrays={CELLS: cells})
        found = await Session(both.store, "reader").answer(fetch)
        assert found.arrays["x"].tolist() == [0, 1, 2] and found.arrays[ROWS].tolist() == [1, 1, 1]
        written = await both.put(y=X[3:])
        done = Done(stream="s", lease=lease.says["lease"], segment=written)
        await both.tables.done(done, lease.arrays[IDS], None, "w#1")
        train = await granted(both.tables, "train", "r#1")
        assert {tuple(row) for row in train.arrays[f"{CELLS}1"][:, :2].tolist()} == {(both.number, written)}
        asked = len(both.asked)
        await both.tables.done(Done(stream="s", lease=train.says["lease"]), train.arrays[IDS], None, "r#1")
        for _ in range(9):
            await asyncio.sleep(0)
        assert [each.kind for each in both.asked[asked:]] == [Kind.CLEAR] * 2
        assert (both.tables.table("s").oldest, both.store.store.used_bytes) == (3, 2**17)
        assert both.tables.store.used_bytes == 0 and not both.is_closed

    asyncio.run(run())


def test_a_stage_without_columns_asks_nothing_of_the_store() -> None:
    async def run() -> None:
        both = Joined()
        segment = await both.put(x=X[:1])
        await both.tables.begin(Begin(stream="s", segment=segment), None, "w#1")
        lease = await granted(both.tables, "sample", "w#1")
        segment = await both.put(y=X[:1])
        done = Done(stream="s", lease=lease.says["lease"], segment=segment)
        await both.tables.done(done, lease.arrays[IDS], None, "w#1")
        train, asked = await granted(both.tables, "train", "w#1"), len(both.asked)
        await both.tables.done(Done(stream="s", lease=train.says["lease"]), train.arrays[IDS], None, "w#1")
        assert Kind.KEEP not in [each.kind for each in both.asked[asked:]]

    asyncio.run(run())


def test_who_writes_elsewhere_sends_no_columns_until_it_has_gone() -> None:
    async def run() -> None:
        both, arrays = Joined(), {ROWS: np.ones(1, np.int64), "x": X[:1]}
        with pytest.raises(StreamError, match="w#1 sends columns"):
            await both.tables.keep(Begin(stream="s"), arrays, "w#1")
        await both.tables.died("w#1")
        request = await both.tables.keep(Begin(stream="s"), arrays, "w#1")
        assert isinstance(request, Begin) and request.segment is not None

    asyncio.run(run())


def test_a_failed_put_is_given_up_in_the_store() -> None:
    async def run() -> None:
        both = Joined()
        await both.put(x=X[:1])
        assert both.store.store.used_bytes > 0
        await both.tables.give_up("w#1")
        assert [each.kind for each in both.asked] == [Kind.CLEAR]
        assert both.asked[0].says == {"is_unread": True, "holder": "w#9"}

    asyncio.run(run())


def test_groups_of_a_lost_store_are_dropped_with_its_address() -> None:
    async def run() -> None:
        both = Joined()
        segment = await both.put(x=X[:2])
        await both.tables.begin(Begin(stream="s", segment=segment), None, "w#1")
        both.there.end()
        both.tables.lost(both.number)
        reason = "store b:1 is gone, with columns of the group"
        assert both.tables.status("s")["dropped"] == {reason: 2}
        assert both.tables.status("s")["stores"] == []
        with pytest.raises(StreamError, match="no such store has joined"):
            both.tables.settle("w#2", "b:1", "w#9")
        with pytest.raises(StreamError, match="the columns' store is gone"):
            await both.tables.begin(Begin(stream="s", segment=segment), None, "w#1")

    asyncio.run(run())


def test_two_stores_of_one_address_are_refused() -> None:
    async def run() -> None:
        both = Joined()
        with pytest.raises(StreamError, match="a store at b:1 has joined already"):
            both.tables.join(both.there)

    asyncio.run(run())


def test_a_store_that_cannot_be_reached_is_gone_and_its_connection_closed() -> None:
    async def run() -> None:
        closed: list[bool] = []

        async def send(_: Message) -> None:
            raise OSError("broken pipe")

        there = RemoteStore("b:1", send, lambda: closed.append(True))
        with pytest.raises(StreamError, match="store b:1 is gone"):
            await there.give_up("w#9")
        assert closed == [True]

    asyncio.run(run())
