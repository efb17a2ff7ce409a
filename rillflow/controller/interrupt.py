"""Interruption: a signal ends a run in order, in every stage of the run.

    stage       first signal                                           second signal
    STARTING    ends the start at once: no step has begun              ends at once
    TRAINING    finishes the open steps, or abandons them when         ends at once
                ``stop_s`` is over; writes a checkpoint, then ends
    ENDING      nothing is left to interrupt: the run ends             ends at once

``runs.ending_signals`` lists the signals, and says which later signal counts as a second one.

    signal ─ handler ─> requested, signal in the queue ─ thread ─> message to the user
                                                                └ after stop_s ─> ABANDON ─> Signalled in
                                                                                  ``abandonable`` work

Loop of the thread
    consumes      the numbers of received signals
    waits for     the queue, which a handler may fill wherever it interrupted the main thread
    produces      one message: a handler must not write, because it may have interrupted a write; then, if
                  the run has not ended after ``stop_s``, ABANDON for the main thread
    shuts down    when the interruption exits and puts None into the queue
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rillflow.errors import Interrupted, Signalled
from rillflow.runs import ending_signals
from rillflow.runs.abandoning import ABANDON
from rillflow.runs.ending_signals import RepeatedSignals, SignalHandler, signal_name


class RunStage(Enum):
    """The stage of a run; its value is the text of the message after the first signal."""

    STARTING = "stopping before a step begins"
    TRAINING = "finishing this step{pace}{limit}{end}"
    ENDING = "the run is already ending"


class Interruption:
    """Handlers of ending signals: the first signal sets ``requested``, a second raises Signalled.

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
        """Whether the run is to end."""
        self.number = 0
        """Number of the first signal; 0: none."""
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
        self._repeated, self._may_abandon = RepeatedSignals(clock), False
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._previous: dict[int, Any] = {}
        self._lift_limit: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._answer, name="interruption", daemon=True).start()
            self._previous[ABANDON] = signal.signal(ABANDON, self._abandon)
            self._previous |= ending_signals.install(SignalHandler(self.receive))
            self._lift_limit = ending_signals.warn_before_cpu_limit()
        return self

    def __exit__(self, *error: object) -> None:
        self._lift_limit()
        with self._lock:
            ending_signals.restore(self._previous)
            self._previous.clear()
        self._asked.put(None)

    @contextmanager
    def orderly(self) -> Iterator[None]:
        """Raise Interrupted in place of any error that a signal caused during the start.

        An Interrupted that passes has the number of the signal.

        Raises:
            Interrupted: a signal came before the first step began.
        """
        try:
            yield
        except Interrupted as error:
            error.number = self.number or error.number
            raise
        except (KeyboardInterrupt, Exception):
            if self.requested and self.stage is RunStage.STARTING:  # the signal broke the start
                raise Interrupted(
                    f"stopped before a step began, as requested{self.by}",
                    why="nothing had started: the run is unchanged",
                    fix="run the same command to resume",
                    number=self.number,
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

    def receive(self, number: int) -> None:
        """Handle a signal.

        Raises:
            Signalled: no step has begun, or the signal is a second one.
        """
        ends_at_once = self._repeated.add(number)
        if self.requested:
            if ends_at_once:
                raise Signalled(number)
            return
        self.requested, self.number = True, number
        self._asked.put(number)
        if self.stage is RunStage.STARTING:
            raise Signalled(number)

    @property
    def by(self) -> str:
        """Text that names the first signal, after "as requested"; empty for Ctrl-C and without a signal."""
        return "" if self.number in (0, signal.SIGINT) else f" by {signal_name(self.number)}"

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
            name = "Ctrl-C" if asked == signal.SIGINT else signal_name(asked)
            repeat = "Ctrl-C stops" if asked == signal.SIGXCPU else "repeat to stop"
            self.say(f"{name}: {doing}; {repeat} at once{left}")
        try:
            if asked is not None:
                self._asked.get(timeout=self.stop_s)
        except Empty:
            self.is_over = True
            with self._lock:
                if self._previous:  # else the run has ended, and its handlers are gone
                    signal.pthread_kill(threading.main_thread().ident or 0, ABANDON)


def stopped(step: int, path: Path | None, abandoned: str = "", by: str = "") -> Interrupted:
    """Return the error that ends a run on request.

    Args:
        step: the last finished step.
        path: the checkpoint of that step; None before the first step.
        abandoned: the steps that did not end, and why; empty if there are none.
        by: see ``Interruption.by``.
    """
    where = f"after step {step}" if path else "before the first step"
    why = f"everything up to that step is saved in {path}" if path else "no step is saved"
    if abandoned:
        why = f"{abandoned}; {why}"
    elif path is None:
        why = "no step had finished"
    return Interrupted(f"stopped {where}, as requested{by}", why=why, fix="run the same command to resume")
