"""Lease: let one merger at a time write versions, without a clock that machines share.

merger.json: {id, beat, poll_s} ── changes while we watch: another merger is at work, refused
                                └─ stands still: its merger is gone, and we take over
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from rillflow_links.sides.store import SideError, SideStore

FILE = "merger.json"
LEAST_WATCH_S = 3.0
"""Shortest time to watch another merger's beats."""


class MergerLease:
    """The right to write versions.

    Args:
        store: the store.
        poll_s: seconds between two beats.
        sleep: waits for some seconds.
        clock: returns seconds of this machine.
    """

    def __init__(
        self,
        store: SideStore,
        poll_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._poll_s, self._sleep, self._clock = store, poll_s, sleep, clock
        self._id, self._beats, self._last = secrets.token_hex(8), 0, clock()

    def take(self) -> None:
        """Become the store's merger.

        Raises:
            SideError: another merger is at work.
        """
        before = self._store.read_json(FILE)
        if before is not None:
            self._sleep(max(LEAST_WATCH_S, 5 * float(before.get("poll_s", 0))))
            after = self._store.read_json(FILE)
            if after is not None and after != before:
                raise self._taken()
        self._write()
        self._sleep(self._poll_s)  # two mergers that began together: one finds the other's id
        self.confirm()

    def beat(self) -> None:
        """Show that this merger is at work, if the last beat is old.

        Raises:
            SideError: another merger has taken over.
        """
        if self._clock() - self._last >= self._poll_s:
            self.confirm()
            self._write()

    def release(self) -> None:
        """Give the lease back, if it is still this merger's."""
        found = self._store.read_json(FILE)
        if found is not None and found.get("id") == self._id:
            self._store.remove(FILE)

    def _write(self) -> None:
        self._beats, self._last = self._beats + 1, self._clock()
        self._store.write_json(FILE, {"id": self._id, "beat": self._beats, "poll_s": self._poll_s})

    def confirm(self) -> None:
        """Raise an error if another merger has taken over."""
        found = self._store.read_json(FILE)
        if found is None or found.get("id") != self._id:
            raise self._taken()

    def _taken(self) -> SideError:
        return SideError(
            f"another merger is at work in {self._store.url}",
            why="two mergers would write different versions of one number",
            fix="leave it running, or stop it first",
        )
