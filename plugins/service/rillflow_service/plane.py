"""Plane: the streams of a machine with their store, in one event loop. The tables decide.

    begin ─ waits for room in the table ─┐                      ┌─ waits for ready groups ─ take
    reserve ─ waits for bytes ───────────┤   one call at a time  ├─ done
                                         v                      v
                        table: what is ready, deleted      store: where cells are
                                         │
                                         └─ Ready, Room, Delete: bells wake the waiting calls

| call | waits for | woken by | until |
|---|---|---|---|
| reserve | bytes of the store | a freed segment | wait_s, then the error names the holder of cells |
| begin | slots of the table | Room | wait_s, then the error names the holder of the oldest group |
| take | groups of a stage | Ready | wait_s, then the error names the missing columns and their stage |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter

from rillflow.data_plane.instructions import Begun, Delete, Finished, Ids, Instruction, Lease, Ready, Room
from rillflow.data_plane.schema import SOURCE, ColumnType, Schema
from rillflow.data_plane.table import Table
from rillflow.errors import StreamError, nearest
from rillflow.workers.wire import Arrays, packed
from rillflow_service.remote_store import RemoteStore
from rillflow_service.requests import Begin, Clear, Create, Done, Drop, Look, Reserve, Return, Take
from rillflow_service.store import Store

SEGMENT = 0
"""Kind of a frame inside a segment."""
KEYS_REMEMBERED = 4_096
EXPIRES_EVERY_S = 0.2
DONE_WAITS_S = 60.0
"""Longest wait in seconds for store bytes when ``done`` sends columns."""
Found = TypeVar("Found")
_Bell = tuple[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stream:
    """A table, and the locations of its cells."""

    table: Table
    """Table of the stream."""
    cells: dict[str, Ids]
    """Location of each cell, by writer and slot: store, segment, and the group's place in the segment."""
    owner: str
    """Client that created the stream; only it may close the stream."""
    keys: dict[str, Ids]
    """Begun groups, by the key of the ``begin`` request; the newest KEYS_REMEMBERED."""

    def columns_of(self, writer: str) -> dict[str, ColumnType]:
        """Return the columns that a writer writes."""
        schema = self.table.schema
        return {name: schema.columns[name] for name in schema.written_by(writer)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Located:
    """Locations of one writer's cells of the groups of a lease."""

    columns: Mapping[str, ColumnType]
    """Columns that the stage reads."""
    cells: Ids
    """[N, 3] store, segment and place of each group; store 0 is the plane's own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Home:
    """The store that a holder writes into."""

    store: int = 0
    """Number of the store; 0 is the plane's own."""
    there: str = ""
    """The holder's name in that store."""


_OWN = _Home()


class _Claim:
    """Columns of groups that a store holds and that are not in a table yet."""

    def __init__(
        self,
        stream: _Stream,
        writer: str,
        store: int,
        segment: int | None,
        elsewhere: Mapping[int, RemoteStore],
    ) -> None:
        self._cells, self._capacity = stream.cells[writer], stream.table.capacity
        self._store, self._segment, self._elsewhere = store, segment, elsewhere
        self.rows = np.zeros(0, np.int64)
        """[N] rows of the groups."""
        self.is_placed = False
        """Whether the table has the groups."""

    def check(self) -> None:
        """Raise StreamError if the store of the columns is gone."""
        if self._store and self._store not in self._elsewhere:
            raise StreamError("the columns' store is gone", fix="restart the writer with another store")

    def place(self, ids: Ids) -> None:
        """Record the location of the columns under the groups' numbers."""
        if self._segment is not None:
            slots = ids % self._capacity
            self._cells[slots, :2], self._cells[slots, 2] = (self._store, self._segment), np.arange(len(ids))
        self.is_placed = True


class Plane:
    """The streams of a machine.

    Args:
        store: store of their columns.
        clock: returns seconds; only differences matter.
        first_lease: see Table.
    """

    def __init__(
        self, store: Store, *, clock: Callable[[], float] = time.monotonic, first_lease: int = 1
    ) -> None:
        self.store, self._clock, self._first = store, clock, first_lease
        self._streams: dict[str, _Stream] = {}
        self._bells: dict[_Bell, asyncio.Future[None]] = {}
        self._elsewhere: dict[int, RemoteStore] = {}
        self._numbers = count(1)
        self._homes: dict[str, _Home] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.carried_bytes = 0
        """Bytes received and sent in frames of this process."""
        self.table_address = ""
        """Address of the tables whose columns are here, if they are in another process."""

    def create(self, request: Create, holder: str) -> None:
        """Create a stream; the client that did owns it.

        Raises:
            StreamError: another stream has the name, or its schema is invalid.
        """
        schema = Schema(columns=request.columns, stages=tuple(request.stages))
        if request.stream in self._streams:
            if (there := self.table(request.stream)).schema != schema or there.capacity != request.capacity:
                raise StreamError(
                    f"stream {request.stream!r} exists with another schema or capacity",
                    fix="choose another name",
                )
            return
        writers = [SOURCE, *(stage.name for stage in schema.stages)]
        self._streams[request.stream] = _Stream(
            table=Table(schema, capacity=request.capacity, now=self._clock(), first_lease=self._first),
            cells={writer: np.zeros((request.capacity, 3), np.int64) for writer in writers},
            owner=holder.partition("#")[0],
            keys={},
        )

    def table(self, stream: str) -> Table:
        """Return the table of a stream."""
        return self._stream(stream).table

    async def answer(self, request: BaseModel, ids: Ids, tokens: Ids | None, holder: str) -> dict[str, Any]:
        """Run a request that returns no groups; return its reply."""
        match request:
            case Create():
                self.create(request, holder)
            case Done():
                await self.done(request, ids, tokens, holder)
            case Return():
                self.give_back(request, holder)
            case Drop():
                self.drop(request, ids)
            case Look(action="close"):
                self.close(request.stream, holder)
            case Look(action="schema"):
                schema = self.table(request.stream).schema
                return {"schema": TypeAdapter(Schema).dump_python(schema, mode="json")}
            case Look():
                return self.status(request.stream)
        return {}

    async def reserve(self, request: Reserve, holder: str) -> int:
        """Reserve a segment to write into; wait for room in the store."""
        return await self._until(
            ("", ""),
            lambda: self.store.reserve(request.nbytes, holder),
            request.wait_s,
            lambda: f"the store's {self.store.capacity_bytes} bytes are in use: {self._oldest()}",
        )

    async def keep(self, request: BaseModel, arrays: Arrays, holder: str) -> BaseModel:
        """Copy the columns of a request into a segment; return the request with the segment's number."""
        if not arrays or not isinstance(request, Begin | Done):
            return request
        if self._homes.get(holder, _OWN).store:
            raise StreamError(f"{holder} sends columns", why="it must write into its machine's store")
        frame = packed(SEGMENT, {}, arrays)
        wait_s = request.wait_s if isinstance(request, Begin) else DONE_WAITS_S
        number = await self.reserve(Reserve(nbytes=frame.nbytes, wait_s=wait_s), holder)
        self.store.write(number, frame)
        return request.model_copy(update={"segment": number})

    async def begin(self, request: Begin, tokens: Ids | None, holder: str) -> Ids:
        """Begin groups whose columns are in a segment, after waiting for room; return their numbers."""
        stream, table = self._stream(request.stream), self.table(request.stream)
        if request.key in stream.keys:
            await self.give_up(holder)
            return stream.keys[request.key]
        async with self._claimed(stream, SOURCE, request.segment, holder, None) as claim:
            counted = _counted(tokens, len(claim.rows))

            def attempt() -> list[Instruction] | None:
                claim.check()
                if request.key in stream.keys:
                    return [Begun(ids=stream.keys[request.key])]
                return (
                    table.begin(
                        len(claim.rows),
                        holder=holder,
                        now=self._clock(),
                        rows=claim.rows,
                        tokens=counted,
                        version=request.version,
                    )
                    or None
                )

            bell = (request.stream, SOURCE)
            out = await self._until(bell, attempt, request.wait_s, lambda: table.waits(None, self._clock()))
            ids = next(each.ids for each in out if isinstance(each, Begun))
            if request.key in stream.keys:
                return ids
            claim.place(ids)
        if request.key:
            stream.keys[request.key] = ids
            for key in [*stream.keys][:-KEYS_REMEMBERED]:
                del stream.keys[key]
        self._obey(request.stream, out)
        return ids

    async def take(self, request: Take, holder: str) -> Lease | None:
        """Return a lease of ready groups, or None at the end of a closed stream; wait for groups."""
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
        """Return the locations of a lease's columns, writer by writer."""
        its, table = self._stream(stream), self.table(stream)
        slots, reads = lease.ids % table.capacity, table.schema.stage(lease.stage).reads
        return [
            Located(columns=columns, cells=cells[slots])
            for writer, cells in its.cells.items()
            if (columns := {name: kind for name, kind in its.columns_of(writer).items() if name in reads})
        ]

    def address_of(self, store: int) -> str:
        """Return the address for fetching columns of a store; empty for the plane's own store."""
        return self._elsewhere[store].address if store in self._elsewhere else ""

    async def done(self, request: Done, ids: Ids, tokens: Ids | None, holder: str) -> None:
        """Complete groups of a lease, with the stage's columns of them in a segment."""
        stream, table = self._stream(request.stream), self.table(request.stream)
        lease = table.lease(request.lease, ids)
        if lease.holder != holder:
            raise StreamError(f"{holder} cannot end lease {request.lease}", why=f"{lease.holder} holds it")
        if not len(ids):
            raise StreamError(f"{holder} reports no groups of lease {request.lease} as done")
        async with self._claimed(stream, lease.stage, request.segment, holder, table.rows(ids)) as claim:
            claim.check()
            out = table.done(
                request.lease,
                ids,
                now=self._clock(),
                tokens=None if tokens is None else _counted(tokens, len(ids)),
                version=request.version,
            )
            claim.place(ids)
        self._obey(request.stream, out)

    def give_back(self, request: Return, holder: str) -> None:
        """End a lease; its groups become ready again."""
        table = self.table(request.stream)
        if (lease := table.lease(request.lease, np.zeros(0, np.int64))).holder != holder:
            raise StreamError(f"{holder} cannot return lease {request.lease}", why=f"{lease.holder} holds it")
        self._obey(request.stream, table.give_back(request.lease, self._clock()))

    def status(self, stream: str) -> dict[str, Any]:
        """Return counts by stage and the usage of table and store, as JSON."""
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
            "stores": [each.address for each in self._elsewhere.values()],
            "carried_bytes": self.carried_bytes,
        }

    def drop(self, request: Drop, ids: Ids) -> None:
        """Remove groups from a stream."""
        self._obey(request.stream, self.table(request.stream).drop(ids, request.reason, self._clock()))

    def close(self, stream: str, holder: str) -> None:
        """Close a stream, as the client that created it: no more groups begin."""
        if (owner := self._stream(stream).owner) != holder.partition("#")[0]:
            raise StreamError(f"{holder} cannot close stream {stream!r}", why=f"{owner} created it")
        self._obey(stream, self.table(stream).close(self._clock()))

    async def give_up(self, holder: str) -> None:
        """Free the reservations of a holder whose put has failed."""
        home = self._homes.get(holder, _OWN)
        if not home.store:
            self.store.give_up(holder)
        elif home.store in self._elsewhere:
            with suppress(StreamError):
                await self._elsewhere[home.store].give_up(home.there)

    def died(self, holder: str) -> None:
        """Release the leases and remove the reservations of a lost holder."""
        for name, stream in self._streams.items():
            self._obey(name, stream.table.died(holder, self._clock()))
        self._homes.pop(holder, None)
        self.store.give_up(holder)
        self._ring(("", ""))

    def join(self, store: RemoteStore) -> int:
        """Add a store of another machine; return its number."""
        if store.address in [each.address for each in self._elsewhere.values()]:
            raise StreamError(f"a store at {store.address} has joined already")
        self._elsewhere[number := next(self._numbers)] = store
        return number

    def settle(self, holder: str, address: str, there: str) -> None:
        """Make a holder write into a joined store, which knows it as ``there``."""
        stores = {each.address: number for number, each in self._elsewhere.items()}
        if address not in stores:
            raise StreamError(f"{holder} writes into store {address}", why="no such store has joined")
        self._homes[holder] = _Home(store=stores[address], there=there)

    def lost(self, number: int) -> None:
        """Remove a lost store, and drop the groups whose unread cells were in it."""
        gone = self._elsewhere.pop(number)
        for name, stream in self._streams.items():
            ids = [
                ids[stream.cells[writer][ids % stream.table.capacity, 0] == number]
                for writer in stream.cells
                for ids in [stream.table.unread(writer)]
            ]
            reason = f"store {gone.address} is gone, with columns of the group"
            self._obey(name, stream.table.drop(np.concatenate(ids), reason, self._clock()))

    def clear(self, request: Clear, segments: Ids) -> None:
        """Delete cells of this store, or free reservations of a failed put, as remote tables request."""
        self.store.delete(segments, is_unread=request.is_unread)
        if request.holder:
            self.store.give_up(request.holder)
        self._ring(("", ""))

    async def expire(self) -> None:
        """End expired leases, in an endless loop."""
        while True:
            await asyncio.sleep(EXPIRES_EVERY_S)
            for name, stream in self._streams.items():
                self._obey(name, stream.table.expire(self._clock()))

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            raise StreamError(f"there is no stream {name!r}", fix=nearest(name, self._streams))
        return self._streams[name]

    @asynccontextmanager
    async def _claimed(
        self, stream: _Stream, writer: str, segment: int | None, holder: str, rows: Ids | None
    ) -> AsyncIterator[_Claim]:
        """Yield verified columns in a segment; free the segment unless they are placed."""
        home, columns = self._homes.get(holder, _OWN), stream.columns_of(writer)
        is_empty = rows is not None and segment is None and not columns
        claim = _Claim(stream, writer, 0 if is_empty else home.store, segment, self._elsewhere)
        claim.check()
        if is_empty:
            pass
        elif home.store:
            claim.rows = await self._elsewhere[home.store].keep(segment, home.there, columns, rows)
        else:
            claim.rows = self.store.claim(segment, holder, columns, rows)
        try:
            yield claim
        finally:
            if segment is not None and not claim.is_placed:
                unused = np.full(len(claim.rows), segment)
                if home.store in self._elsewhere:
                    with suppress(StreamError):
                        await self._elsewhere[home.store].delete(unused, is_unread=True)
                elif not home.store:
                    self.clear(Clear(), unused)

    def _obey(self, name: str, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Ready):
                self._ring((name, each.stage))
            elif isinstance(each, Room):
                self._ring((name, SOURCE))
            elif isinstance(each, Delete):
                self._delete(name, each)

    def _delete(self, name: str, what: Delete) -> None:
        stream = self._stream(name)
        cells = stream.cells[what.writer][what.ids % stream.table.capacity]
        for store in np.unique(cells[:, 0]).tolist():
            mine = cells[:, 0] == store
            segments, part = cells[mine, 1], replace(what, ids=what.ids[mine])
            if there := self._elsewhere.get(store):
                task = asyncio.ensure_future(self._delete_there(name, part, there, segments))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                continue
            if not store:
                self.store.delete(segments, is_unread=what.is_unread)
                self._ring(("", ""))
            self._obey(name, stream.table.cleared(part.writer, part.ids))

    async def _delete_there(self, name: str, what: Delete, store: RemoteStore, segments: Ids) -> None:
        with suppress(StreamError):
            await store.delete(segments, is_unread=what.is_unread)
        self._obey(name, self.table(name).cleared(what.writer, what.ids))

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
                raise StreamError(f"timeout after {wait_s:g} s", why=waits())
        return found

    def _oldest(self) -> str:
        if self.table_address:
            return f"the tables at {self.table_address} know their contents"
        now = self._clock()
        held = [
            f"{name}: {stream.table.holds(now)}"
            for name, stream in self._streams.items()
            if stream.table.oldest < stream.table.begun
        ]
        return "; ".join(held) or "only by reservations"


def _counted(tokens: Ids | None, groups: int) -> Ids:
    if tokens is None:
        return np.zeros(groups, np.int64)
    if tokens.dtype != np.int64 or tokens.shape != (groups,) or (tokens < 0).any():
        raise StreamError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}",
            why=f"they must be int64 [{groups}], not negative",
        )
    return tokens
