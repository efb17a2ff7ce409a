"""Session: the requests of one holder to a plane, from a socket, over HTTP, or by calls in its process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter

from rillflow.data_plane.instructions import Lease
from rillflow.data_plane.schema import Schema
from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import checked_request
from rillflow.workers.wire import Arrays, Message, WireError
from rillflow_service import requests
from rillflow_service.plane import OWN, Plane
from rillflow_service.requests import CELLS, IDS, ROWS, SEGMENTS, TOKENS, Kind

_NONE = np.zeros(0, np.int64)


def parsed(message: Message) -> BaseModel:
    """Return the request in a message.

    Raises:
        StreamError: the kind is unknown, or a value is invalid.
    """
    if message.kind not in requests.REQUESTS:
        raise WireError(f"a frame of kind {message.kind}", why=f"requests are {[*requests.REQUESTS]}")
    return checked_request(requests.REQUESTS[message.kind], message.says)


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
            says, arrays = await self._answer(parsed(message), dict(message.arrays))
        except RillflowError:
            await self._plane.give_up(self._holder)
            raise
        return Message(kind=Kind.OK, says=says, arrays=arrays)

    async def end(self) -> None:
        """Release the leases and the reservations of the holder."""
        await self._plane.died(self._holder)

    async def _answer(
        self, request: BaseModel, arrays: dict[str, NDArray[Any]]
    ) -> tuple[dict[str, Any], Arrays]:
        """Return the JSON and the arrays of an answer."""
        plane, holder = self._plane, self._holder
        if isinstance(request, requests.Keep | requests.Clear) and not self._is_table:
            raise StreamError(
                f"{holder} cannot keep or clear cells", why="only the tables that the store joined may do so"
            )
        ids, tokens = arrays.pop(IDS, _NONE), arrays.pop(TOKENS, None)
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise StreamError(f"ids are {ids.dtype} {list(ids.shape)}", why="they must be int64 [N]")
        match request:
            case requests.Create():
                plane.create(request, holder)
            case requests.Reserve():
                return {"segment": await plane.reserve(request, holder)}, {}
            case requests.Begin():
                kept = await plane.keep(request, arrays, holder)
                return {}, {IDS: await plane.begin(kept, tokens, holder)}
            case requests.Take():
                return self._granted(request.stream, await plane.take(request, holder))
            case requests.Done():
                await plane.done(await plane.keep(request, arrays, holder), ids, tokens, holder)
            case requests.Return():
                plane.give_back(request, holder)
            case requests.Drop():
                plane.drop(request, ids)
            case requests.Look(action="close"):
                plane.close(request.stream, holder)
            case requests.Look(action="schema"):
                schema = plane.table(request.stream).schema
                return {"schema": TypeAdapter(Schema).dump_python(schema, mode="json")}, {}
            case requests.Look():
                return plane.status(request.stream), {}
            case requests.Fetch():
                cells = arrays.get(CELLS, _NONE)
                if cells.dtype != np.int64 or cells.ndim != 2 or cells.shape[1] != 2 or not len(cells):
                    why = "they must be int64 [N, 2], N at least 1"
                    raise StreamError(f"cells are {cells.dtype} {list(cells.shape)}", why=why)
                return {}, plane.store.gathered(request.columns, cells[:, 0], cells[:, 1])
            case requests.Keep():
                rows = arrays.get(ROWS)
                held = await plane.store.claim(request.segment, request.holder, request.columns, rows)
                return {}, {ROWS: held}
            case requests.Clear():
                await plane.store.give_up(request.holder)
                await plane.free(OWN, arrays.get(SEGMENTS, _NONE), is_unread=request.is_unread)
            case _:
                raise WireError("the connection sent its greeting twice")
        return {}, {}

    def _granted(self, stream: str, lease: Lease | None) -> tuple[dict[str, Any], Arrays]:
        if lease is None:
            return {"lease": None}, {}
        located = self._plane.located(stream, lease)
        stores = sorted({store for _, cells in located for store in cells[:, 0].tolist()})
        says = {
            "lease": lease.number,
            "columns": [names for names, _ in located],
            "stores": [[store, self._plane.address_of(store)] for store in stores],
        }
        cells = {f"{CELLS}{place}": cells for place, (_, cells) in enumerate(located)}
        return says, {IDS: lease.ids, ROWS: lease.rows, TOKENS: lease.tokens, **cells}
