"""Request reader: the requests of one application, read and parsed so that none delays the others.

    body ─ above 16 KiB: room ─> bytes ─┬─ up to 16 KiB ─> parsed at once
                                        └─ longer ───────> lane: one at a time, a quarter of the time
    room is held until the answer is sent (HeldRoom), because what a body says takes memory until then

Lane
    consumes      bodies that are longer than 16 KiB, and what their requests need before they are sampled
    waits for     the function before it, and three times as long as that took
    unblocked by  its end; functions are bounded by the limits of ``request_json``
    produces      the result of each function, in the order of arrival

The interpreter runs one thread at a time, and the parser does not let go of it. So a lane that never rests
would stop the engine's thread, whatever thread it is in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import Request

from rillflow.serving.body_limit import BodyLimit
from rillflow.serving.http_body import SMALL_BYTES, body_of

ROOM_BYTES = 2**27
"""Bodies that an application holds at once; one takes at most a quarter of what is free."""
RESTS = 3
"""Rest of the lane after a function, as a multiple of its time."""
_HELD = "rillflow.held"
R = TypeVar("R")


class HeldRoom:
    """ASGI middleware that holds the room of a request's body until its answer is sent.

    Args:
        app: the ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        async with AsyncExitStack() as held:
            await self._app({**scope, _HELD: held}, receive, send)


class RequestReader:
    """Reads the bodies of an application with the middleware ``HeldRoom``.

    Args:
        most_bytes: largest body.
        room_bytes: bodies that are held at once.
    """

    def __init__(self, most_bytes: int, room_bytes: int = ROOM_BYTES) -> None:
        self._most, self._room = most_bytes, BodyLimit(room_bytes, parts=4)
        self._turn, self._rested = asyncio.Lock(), 0.0
        self._lane = ThreadPoolExecutor(1, "rillflow-requests")

    async def body(self, request: Request, most: int | None = None) -> bytes:
        """Return a request's body; see ``body_of``.

        Raises:
            Declined: see ``body_of``; or no room came free in time.
        """
        held: AsyncExitStack = request.scope[_HELD]

        async def make_room(num_bytes: int) -> None:
            await held.enter_async_context(self._room.room(num_bytes))

        return bytes(await body_of(request, most or self._most, make_room))

    async def parsed(self, parse: Callable[[bytes], R], body: bytes) -> R:
        """Return what a function makes of a body; in the lane, if the body is long."""
        if len(body) <= SMALL_BYTES:
            return parse(body)
        return await self.alone(lambda: parse(body))

    async def alone(self, function: Callable[[], R], *, rests: int = RESTS) -> R:
        """Return the result of a function that runs in the lane.

        Args:
            function: the function.
            rests: rest after it, as a multiple of its time; 0 if it lets other threads run.
        """
        async with self._turn:
            await asyncio.sleep(max(0.0, self._rested - time.monotonic()))
            begin = time.monotonic()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._lane, function)
            finally:
                end = time.monotonic()
                self._rested = end + rests * (end - begin)
