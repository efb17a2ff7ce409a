"""Session: the requests of one holder to a plane, through a socket or by calls in the same process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rillflow.data_plane.instructions import Lease
from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import checked_request
from rillflow.workers.wire import Arrays, Message, WireError
from rillflow_service.plane import Plane
from rillflow_service.remote_store import SEGMENTS
from rillflow_service.requests import (
    REQUESTS,
    Begin,
    Clear,
    Fetch,
    Hello,
    Join,
    Keep,
    Kind,
    Reserve,
    Take,
)
from rillflow_service.segments import ROWS

IDS, TOKENS = ".ids", ".tokens"
"""Arrays of a message that are not columns."""
CELLS = ".cells"
"""Prefix of arrays with a writer's cell locations: [N, 3] store, segment, place; to a store [N, 2]."""


def parsed(message: Message) -> BaseModel:
    """Return the request in a message.

    Raises:
        StreamError: the kind is unknown, or a value is invalid.
    """
    if message.kind not in REQUESTS:
        raise WireError(f"a frame of kind {message.kind}", why=f"requests are {[*REQUESTS]}")
    return checked_request(REQUESTS[message.kind], message.says)


def ids_and_tokens(arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Remove and return the groups of a request, and their tokens; only columns stay in ``arrays``.

    Raises:
        StreamError: the groups are not integers.
    """
    ids, tokens = arrays.pop(IDS, np.zeros(0, np.int64)), arrays.pop(TOKENS, None)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise StreamError(f"ids are {ids.dtype} {list(ids.shape)}", why="they must be int64 [N]")
    return ids, tokens


class Session:
    """One holder of a plane.

    Args:
        plane: the streams.
        holder: name of the holder in stories; no other session has it.
        is_table: whether the plane's store belongs to its tables.
    """

    def __init__(self, plane: Plane, holder: str, *, is_table: bool = False) -> None:
        self._plane = plane
        self._holder = holder
        self._is_table = is_table

    async def answer(self, message: Message) -> Message:
        """Run a request and return the answer.

        Raises:
            RillflowError: the request failed; the holder's reservations are freed.
        """
        try:
            return await self._answer(message)
        except RillflowError:
            await self._plane.give_up(self._holder)
            raise

    def end(self) -> None:
        """Release the leases and the reservations of the holder."""
        self._plane.died(self._holder)

    async def _answer(self, message: Message) -> Message:
        plane, holder, request = self._plane, self._holder, parsed(message)
        arrays = dict(message.arrays)
        if isinstance(request, Keep | Clear) and not self._is_table:
            raise StreamError(
                f"{holder} cannot keep or clear cells", why="only the tables that the store joined may do so"
            )
        says: dict[str, Any] = {}
        found: dict[str, NDArray[Any]] = {}
        match request:
            case Hello() | Join():
                raise WireError("the connection sent its greeting twice")
            case Reserve():
                says["segment"] = await plane.reserve(request, holder)
            case Fetch():
                found = self._fetched(request, arrays)
            case Keep():
                rows = arrays.get(ROWS)
                found[ROWS] = plane.store.claim(request.segment, request.holder, request.columns, rows)
            case Clear():
                plane.clear(request, arrays.get(SEGMENTS, np.zeros(0, np.int64)))
            case Take():
                return self._granted(request.stream, await plane.take(request, holder))
            case _:
                ids, tokens = ids_and_tokens(arrays)
                request = await plane.keep(request, arrays, holder)
                if isinstance(request, Begin):
                    found[IDS] = await plane.begin(request, tokens, holder)
                else:
                    says = await plane.answer(request, ids, tokens, holder)
        return Message(kind=Kind.OK, says=says, arrays=found)

    def _granted(self, stream: str, lease: Lease | None) -> Message:
        if lease is None:
            return Message(kind=Kind.OK, says={"lease": None})
        located = self._plane.located(stream, lease)
        stores = {store for each in located for store in np.unique(each.cells[:, 0]).tolist()}
        says = {
            "lease": lease.number,
            "columns": [list(each.columns) for each in located],
            "stores": [[store, self._plane.address_of(store)] for store in sorted(stores)],
        }
        found: dict[str, NDArray[Any]] = {IDS: lease.ids, ROWS: lease.rows, TOKENS: lease.tokens}
        found |= {f"{CELLS}{place}": each.cells for place, each in enumerate(located)}
        return Message(kind=Kind.OK, says=says, arrays=found)

    def _fetched(self, request: Fetch, arrays: Arrays) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        for place, names in enumerate(request.columns):
            cells = arrays.get(f"{CELLS}{place}", np.zeros(0, np.int64))
            if cells.dtype != np.int64 or cells.ndim != 2 or cells.shape[1] != 2 or not len(cells):
                raise StreamError(
                    f"cells are {cells.dtype} {list(cells.shape)}",
                    why="they must be int64 [N, 2], N at least 1",
                )
            its = dict(self._plane.store.gathered(names, cells[:, 0], cells[:, 1]))
            found |= {f"{ROWS}{place}": its.pop(ROWS), **its}
        return found
