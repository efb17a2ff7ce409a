"""RemoteStore: the table's handle of a store on another machine, which keeps and deletes columns on request.

    begin, done ─> claim: the store checks the columns ────────────┐
    Delete ──────> delete ────────────────────────────────────────┼─> answers, in the order of requests
    a failed put > give_up ───────────────────────────────────────┘

Columns never pass through this connection: readers fetch them from the store. A store that does not answer in
time counts as lost, like one whose connection ended, together with its columns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from pydantic import BaseModel

from rillflow.data_plane.instructions import Ids
from rillflow.data_plane.schema import ColumnType
from rillflow.errors import StreamError
from rillflow.workers.wire import Arrays, Message
from rillflow_service.requests import ROWS, SEGMENTS, Clear, Keep, Kind, raised

ANSWERS_WITHIN_S = 30.0


class RemoteStore:
    """A store on another machine.

    Args:
        address: address from which readers fetch.
        send: sends a request on its connection.
        close: ends the connection.
    """

    def __init__(
        self, address: str, send: Callable[[Message], Awaitable[None]], close: Callable[[], None]
    ) -> None:
        self.address = address
        self._send = send
        self._close = close
        self._due: deque[asyncio.Future[Message]] = deque()

    async def claim(
        self, segment: int | None, holder: str, columns: Mapping[str, ColumnType], rows: Ids | None
    ) -> Ids:
        """Do the same as ``Store.claim``."""
        request = Keep(segment=segment, holder=holder, columns=dict(columns))
        return (await self._ask(request, {} if rows is None else {ROWS: rows})).arrays[ROWS]

    async def delete(self, segments: Ids, *, is_unread: bool) -> None:
        """Do the same as ``Store.delete``."""
        await self._ask(Clear(is_unread=is_unread), {SEGMENTS: segments})

    async def give_up(self, holder: str) -> None:
        """Do the same as ``Store.give_up``."""
        await self._ask(Clear(holder=holder), {})

    def answered(self, message: Message) -> None:
        """Resolve the oldest open request with this answer."""
        if self._due and not (due := self._due.popleft()).done():
            due.set_result(message)

    def end(self) -> None:
        """Cancel all open requests, because the connection ended."""
        for due in self._due:
            due.cancel()

    async def _ask(self, request: BaseModel, arrays: Arrays) -> Message:
        due: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._due.append(due)
        kind = Kind[type(request).__name__.upper()]
        try:
            await self._send(Message(kind=kind, says=request.model_dump(mode="json"), arrays=arrays))
            done, _ = await asyncio.wait({due}, timeout=ANSWERS_WITHIN_S)
        except OSError:
            done = set()
        if not done or due.cancelled():
            self._close()
            raise StreamError(f"store {self.address} is gone", why="its connection has ended or hangs")
        answer = due.result()
        return raised(answer)
