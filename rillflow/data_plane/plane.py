"""Plane: the streams of a machine with their store, in one event loop. The tables decide.

    begin ─ waits for room in the table ─┐                      ┌─ waits for ready groups ─ take
    reserve ─ waits for bytes ───────────┤   one call at a time  ├─ done
                                         v                      v
                        table: what is ready, what goes    store: where it lies
                                         │
                                         └─ Ready, Room, Delete: bells wake who waits

| waits | for | woken by | until |
|---|---|---|---|
| reserve | bytes of the store | a segment that is free | wait_s, then who holds cells is named |
| begin | slots of the table | Room | wait_s, then who holds the oldest group is named |
| take | groups of a stage | Ready | wait_s, then who lacks what is named |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter

from rillflow.data_plane.instructions import Begun, Delete, Finished, Ids, Instruction, Lease, Ready, Room
from rillflow.data_plane.requests import Begin, Create, Done, Drop, Look, Reserve, Return, Take
from rillflow.data_plane.schema import SOURCE, ColumnType, Schema
from rillflow.data_plane.segments import ROWS, checked, gathered, mapped
from rillflow.data_plane.store import Store
from rillflow.data_plane.table import Table
from rillflow.data_plane.wire import Arrays, packed
from rillflow.errors import RillflowError, StreamError, nearest

SEGMENT = 0
"""The kind of a frame that lies in a segment."""
KEYS_REMEMBERED = 4_096
EXPIRES_EVERY_S = 0.2
DONE_WAITS_S = 60.0
"""For bytes, where columns come with what is done."""
Found = TypeVar("Found")
_Bell = tuple[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stream:
    """A table, and where its cells lie."""

    table: Table
    """Who may read what."""
    segments: dict[str, Ids]
    """By writer, by slot: the segment that has the cells."""
    places: dict[str, Ids]
    """By writer, by slot: the group's place in it."""
    keys: dict[str, Ids]
    """Groups begun, by the key that their beginner gave; the newest KEYS_REMEMBERED."""

    def columns_of(self, writer: str) -> dict[str, ColumnType]:
        """The columns that it writes."""
        schema = self.table.schema
        return {name: schema.columns[name] for name in schema.written_by(writer)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Located:
    """Groups of a lease as they lie in segments of one writer."""

    columns: Mapping[str, ColumnType]
    """That the stage reads of them."""
    segments: Ids
    """[N] the segment of each group."""
    places: Ids
    """[N] the group's place in it."""


class Plane:
    """The streams of a machine.

    Args:
        store: what holds their columns.
        clock: seconds; only differences matter.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._bells: dict[_Bell, asyncio.Future[None]] = {}

    def create(self, request: Create) -> None:
        """Make a stream.

        Raises:
            StreamError: there is another one of that name, or its schema cannot be.
        """
        schema = Schema(columns=request.columns, stages=tuple(request.stages))
        if request.stream in self._streams:
            if (there := self.table(request.stream)).schema != schema or there.capacity != request.capacity:
                raise StreamError(
                    f"there is another stream {request.stream!r}", fix="give this one another name"
                )
            return
        empty = [np.zeros(request.capacity, np.int64) for _ in range(2 * (1 + len(schema.stages)))]
        writers = [SOURCE, *(stage.name for stage in schema.stages)]
        self._streams[request.stream] = _Stream(
            table=Table(schema, capacity=request.capacity, now=self._clock()),
            segments=dict(zip(writers, empty[::2], strict=True)),
            places=dict(zip(writers, empty[1::2], strict=True)),
            keys={},
        )

    def table(self, stream: str) -> Table:
        """The table of a stream."""
        return self._stream(stream).table

    def answer(self, request: BaseModel, ids: Ids, tokens: Ids | None, holder: str) -> dict[str, Any]:
        """Carry out a request that waits for nobody, whichever way it came; what there is to say of it."""
        match request:
            case Create():
                self.create(request)
            case Done():
                self.done(request, ids, tokens, holder)
            case Return():
                self.give_back(request, holder)
            case Drop():
                self.drop(request, ids)
            case Look(action="close"):
                self.close(request.stream)
            case Look(action="schema"):
                schema = self.table(request.stream).schema
                return {"schema": TypeAdapter(Schema).dump_python(schema, mode="json")}
            case Look():
                return self.status(request.stream)
        return {}

    async def reserve(self, request: Reserve, holder: str) -> int:
        """A segment to write into; waits for room in the store."""
        return await self._until(
            ("", ""),
            lambda: self.store.reserve(request.nbytes, holder),
            request.wait_s,
            lambda: f"the store's {self.store.capacity_bytes} bytes are in use: " + self._oldest(),
        )

    async def keep(self, request: BaseModel, arrays: Arrays, holder: str) -> BaseModel:
        """A request, with the segment that the columns which came with it were copied into."""
        if not arrays or not isinstance(request, Begin | Done):
            return request
        frame = packed(SEGMENT, {}, arrays)
        wait_s = request.wait_s if isinstance(request, Begin) else DONE_WAITS_S
        number = await self.reserve(Reserve(nbytes=frame.nbytes, wait_s=wait_s), holder)
        self.store.write(number, frame)
        return request.model_copy(update={"segment": number})

    async def begin(self, request: Begin, tokens: Ids | None, holder: str) -> Ids:
        """The numbers of groups whose columns are in a segment; waits for room in the table."""
        stream, table = self._stream(request.stream), self.table(request.stream)
        arrays = self._written(request.segment, holder)
        rows = arrays[ROWS] if ROWS in arrays else np.zeros(0, np.int64)
        if rows.ndim != 1 or (rows < 1).any():
            raise StreamError(
                f"{holder} begins groups of {rows[:9].tolist()} rows", why="a group has 1 at least"
            )
        checked(arrays, stream.columns_of(SOURCE), rows)
        counted = _counted(tokens, len(rows))

        def attempt() -> list[Instruction] | None:
            now = self._clock()
            if request.key in stream.keys:
                return [Begun(ids=stream.keys[request.key])]
            return (
                table.begin(
                    len(rows), holder=holder, now=now, rows=rows, tokens=counted, version=request.version
                )
                or None
            )

        bell = (request.stream, SOURCE)
        out = await self._until(bell, attempt, request.wait_s, lambda: table.waits(None, self._clock()))
        ids = next(each.ids for each in out if isinstance(each, Begun))
        if request.key in stream.keys:
            self.store.give_up(holder)
            return ids
        if request.key:
            stream.keys[request.key] = ids
            for key in [*stream.keys][:-KEYS_REMEMBERED]:
                del stream.keys[key]
        self._place(stream, SOURCE, request.segment, ids)
        self._obey(request.stream, out)
        return ids

    async def take(self, request: Take, holder: str) -> Lease | None:
        """A lease of ready groups, or None at the end of a closed stream; waits for groups."""
        table = self.table(request.stream)

        def attempt() -> Lease | Finished | None:
            now = self._clock()
            out = table.take(
                request.stage,
                request.count,
                holder=holder,
                now=now,
                deadline=now + request.lease_s,
                least=request.least,
                tokens=request.tokens,
                least_version=request.least_version,
            )
            self._obey(request.stream, out)
            return next((each for each in out if isinstance(each, Lease | Finished)), None)

        bell = (request.stream, request.stage)
        found = await self._until(
            bell, attempt, request.wait_s, lambda: table.waits(request.stage, self._clock())
        )
        return found if isinstance(found, Lease) else None

    def located(self, stream: str, lease: Lease) -> list[Located]:
        """Where the columns of a lease lie, writer by writer."""
        its, table = self._stream(stream), self.table(stream)
        slots, reads = lease.ids % table.capacity, table.schema.stage(lease.stage).reads
        return [
            Located(columns=columns, segments=its.segments[writer][slots], places=its.places[writer][slots])
            for writer in its.segments
            if (columns := {name: kind for name, kind in its.columns_of(writer).items() if name in reads})
        ]

    def gathered(self, cells: Located) -> Arrays:
        """The columns of located cells, put together."""
        numbers = np.unique(cells.segments).tolist()
        segments = {number: mapped(self.store.segments, number).arrays for number in numbers}
        return gathered(segments, cells.segments, cells.places, cells.columns)

    def done(self, request: Done, ids: Ids, tokens: Ids | None, holder: str) -> None:
        """Groups are read, and the stage's columns of them are in a segment."""
        stream, table = self._stream(request.stream), self.table(request.stream)
        lease = table.lease(request.lease, ids)
        if lease.holder != holder:
            raise StreamError(f"{holder} ends lease {request.lease}", why=f"it is {lease.holder}'s")
        if not len(ids):
            raise StreamError(f"{holder} is done with no group of lease {request.lease}")
        columns = stream.columns_of(lease.stage)
        if columns or request.segment is not None:
            checked(self._written(request.segment, holder), columns, table.rows(ids))
        out = table.done(
            request.lease,
            ids,
            now=self._clock(),
            tokens=None if tokens is None else _counted(tokens, len(ids)),
            version=request.version,
        )
        if columns:
            self._place(stream, lease.stage, request.segment, ids)
        self._obey(request.stream, out)

    def give_back(self, request: Return, holder: str) -> None:
        """A holder cannot do what it has taken groups for."""
        table = self.table(request.stream)
        if (lease := table.lease(request.lease, np.zeros(0, np.int64))).holder != holder:
            raise StreamError(f"{holder} returns lease {request.lease}", why=f"it is {lease.holder}'s")
        self._obey(request.stream, table.give_back(request.lease, self._clock()))

    def status(self, stream: str) -> dict[str, Any]:
        """Counts by stage, and how full table and store are, as JSON."""
        table = self.table(stream)
        names = ("blocked", "ready", "taken", "done")
        return {
            "begun": table.begun,
            "oldest": table.oldest,
            "capacity": table.capacity,
            "is_closed": table.is_closed,
            "dropped": dict(table.dropped),
            "stages": {
                stage: dict(zip(names, found, strict=True)) for stage, found in table.counts().items()
            },
            "waits": {stage: table.waits(stage, self._clock()) for stage in table.counts()},
            "used_bytes": self.store.used_bytes,
            "capacity_bytes": self.store.capacity_bytes,
        }

    def drop(self, request: Drop, ids: Ids) -> None:
        """Take groups out of a stream."""
        self._obey(request.stream, self.table(request.stream).drop(ids, request.reason, self._clock()))

    def close(self, stream: str) -> None:
        """No more groups begin."""
        self._obey(stream, self.table(stream).close(self._clock()))

    def died(self, holder: str) -> None:
        """A holder is gone: what it had leased goes back, what it had reserved is removed."""
        for name, stream in self._streams.items():
            self._obey(name, stream.table.died(holder, self._clock()))
        self.store.give_up(holder)
        self._ring(("", ""))

    async def expire(self) -> None:
        """End the leases whose deadline has passed, for ever."""
        while True:
            await asyncio.sleep(EXPIRES_EVERY_S)
            for name, stream in self._streams.items():
                self._obey(name, stream.table.expire(self._clock()))

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            raise StreamError(f"there is no stream {name!r}", fix=nearest(name, self._streams))
        return self._streams[name]

    def _written(self, segment: int | None, holder: str) -> Arrays:
        return {} if segment is None else self.store.read(segment, holder)

    def _place(self, stream: _Stream, writer: str, segment: int | None, ids: Ids) -> None:
        assert segment is not None
        slots = ids % stream.table.capacity
        stream.segments[writer][slots], stream.places[writer][slots] = segment, np.arange(len(ids))
        self.store.keep(segment, len(ids))

    def _obey(self, name: str, instructions: list[Instruction]) -> None:
        stream = self._stream(name)
        for each in instructions:
            if isinstance(each, Ready):
                self._ring((name, each.stage))
            elif isinstance(each, Room):
                self._ring((name, SOURCE))
            elif isinstance(each, Delete):
                numbers = stream.segments[each.writer][each.ids % stream.table.capacity]
                self.store.delete(numbers, is_unread=each.is_unread)
                self._ring(("", ""))
                self._obey(name, stream.table.cleared(each.writer, each.ids))

    def _ring(self, bell: _Bell) -> None:
        if bell in self._bells and not (future := self._bells.pop(bell)).done():
            future.set_result(None)

    async def _until(
        self, bell: _Bell, attempt: Callable[[], Found | None], wait_s: float, waits: Callable[[], str]
    ) -> Found:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while (found := attempt()) is None:
            future = self._bells.setdefault(bell, loop.create_future())
            if not (await asyncio.wait({future}, timeout=until - loop.time()))[0]:
                raise StreamError(f"nothing came of waiting {wait_s:g} s", why=waits())
        return found

    def _oldest(self) -> str:
        now = self._clock()
        held = [
            f"{name}: {stream.table.holds(now)}"
            for name, stream in self._streams.items()
            if stream.table.oldest < stream.table.begun
        ]
        return "; ".join(held) or "nothing but reservations"


def _counted(tokens: Ids | None, groups: int) -> Ids:
    if tokens is None:
        return np.zeros(groups, np.int64)
    if tokens.dtype != np.int64 or tokens.shape != (groups,) or (tokens < 0).any():
        raise StreamError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}", why=f"int64 [{groups}] is expected"
        )
    return tokens


def sentences(error: RillflowError) -> dict[str, str]:
    """An error as it is told."""
    return {"what": error.what, "why": error.why, "fix": error.fix}
