"""Session: what one holder asks of a plane, whichever way its requests come: over a socket, or by a call."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rillflow.data_plane.instructions import Lease
from rillflow.data_plane.plane import Plane
from rillflow.data_plane.requests import MODELS, Begin, Hello, Reserve, Take, checked_request
from rillflow.data_plane.segments import ROWS
from rillflow.data_plane.wire import Message, WireError
from rillflow.errors import RillflowError, StreamError

IDS, TOKENS = ".ids", ".tokens"
"""Arrays of a message that are no columns."""


class Kind(IntEnum):
    """What a message is for."""

    HELLO = 1
    CREATE = 2
    RESERVE = 3
    BEGIN = 4
    TAKE = 5
    DONE = 6
    RETURN = 7
    DROP = 8
    LOOK = 9
    OK = 100
    ERROR = 101


REQUESTS = {int(Kind[model.__name__.upper()]): model for model in MODELS}


def parsed(message: Message) -> BaseModel:
    """The request in a message.

    Raises:
        StreamError: there is no such request, or a value of it cannot be.
    """
    if message.kind not in REQUESTS:
        raise WireError(
            f"a frame of kind {message.kind}", why=f"requests are {', '.join(map(str, REQUESTS))}"
        )
    return checked_request(REQUESTS[message.kind], message.says)


def ids_and_tokens(arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The groups that a request is about, and their tokens; what is left in ``arrays`` are columns.

    Raises:
        StreamError: the groups are no numbers.
    """
    ids, tokens = arrays.pop(IDS, np.zeros(0, np.int64)), arrays.pop(TOKENS, None)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise StreamError(f"ids are {ids.dtype} {list(ids.shape)}", why="int64 [N] is expected")
    return ids, tokens


class Session:
    """One holder of a plane.

    Args:
        plane: the streams.
        holder: who asks, in stories; no other session has the name.
        is_local: whether segments are opened here, or columns have to be sent.
    """

    def __init__(self, plane: Plane, holder: str, *, is_local: bool) -> None:
        self._plane = plane
        self._holder = holder
        self._is_local = is_local

    async def answer(self, message: Message) -> Message:
        """Carry a request out; what came of it.

        Raises:
            RillflowError: it cannot be; what the holder had reserved is given up.
        """
        try:
            return await self._answer(message)
        except RillflowError:
            self._plane.store.give_up(self._holder)
            raise

    def end(self) -> None:
        """The holder is gone: what it had goes back."""
        self._plane.died(self._holder)

    async def _answer(self, message: Message) -> Message:
        plane, holder, request = self._plane, self._holder, parsed(message)
        arrays = dict(message.arrays)
        ids, tokens = ids_and_tokens(arrays)
        request = await plane.keep(request, arrays, holder)
        says: dict[str, Any] = {}
        found: dict[str, NDArray[Any]] = {}
        match request:
            case Hello():
                raise WireError("a second greeting")
            case Reserve():
                says["segment"] = await plane.reserve(request, holder)
            case Begin():
                found[IDS] = await plane.begin(request, tokens, holder)
            case Take():
                return self._granted(request.stream, await plane.take(request, holder))
            case _:
                says = plane.answer(request, ids, tokens, holder)
        return Message(kind=Kind.OK, says=says, arrays=found)

    def _granted(self, stream: str, lease: Lease | None) -> Message:
        if lease is None:
            return Message(kind=Kind.OK, says={"lease": None})
        found: dict[str, NDArray[Any]] = {IDS: lease.ids, ROWS: lease.rows, TOKENS: lease.tokens}
        says: dict[str, Any] = {"lease": lease.number, "columns": []}
        for place, cells in enumerate(self._plane.located(stream, lease)):
            if self._is_local:
                says["columns"].append(list(cells.columns))
                found |= {f".segments{place}": cells.segments, f".places{place}": cells.places}
            else:
                found |= self._plane.gathered(cells)
        return Message(kind=Kind.OK, says=says, arrays=found)
