"""Interruption: the first signal asks for an orderly end and is answered at once, the second one ends.

    signal ─ handler ─> requested, a word in the queue ─ thread ─> what the user is told

Loop of the thread
    consumes      the names of signals that asked
    waits for     the queue, which a handler may fill wherever it interrupted the main thread
    produces      one answer: a handler itself must not write, since it may have interrupted a write
    shuts down    with the interruption's end, which puts None into the queue
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any


class Interruption:
    """While entered, SIGINT and SIGTERM set ``requested``; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python allows no signal handler, it never sets anything.

    Args:
        say: tells the user what the first signal leads to; called in a thread of its own.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.requested = False
        self.pace = ""
        """How long the present step may take, as the loop knows it."""
        self.say = say
        """Where the answer to the first signal goes."""
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._answer, name="interruption", daemon=True).start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self._asked.put(None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._asked.put("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    def _answer(self) -> None:
        asked = self._asked.get()
        if asked is not None and self.say is not None:
            self.say(
                f"{asked}: finishing this step{self.pace}, then a checkpoint; once more to end at once, "
                "without this step"
            )
