"""EngineQueue: sample the rows of many clients side by side with one engine that one thread owns.

    any thread ── put ──> inbox ──> a queue a request ── admit, in turn ──> engine: add, step, abort
                                         ^                                       │
                                         └──── rows on trial <── a pass failed ──┤
    client <── tell(row or error, is it over?) ──────────────────────────────────┘

consumes      rows that clients want, and the ids of rows that they no longer want
waits for     nothing: ``turn`` makes one pass, or none where no row runs; ``woken`` is readable when the
              inbox has something, for an owner that waits
produces      each wanted row once, ended, or the error that ended it; a streamed row is told before that, too
shuts down    healthy: the owner stops calling ``turn``. Broken engine: ``fail`` tells every row, and every
              row that comes later

Fairness: at most ``max_rows`` rows are in the engine. Requests take turns, one row a turn, so a request of
one row waits for at most one row of each request before it.

Isolation: a pass that fails empties the engine. The queue ends the row that is to blame and puts the other
rows back, with the tokens they had when the queue looked last:

    the error names a row                          that row
    one row was new in this pass                   the new row
    several rows were new in this pass             each is tried in a pass of its own
    none of these                                  nobody can be blamed: every row gets the error
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from rillflow.errors import RillflowError, RowError, StreamError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability, Engine
from rillflow.service.app import Declined

LOOK_EVERY = 8
"""Passes between two looks at rows that are streamed or have a stop of their own."""
KEEP_EVERY = 64
"""Passes between two looks at every row: a row that goes on after another one failed repeats no more."""
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
    name: str = "the request"
    """What errors call it."""


class EngineQueue:
    """The rows that clients want, and the engine that samples them.

    Args:
        engine: with ``Capability.ROWS``; its methods are called by the thread that calls ``turn``.
        tokenizer: of the model.
        max_rows: rows in the engine at once.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, max_rows: int) -> None:
        self.engine = engine
        self._tokenizer, self._can_look = tokenizer, Capability.LOOK in engine.can
        self._max_rows, self._passes = max_rows, 0
        self._lock, self._inbox = Lock(), list[list[Wanted | RowId]]()
        self._failure: RillflowError | None = None
        self._requests, self._suspects = deque[deque[Wanted]](), deque[Wanted]()
        self._rows: dict[RowId, Wanted] = {}
        self._kept: dict[RowId, Rollout] = {}
        self._new: set[RowId] = set()
        self.woken, self._wake = os.pipe()
        """A descriptor to wait for."""
        for descriptor in (self.woken, self._wake):
            os.set_blocking(descriptor, False)

    def put(self, *things: Wanted | RowId) -> None:
        """Begin the rows of one request, or drop rows by their ids; from any thread."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._inbox.append([*things])
        if failure is not None:
            _tell_all((thing for thing in things if isinstance(thing, Wanted)), failure)
        with suppress(BlockingIOError):
            os.write(self._wake, b".")

    def turn(self) -> bool:
        """Take what was put and make one pass; return whether rows run.

        Raises:
            RillflowError: the pass failed; the rows to blame have been told, and the others go on.
            Exception: the engine raised something else, and no row is to blame: it is broken.
        """
        with suppress(BlockingIOError):
            os.read(self.woken, 1 << 16)
        with self._lock:
            inbox, self._inbox = self._inbox, []
        for things in inbox:
            self._sort(things)
        self._admit()
        if not self.engine.has_work:
            return bool(self._suspects or self._requests)
        try:
            ended = self.engine.step()
        except Exception as error:
            if self._isolate(error) and not isinstance(error, RillflowError):
                why = f"{type(error).__name__}: {error}"
                raise StreamError("the engine failed at a request, which has ended", why=why) from error
            raise
        self._new.clear()
        for rollout in ended:
            self._end(rollout)
        self._passes += 1
        if self._can_look and self._passes % LOOK_EVERY == 0:
            self._look(every_row=self._passes % KEEP_EVERY == 0)
        return True

    def fail(self, error: RillflowError) -> None:
        """Tell every row this error, and every row that comes later; the engine is not used again."""
        with self._lock:
            self._failure, inbox, self._inbox = error, self._inbox, []
        _tell_all((thing for things in inbox for thing in things if isinstance(thing, Wanted)), error)
        self._tell_everybody(error)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.woken)
        os.close(self._wake)

    def _sort(self, things: list[Wanted | RowId]) -> None:
        """Queue the rows of one request; take out rows that nobody wants any more."""
        dropped = {thing for thing in things if isinstance(thing, RowId)}
        if dropped:
            for waiting in (*self._requests, self._suspects):
                left = [wanted for wanted in waiting if wanted.begin.row not in dropped]
                waiting.clear()
                waiting.extend(left)
            self._requests = deque(filter(None, self._requests))
        for row in dropped:
            self._kept.pop(row, None)
            if row in self._rows:
                self._forget(row)
                self.engine.abort(row)
        if begun := deque(thing for thing in things if isinstance(thing, Wanted)):
            self._requests.append(begun)

    def _admit(self) -> None:
        """Fill the engine; requests take turns. A row on trial is the only new one of its pass."""
        if self._suspects and not self._new:
            self._enter(self._suspects.popleft(), is_new=True)
        while self._requests and len(self._rows) < self._max_rows and not self._suspects:
            request = self._requests.popleft()
            wanted = request.popleft()
            if request:
                self._requests.append(request)
            self._enter(wanted, is_new=True)

    def _enter(self, wanted: Wanted, *, is_new: bool) -> None:
        row = wanted.begin.row
        try:
            self._check(wanted.sampling)
            self.engine.add(self._kept.get(row, wanted.begin), wanted.sampling)
        except RillflowError as error:
            wanted.tell(_of_request(error, wanted), True)
        except Exception as error:  # noqa: BLE001  the supervision boundary of a row: an engine may raise anything
            wanted.tell(_failed(error, wanted), True)
        else:
            self._rows[row] = wanted
            self._new |= {row} if is_new else set()

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

    def _isolate(self, error: Exception) -> bool:
        """End the row to blame for a failed pass and put the others back; return whether one may be found."""
        rows, new = self._rows, self._new
        self._rows, self._new = {}, set()
        if self.engine.has_work:
            for row in rows:
                self.engine.abort(row)
        blamed = {row for row in rows if isinstance(error, RowError) and row == error.row}
        if not blamed and not new:
            self._rows = rows
            self._tell_everybody(error)
            return False
        if not blamed and len(new) == 1:
            blamed = new
        for row in blamed:
            self._kept.pop(row, None)
            wanted = rows.pop(row)
            wanted.tell(_failed(error, wanted), True)
        if not blamed:
            self._suspects.extend(rows.pop(row) for row in [*rows] if row in new)
        for row, wanted in rows.items():
            self._enter(wanted, is_new=row in new)
        return True

    def _tell_everybody(self, error: Exception) -> None:
        waiting = [*self._rows.values(), *self._suspects, *(each for rows in self._requests for each in rows)]
        for held in (self._rows, self._kept, self._new, self._suspects, self._requests):
            held.clear()
        _tell_all(waiting, error)

    def _forget(self, row: RowId) -> Wanted:
        self._kept.pop(row, None)
        self._new.discard(row)
        return self._rows.pop(row)

    def _end(self, rollout: Rollout) -> None:
        wanted = self._forget(rollout.row)
        wanted.tell(self._stopped(wanted, rollout) or rollout, True)

    def _look(self, *, every_row: bool) -> None:
        for row, wanted in [*self._rows.items()]:
            if every_row or wanted.is_streamed or wanted.stops:
                rollout = self._kept[row] = self.engine.look(row)
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


def _tell_all(rows: Iterable[Wanted], error: Exception) -> None:
    for wanted in rows:
        wanted.tell(_failed(error, wanted), True)


def _of_request(error: RillflowError, wanted: Wanted) -> StreamError:
    """The error in the client's words, who does not know ids of rows."""
    what, why = (text.replace(f"row ({wanted.begin.row})", wanted.name) for text in (error.what, error.why))
    return StreamError(what, why, error.fix)


def _failed(error: Exception, wanted: Wanted) -> Declined:
    """The error of a row that failed in the engine."""
    if isinstance(error, Declined):
        return error
    if isinstance(error, RillflowError):
        told = _of_request(error, wanted)
        return Declined(500, told.what, told.why, told.fix)
    why = f"{type(error).__name__}: {error}"
    return Declined(500, f"the engine failed at {wanted.name}", why, "see the log of the server")
