"""Body limit: the bytes of request bodies that a service receives at once, and the time that each may take.

    head announces n bytes ─ room(n) ─> read ─ begin: until it is answered ─> freed
                                             └ anything else: until it is read
A body waits for room as long as it may take to arrive. Groups that begin hold their room while they wait for
the store, so they have a limit of their own: what frees the store is never behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rillflow.serving.http_body import BODY_WITHIN_S, SLOWEST_BYTES_S, SMALL_BYTES, Declined


def within_s(num_bytes: int) -> float:
    """Return the seconds in which a body must arrive: 30, and one for each MiB."""
    return BODY_WITHIN_S + num_bytes / SLOWEST_BYTES_S


class BodyLimit:
    """Room for the bodies that arrive.

    Args:
        most_bytes: largest total size.
        parts: a body takes at most this part of the free room, so that large bodies leave room for smaller
            ones; 1 for all of it.
    """

    def __init__(self, most_bytes: int, *, parts: int = 1) -> None:
        self.most_bytes, self.used_bytes, self._parts = most_bytes, 0, parts
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold room for a body; wait for it.

        Raises:
            Declined: the body is larger than the limit, or no room came free in time.
        """
        if num_bytes * self._parts > self.most_bytes:
            what = f"a body of {num_bytes} bytes"
            raise Declined(413, what, why=f"the room is {self.most_bytes // self._parts}", fix="send less")
        held = num_bytes if num_bytes > SMALL_BYTES else 0
        try:
            async with asyncio.timeout(within_s(num_bytes)), self._freed:
                await self._freed.wait_for(lambda: held * self._parts <= self.most_bytes - self.used_bytes)
        except TimeoutError:
            what = f"no room for a body of {num_bytes} bytes for {within_s(num_bytes):g} s"
            why = f"other requests have {self.used_bytes} of {self.most_bytes} bytes"
            raise Declined(503, what, why=why, fix="send again later, or write less at once") from None
        self.used_bytes += held
        try:
            yield
        finally:
            self.used_bytes -= held
            async with self._freed:
                self._freed.notify_all()
