"""RetryPatience: try a request again while its run does not answer, with growing waits, and say so once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rillflow.errors import StreamError
from rillflow_links.remote.transport import Unreachable

FIRST_S, MOST_S = 0.2, 10.0
"""Waits between two tries: each is twice the one before."""
T = TypeVar("T")


class Stopped(Exception):
    """The sampler leaves."""


class RetryPatience:
    """Repeats requests of several threads.

    Args:
        most_s: longest time without an answer.
        tell: shows a line to the user.
        returned: called when the run answers again, before its answer is used.
    """

    def __init__(self, most_s: float, tell: Callable[[str], None], returned: Callable[[], None]) -> None:
        self._most_s, self._tell, self._returned = most_s, tell, returned
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._away_since: float | None = None

    def stop(self) -> None:
        """Let no request wait any more."""
        self._stop.set()

    def during(self, request: Callable[[], T]) -> T:
        """Return the answer of a request.

        Raises:
            Unreachable: there was none for ``most_s``.
            Stopped: the sampler leaves.
        """
        wait_s = FIRST_S
        while True:
            try:
                answer = request()
                self._answered()
                return answer
            except Unreachable as error:
                self._note(error)
            if self._stop.wait(wait_s):
                raise Stopped
            wait_s = min(2 * wait_s, MOST_S)

    def _note(self, error: Unreachable) -> None:
        with self._lock:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                self._tell(f"no answer: {error.what} ({error.why}); trying again")
            elif now - self._away_since > self._most_s:
                raise StreamError(
                    f"the run did not answer for {now - self._away_since:.0f} s",
                    why=f"{error.what}: {error.why}",
                    fix="start the run and join again, or raise --patience-s",
                )

    def _answered(self) -> None:
        with self._lock:
            if self._away_since is None:
                return
            away_s = time.monotonic() - self._away_since
            self._returned()
            self._away_since = None
            self._tell(f"the run answers again after {away_s:.0f} s")
