"""Plane: the streams of a machine with their store, in one event loop. The tables decide.

    begin ─ waits for room in the table ─┐                      ┌─ waits for ready groups ─ take
    reserve ─ waits for bytes ───────────┤   one call at a time  ├─ done
                                         v                      v
                        table: what is ready, deleted      stores: where cells are
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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np

from rillflow.data_plane.instructions import Begun, Delete, Finished, Ids, Instruction, Lease, Ready, Room
from rillflow.data_plane.schema import SOURCE, ColumnType, Schema
from rillflow.data_plane.table import Table
from rillflow.errors import StreamError, nearest
from rillflow.workers.wire import Arrays, packed
from rillflow_service.remote_store import RemoteStore
from rillflow_service.requests import Begin, Create, Done, Drop, Reserve, Return, Take
from rillflow_service.store import Store

SEGMENT = 0
"""Kind of a frame inside a segment."""
OWN = 0
"""Number of the plane's own store; the stores of other machines that join follow."""
KEYS_REMEMBERED = 4_096
EXPIRES_EVERY_S = 0.2
DONE_WAITS_S = 60.0
"""Longest wait in seconds for store bytes when ``done`` sends columns."""
Found = TypeVar("Found")
Put = TypeVar("Put", Begin, Done)
_Bell = tuple[str, str]
_FREED = ("", "")


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
class _Home:
    """The store that a holder writes into."""

    store: int
    """Number of the store."""
    there: str
    """The holder's name in that store."""


@dataclass(kw_only=True, eq=False)
class _Claim:
    """Columns of groups that a store holds and that are not in a table yet."""

    store: int
    """Number of the store."""
    segment: int | None
    """Segment with the columns; None if there are no columns."""
    cells: Ids
    """Locations of the writer's cells, by slot."""
    rows: Ids
    """[N] rows of the groups."""
    is_placed: bool = False
    """Whether the table has the groups."""

    def place(self, ids: Ids) -> None:
        """Record the location of the columns under the groups' numbers."""
        if self.segment is not None:
            slots = ids % len(self.cells)
            self.cells[slots, :2] = self.store, self.segment
            self.cells[slots, 2] = np.arange(len(ids))
        self.is_placed = True


class Plane:
    """The streams of a machine.

    Args:
        store: store of their columns.
        first_lease: see Table.
    """

    def __init__(self, store: Store, *, first_lease: int = 1) -> None:
        self.store, self._first = store, first_lease
        self._streams: dict[str, _Stream] = {}
        self._bells: dict[_Bell, asyncio.Future[None]] = {}
        self._stores: dict[int, Store | RemoteStore] = {OWN: store}
        self._numbers = count(OWN + 1)
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
            table=Table(schema, capacity=request.capacity, now=time.monotonic(), first_lease=self._first),
            cells={writer: np.zeros((request.capacity, 3), np.int64) for writer in writers},
            owner=holder.partition("#")[0],
            keys={},
        )

    def table(self, stream: str) -> Table:
        """Return the table of a stream."""
        return self._stream(stream).table

    async def reserve(self, request: Reserve, holder: str) -> int:
        """Reserve a segment to write into; wait for room in the store."""
        return await self._until(
            _FREED,
            lambda: self.store.reserve(request.nbytes, holder),
            request.wait_s,
            lambda: f"the store's {self.store.capacity_bytes} bytes are in use: {self._oldest()}",
        )

    async def keep(self, request: Put, arrays: Arrays, holder: str) -> Put:
        """Copy the columns of a request into a segment; return the request with the segment's number."""
        if not arrays:
            return request
        if self._home(holder).store != OWN:
            raise StreamError(f"{holder} sends columns", why="it must write into its machine's store")
        frame = packed(SEGMENT, {}, arrays)
        wait_s = request.wait_s if isinstance(request, Begin) else DONE_WAITS_S
        number = await self.reserve(Reserve(nbytes=frame.nbytes, wait_s=wait_s), holder)
        frame.write_into(self.store.segments.opened(number, is_shared=True))
        return request.model_copy(update={"segment": number})

    async def begin(self, request: Begin, tokens: Ids | None, holder: str) -> Ids:
        """Begin groups whose columns are in a segment, after waiting for room; return their numbers."""
        stream, table = self._stream(request.stream), self.table(request.stream)
        async with self._claimed(stream, SOURCE, request.segment, holder) as claim:
            counted = _counted(tokens, len(claim.rows))

            def attempt() -> Ids | None:
                if request.key in stream.keys:
                    return stream.keys[request.key]
                self._store(claim.store)  # may be lost meanwhile
                out = table.begin(
                    len(claim.rows),
                    holder=holder,
                    now=time.monotonic(),
                    rows=claim.rows,
                    tokens=counted,
                    version=request.version,
                )
                for each in out:
                    if isinstance(each, Begun):
                        claim.place(each.ids)
                        if request.key:
                            stream.keys[request.key] = each.ids
                        for key in [*stream.keys][:-KEYS_REMEMBERED]:
                            del stream.keys[key]
                        self._obey(request.stream, out)
                        return each.ids
                return None

            bell, waits = (request.stream, SOURCE), lambda: table.waits(None, time.monotonic())
            return await self._until(bell, attempt, request.wait_s, waits)

    async def take(self, request: Take, holder: str) -> Lease | None:
        """Return a lease of ready groups, or None at the end of a closed stream; wait for groups."""
        table = self.table(request.stream)

        def attempt() -> Lease | Finished | None:
            now = time.monotonic()
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

        bell, waits = (request.stream, request.stage), lambda: table.waits(request.stage, time.monotonic())
        found = await self._until(bell, attempt, request.wait_s, waits)
        return found if isinstance(found, Lease) else None

    def located(self, stream: str, lease: Lease) -> list[tuple[list[str], Ids]]:
        """Return the columns of a lease writer by writer: their names, and their cells [N, 3]."""
        its, table = self._stream(stream), self.table(stream)
        slots, reads = lease.ids % table.capacity, table.schema.stage(lease.stage).reads
        found = [
            ([name for name in its.columns_of(writer) if name in reads], cells[slots])
            for writer, cells in its.cells.items()
        ]
        return [(names, cells) for names, cells in found if names]

    def address_of(self, store: int) -> str:
        """Return the address for fetching columns of a store; empty for the plane's own store."""
        return self._stores[store].address if store in self._stores else ""

    async def done(self, request: Done, ids: Ids, tokens: Ids | None, holder: str) -> None:
        """Complete groups of a lease, with the stage's columns of them in a segment."""
        stream, table = self._stream(request.stream), self.table(request.stream)
        lease = table.lease(request.lease, ids)
        if lease.holder != holder:
            raise StreamError(f"{holder} cannot end lease {request.lease}", why=f"{lease.holder} holds it")
        if not len(ids):
            raise StreamError(f"{holder} reports no groups of lease {request.lease} as done")
        async with self._claimed(stream, lease.stage, request.segment, holder, table.rows(ids)) as claim:
            counted = None if tokens is None else _counted(tokens, len(ids))
            now, version = time.monotonic(), request.version
            self._store(claim.store)  # may be lost meanwhile
            out = table.done(request.lease, ids, now=now, tokens=counted, version=version)
            claim.place(ids)
        self._obey(request.stream, out)

    def give_back(self, request: Return, holder: str) -> None:
        """End a lease; its groups become ready again."""
        table = self.table(request.stream)
        if (lease := table.lease(request.lease, np.zeros(0, np.int64))).holder != holder:
            raise StreamError(f"{holder} cannot return lease {request.lease}", why=f"{lease.holder} holds it")
        self._obey(request.stream, table.give_back(request.lease, time.monotonic()))

    def status(self, stream: str) -> dict[str, Any]:
        """Return counts by stage and the usage of table and store, as JSON."""
        table, names = self.table(stream), ("blocked", "ready", "taken", "done")
        counts = table.counts()
        return {
            "begun": table.begun,
            "oldest": table.oldest,
            "capacity": table.capacity,
            "is_closed": table.is_closed,
            "dropped": dict(table.dropped),
            "stages": {stage: dict(zip(names, found, strict=True)) for stage, found in counts.items()},
            "waits": {stage: table.waits(stage, time.monotonic()) for stage in counts},
            "used_bytes": self.store.used_bytes,
            "capacity_bytes": self.store.capacity_bytes,
            "stores": [each.address for each in self._stores.values() if each.address],
            "carried_bytes": self.carried_bytes,
        }

    def drop(self, request: Drop, ids: Ids) -> None:
        """Remove groups from a stream."""
        self._obey(request.stream, self.table(request.stream).drop(ids, request.reason, time.monotonic()))

    def close(self, stream: str, holder: str) -> None:
        """Close a stream, as the client that created it: no more groups begin."""
        if (owner := self._stream(stream).owner) != holder.partition("#")[0]:
            raise StreamError(f"{holder} cannot close stream {stream!r}", why=f"{owner} created it")
        self._obey(stream, self.table(stream).close(time.monotonic()))

    async def give_up(self, holder: str) -> None:
        """Free the reservations of a holder whose put has failed."""
        home = self._home(holder)
        with suppress(StreamError):
            await self._store(home.store).give_up(home.there)

    async def died(self, holder: str) -> None:
        """Release the leases and remove the reservations of a lost holder."""
        for name, stream in self._streams.items():
            self._obey(name, stream.table.died(holder, time.monotonic()))
        self._homes.pop(holder, None)
        await self.give_up(holder)
        self._ring(_FREED)

    def join(self, store: RemoteStore) -> int:
        """Add a store of another machine; return its number."""
        if store.address in [each.address for each in self._stores.values()]:
            raise StreamError(f"a store at {store.address} has joined already")
        self._stores[number := next(self._numbers)] = store
        return number

    def settle(self, holder: str, address: str, there: str) -> None:
        """Make a holder write into a joined store, which knows it as ``there``."""
        stores = {each.address: number for number, each in self._stores.items()}
        if address not in stores:
            raise StreamError(f"{holder} writes into store {address}", why="no such store has joined")
        self._homes[holder] = _Home(store=stores[address], there=there)

    def lost(self, number: int) -> None:
        """Remove a lost store, and drop the groups whose unread cells were in it."""
        gone = self._stores.pop(number)
        for name, stream in self._streams.items():
            ids = [
                ids[stream.cells[writer][ids % stream.table.capacity, 0] == number]
                for writer in stream.cells
                for ids in [stream.table.unread(writer)]
            ]
            reason = f"store {gone.address} is gone, with columns of the group"
            self._obey(name, stream.table.drop(np.concatenate(ids), reason, time.monotonic()))

    async def free(self, store: int, segments: Ids, *, is_unread: bool = True) -> None:
        """Delete a group in each of these segments of a store, unless the store is gone."""
        with suppress(StreamError):
            await self._store(store).delete(segments, is_unread=is_unread)
        self._ring(_FREED)

    async def expire(self) -> None:
        """End expired leases, in an endless loop."""
        while True:
            await asyncio.sleep(EXPIRES_EVERY_S)
            for name, stream in self._streams.items():
                self._obey(name, stream.table.expire(time.monotonic()))

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            raise StreamError(f"there is no stream {name!r}", fix=nearest(name, self._streams))
        return self._streams[name]

    def _home(self, holder: str) -> _Home:
        return self._homes.get(holder, _Home(store=OWN, there=holder))

    def _store(self, number: int) -> Store | RemoteStore:
        if number not in self._stores:
            raise StreamError("the columns' store is gone", fix="restart the writer with another store")
        return self._stores[number]

    @asynccontextmanager
    async def _claimed(
        self, stream: _Stream, writer: str, segment: int | None, holder: str, rows: Ids | None = None
    ) -> AsyncIterator[_Claim]:
        """Yield verified columns in a segment; free the segment unless they are placed."""
        home, columns, cells = self._home(holder), stream.columns_of(writer), stream.cells[writer]
        if rows is not None and segment is None and not columns:
            yield _Claim(store=OWN, segment=None, cells=cells, rows=rows)
            return
        rows = await self._store(home.store).claim(segment, home.there, columns, rows)
        claim = _Claim(store=home.store, segment=segment, cells=cells, rows=rows)
        try:
            yield claim
        finally:
            if segment is not None and not claim.is_placed:
                await self.free(home.store, np.full(len(rows), segment))

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
            part = replace(what, ids=what.ids[mine])
            task = asyncio.ensure_future(self._delete_there(name, part, store, cells[mine, 1]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _delete_there(self, name: str, what: Delete, store: int, segments: Ids) -> None:
        await self.free(store, segments, is_unread=what.is_unread)
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
        now = time.monotonic()
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
        why = f"they must be int64 [{groups}], not negative"
        raise StreamError(f"tokens are {tokens.dtype} {list(tokens.shape)}", why=why)
    return tokens
