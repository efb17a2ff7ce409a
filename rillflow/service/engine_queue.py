"""EngineQueue: rows of many clients, sampled side by side by one engine that one thread owns.

    any thread ── put, drop ──> inbox ── turn ──> engine: add, abort, step ──> tell(row, is it over?)

consumes      rows that are wanted and row ids that nobody wants any more
waits for     nothing: ``turn`` makes one pass, or none where no row runs; ``woken`` is readable when the
              inbox has something, for an owner that waits
produces      each wanted row once, ended or as the error that ended it; before that, where it is streamed, as
              far as it is
shuts down    the owner calls ``turn`` no more; a pass that fails ends every row with its error, and is raised
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from rillflow.errors import RillflowError, StreamError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability, Engine

LOOK_EVERY = 8
"""Passes between two looks at rows that are streamed or have a stop of their own."""
Told: TypeAlias = Rollout | RillflowError


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """A row that somebody wants continued."""

    begin: Rollout
    """The row as it is."""
    sampling: SamplingConfig
    """How its tokens are drawn."""
    stops: tuple[str, ...]
    """Texts that end it, beside those of the engine."""
    is_streamed: bool
    """Whether it is told before it has ended."""
    tell: Callable[[Told, bool], None]
    """Is given the row, and whether it is over; called in the engine's thread."""


class EngineQueue:
    """What wants rows, and the engine that samples them.

    Args:
        engine: with ``Capability.ROWS``; its methods are called by the thread that calls ``turn``.
        tokenizer: of the model.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self._tokenizer, self._can_look = tokenizer, Capability.LOOK in engine.can
        self._lock, self._inbox = Lock(), list[Wanted | RowId]()
        self._rows: dict[RowId, Wanted] = {}
        self._passes = 0
        self.woken, self._wake = os.pipe()
        """A descriptor to wait for."""
        for descriptor in (self.woken, self._wake):
            os.set_blocking(descriptor, False)

    def put(self, *things: Wanted | RowId) -> None:
        """Begin rows, or drop those of these ids; from any thread."""
        with self._lock:
            self._inbox += things
        with suppress(BlockingIOError):
            os.write(self._wake, b".")

    def turn(self) -> bool:
        """Take what was put and make one pass; whether rows run.

        Raises:
            RillflowError: the pass failed; whoever waited for a row has been told.
        """
        with suppress(BlockingIOError):
            os.read(self.woken, 1 << 16)
        with self._lock:
            inbox, self._inbox = self._inbox, []
        for thing in inbox:
            if isinstance(thing, Wanted):
                self._begin(thing)
            elif self._rows.pop(thing, None) is not None:
                self.engine.abort(thing)
        if not self.engine.has_work:
            return False
        try:
            for rollout in self.engine.step():
                self._end(rollout)
        except RillflowError as error:
            rows, self._rows = self._rows, {}
            for wanted in rows.values():
                wanted.tell(error, True)
            raise
        self._passes += 1
        if self._can_look and self._passes % LOOK_EVERY == 0:
            self._look()
        return True

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.woken)
        os.close(self._wake)

    def _begin(self, wanted: Wanted) -> None:
        try:
            self._check(wanted.sampling)
            self.engine.add(wanted.begin, wanted.sampling)
        except RillflowError as error:
            wanted.tell(error, True)
        else:
            self._rows[wanted.begin.row] = wanted

    def _check(self, sampling: SamplingConfig) -> None:
        needs = {
            Capability.GREEDY: sampling.temperature == 0,
            Capability.CUT: sampling.is_cut,
            Capability.PENALTIES: sampling.is_penalised,
        }
        for capability in sorted(each for each, is_needed in needs.items() if is_needed):
            if capability not in self.engine.can:
                raise StreamError(
                    f"this engine cannot {capability}",
                    why=f"it can {', '.join(sorted(self.engine.can)) or 'do no more than sample'}",
                    fix="leave out what asks for it",
                )

    def _end(self, rollout: Rollout) -> None:
        wanted = self._rows.pop(rollout.row)
        wanted.tell(self._stopped(wanted, rollout) or rollout, True)

    def _look(self) -> None:
        for row, wanted in [*self._rows.items()]:
            if wanted.is_streamed or wanted.stops:
                rollout = self.engine.look(row)
                if (stopped := self._stopped(wanted, rollout)) is not None:
                    self.engine.abort(row)
                    self._end(stopped)
                elif wanted.is_streamed and len(rollout.tokens) > len(wanted.begin.tokens):
                    wanted.tell(rollout, False)

    def _stopped(self, wanted: Wanted, rollout: Rollout) -> Rollout | None:
        """The row up to the token that completes one of its stops; whenever that is noticed, the same."""
        begin = len(wanted.begin.tokens)
        own = rollout.tokens[begin:]

        def has(count: int) -> bool:
            text = self._tokenizer.decode(own[:count])
            return any(stop in text for stop in wanted.stops)

        if not wanted.stops or not has(len(own)):
            return None
        return rollout.first(begin + bisect_left(range(len(own)), True, key=has), Finish.STOP)
