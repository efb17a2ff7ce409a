"""Interruption: SIGINT and SIGTERM end a run in order, in every stage of the run.

    stage       first signal                                           second signal
    STARTING    ends the start at once: no step has begun              ends at once
    TRAINING    finishes the open steps, or abandons them when         ends at once
                ``stop_s`` is over; writes a checkpoint, then ends
    ENDING      nothing is left to interrupt: the run ends             ends at once

    signal ─ handler ─> requested, signal name in the queue ─ thread ─> message to the user
                                                                └ after stop_s ─> ABANDON ─> Signalled in
                                                                                  ``abandonable`` work

Loop of the thread
    consumes      the names of received signals
    waits for     the queue, which a handler may fill wherever it interrupted the main thread
    produces      one message: a handler must not write, because it may have interrupted a write; then, if
                  the run has not ended after ``stop_s``, ABANDON for the main thread
    shuts down    when the interruption exits and puts None into the queue
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
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from rillflow.errors import Interrupted, Signalled
from rillflow.runs.abandoning import ABANDON

REPEAT_S = 1.0
"""A second SIGTERM within this many seconds counts as the first. A launcher such as ``timeout`` or ``srun``
forwards to its child the signal that the whole process group already received."""


class RunStage(Enum):
    """The stage of a run; its value is the text of the message after the first signal."""

    STARTING = "stopping before a step begins"
    TRAINING = "finishing this step{pace}{limit}{end}"
    ENDING = "the run is already ending"


class Interruption:
    """Signal handlers for SIGINT and SIGTERM: the first signal sets ``requested``, a second raises Signalled.

    While the run starts, the first signal raises Signalled too; ``orderly`` turns it into Interrupted.
    Outside the main thread Python allows no signal handler, so ``requested`` stays False.

    Args:
        say: shows the user the message after the first signal; called in a separate thread.
        clock: returns seconds.
        last: the step after which the run stops, with its evaluation and a checkpoint; None: the run's last.
        stop_s: seconds that open steps have to end after the first signal.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        last: int | None = None,
        stop_s: float = threading.TIMEOUT_MAX,
    ) -> None:
        self.last = last
        """Step after which the run stops; None for the run's last."""
        self.stop_s = stop_s
        """Seconds that open steps have to end after the first signal."""
        self.is_over = False
        """Whether ``stop_s`` is over and the run has not ended."""
        self.requested = False
        self.early = ""
        """Why the run ends before its last step although nobody asked; empty otherwise."""
        self.stage = RunStage.STARTING
        """Stage of the run; the caller sets it when the next stage begins."""
        self.pace = ""
        """Text on how long the current step may take; the loop sets it."""
        self.end = ", then writing a checkpoint"
        """Text on what follows the open steps after the first signal."""
        self.say = say
        """Function that shows the message after the first signal."""
        self._clock, self._terminated_s, self._may_abandon = clock, -math.inf, False
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self._previous: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._answer, name="interruption", daemon=True).start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self.receive)
            self._previous[ABANDON] = signal.signal(ABANDON, self._abandon)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous.clear()
        self._asked.put(None)

    @contextmanager
    def orderly(self) -> Iterator[None]:
        """Raise Interrupted in place of any error that a signal caused during the start.

        Raises:
            Interrupted: a signal came before the first step began.
        """
        try:
            yield
        except (KeyboardInterrupt, Exception):
            if self.requested and self.stage is RunStage.STARTING:  # the signal broke the start
                raise Interrupted(
                    "stopped before a step began, as requested",
                    why="nothing had started: the run is unchanged",
                    fix="run the same command to resume",
                ) from None
            raise

    @contextmanager
    def abandonable(self, may_abandon: bool = True) -> Iterator[None]:
        """Mark work that ends when ``stop_s`` is over; with False, work within it that does not.

        Raises:
            Signalled: ``stop_s`` is over.
        """
        before, self._may_abandon = self._may_abandon, may_abandon
        self._abandon()
        try:
            yield
        finally:
            self._may_abandon = before
        self._abandon()

    def _abandon(self, *_: object) -> None:
        if self.is_over and self._may_abandon:
            self._may_abandon = False
            raise Signalled

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            Signalled: no step has begun, or the signal is the second.
        """
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

    def end_early(self, why: str) -> None:
        """Stop the run as on a first signal, if there is a reason."""
        if why:
            self.early, self.requested = why, True

    def _answer(self) -> None:
        asked = self._asked.get()
        if asked is not None and self.say is not None:
            is_bounded = self.stop_s < threading.TIMEOUT_MAX
            limit = f", at most {self.stop_s:g} s" if is_bounded else ""
            doing = self.stage.value.format(pace=self.pace, limit=limit, end=self.end)
            left = ", without this step" if self.stage is RunStage.TRAINING else ""
            self.say(f"{asked}: {doing}; repeat to stop at once{left}")
        try:
            if asked is not None:
                self._asked.get(timeout=self.stop_s)
        except Empty:
            self.is_over = True
            with self._lock:
                if self._previous:  # else the run has ended, and its handlers are gone
                    signal.pthread_kill(threading.main_thread().ident or 0, ABANDON)


def stopped(step: int, path: Path | None, abandoned: str = "") -> Interrupted:
    """Return the error that ends a run on request.

    Args:
        step: the last finished step.
        path: the checkpoint of that step; None before the first step.
        abandoned: the steps that did not end, and why; empty if there are none.
    """
    where = f"after step {step}" if path else "before the first step"
    why = f"everything up to that step is saved in {path}" if path else "no step is saved"
    if abandoned:
        why = f"{abandoned}; {why}"
    elif path is None:
        why = "no step had finished"
    return Interrupted(f"stopped {where}, as requested", why=why, fix="run the same command to resume")
