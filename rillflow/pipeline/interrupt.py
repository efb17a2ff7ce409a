"""Interruption: SIGINT and SIGTERM end a run orderly, in every stage of it.

    stage       first signal                                        second signal
    STARTING    ends the start at once: no step is under way        ends at once
    TRAINING    finishes the step, then a checkpoint and the end    ends at once
    ENDING      nothing is left to interrupt: the run ends          ends at once

    signal ─ handler ─> requested, a word in the queue ─ thread ─> what the user is told

Loop of the thread
    consumes      the names of signals that asked
    waits for     the queue, which a handler may fill wherever it interrupted the main thread
    produces      one answer: a handler itself must not write, since it may have interrupted a write
    shuts down    with the interruption's end, which puts None into the queue
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from rillflow.errors import Interrupted, Signalled

REPEAT_S = 1.0
"""A SIGTERM within so many seconds of the first is the same one: a launcher such as ``timeout`` or ``srun``
forwards to its child what the whole process group received."""


class RunStage(Enum):
    """What a run is doing; the value is what the answer to the first signal says."""

    STARTING = "ending before a step begins"
    TRAINING = "finishing this step{pace}, then a checkpoint"
    ENDING = "the run is ending"


class Interruption:
    """While entered, SIGINT and SIGTERM set ``requested``; a second one raises Signalled.

    While the run starts, the first one raises Signalled too; ``orderly`` turns it into Interrupted.
    Outside the main thread, where Python allows no signal handler, it never sets anything.

    Args:
        say: tells the user what the first signal leads to; called in a thread of its own.
        clock: seconds.
    """

    def __init__(
        self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requested = False
        self.stage = RunStage.STARTING
        """What the run is doing; whoever goes on to the next stage sets it."""
        self.pace = ""
        """How long the present step may take, as the loop knows it."""
        self.say = say
        """Where the answer to the first signal goes."""
        self._clock, self._terminated_s = clock, -math.inf
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

    @contextmanager
    def orderly(self) -> Iterator[None]:
        """Turn the end of a start that a signal interrupted into Interrupted.

        Raises:
            Interrupted: a signal came before the first step began.
        """
        try:
            yield
        except (KeyboardInterrupt, Exception):
            if self.requested and self.stage is RunStage.STARTING:  # other errors are what the end broke
                raise Interrupted(
                    "stopped before a step began, as asked",
                    why="nothing was under way: the run is as it was",
                    fix="give the same command to go on from there",
                ) from None
            raise

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        is_repeated = number == signal.SIGTERM and self._clock() - self._terminated_s < REPEAT_S
        if self.requested and is_repeated:
            return
        if self.requested:
            raise Signalled
        self.requested = True
        if number == signal.SIGTERM:
            self._terminated_s = self._clock()
        self._asked.put("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        if self.stage is RunStage.STARTING:
            raise Signalled

    def _answer(self) -> None:
        asked = self._asked.get()
        if asked is not None and self.say is not None:
            doing = self.stage.value.format(pace=self.pace)
            left = ", without this step" if self.stage is RunStage.TRAINING else ""
            self.say(f"{asked}: {doing}; once more to end at once{left}")


def stopped(step: int, path: Path | None) -> Interrupted:
    """Return the error that ends a run as asked.

    Args:
        step: the last whole one.
        path: its checkpoint; None before the first step.
    """
    where = f"after step {step}" if path else "before the first step"
    why = f"everything up to it is in {path}" if path else "nothing was under way"
    return Interrupted(f"stopped {where}, as asked", why=why, fix="give the same command to go on from there")
