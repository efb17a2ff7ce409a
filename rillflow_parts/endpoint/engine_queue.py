"""EngineQueue: sample the rows of many clients concurrently with one engine that a single thread owns.

    any thread ── put ──> inbox ──> one queue per request ── admit, in turn ──> engine: add, step, abort
                                         ^                                       │
                                         └──── rows on trial <── a pass failed ──┤
    client <── tell(row or error, is it over?) ──────────────────────────────────┘

consumes      rows that clients want, until they have ended or their clients have left; functions to call
waits for     nothing: ``turn`` runs one pass, or none if no row runs; ``woken`` becomes readable when the
              inbox has an entry or a client has left, for an owner that waits
produces      each wanted row once, when it ends, or the error that ended it; streamed rows also before that
shuts down    healthy: the owner stops calling ``turn``. Broken engine: ``fail`` sends the error to every row,
              including later ones

Fairness: at most ``max_rows`` rows are in the engine. Requests take turns, one row per turn, so a request of
one row waits for at most one row of each request before it. A queue that pauses rows takes out those that ran
longest, once each has run ``SLICE`` passes and others wait; new requests enter before paused rows, which have
every fourth place. So a new row waits for passes, not for the ends of long answers.

Isolation: a failed pass empties the engine. The queue ends the row at fault and puts the other rows back,
with the tokens of the last look:

    the error names a row                          that row
    one row was new in this pass                   the new row
    several rows were new in this pass             each runs again as the only new row of a pass
    none of these                                  no row can be identified: every row gets the error
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from rillflow.errors import RillflowError, RowError, StreamError
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability, Engine, EngineLost, losses
from rillflow.serving.http_body import Declined

LOOK_EVERY = 8
"""Passes between two looks at rows that are streamed or have stop texts."""
KEEP_EVERY = 64
"""Passes between two looks at every row, which limit repeated work after another row failed."""
SLICE, TOKENS_PER_PASS = 32, 16
"""Passes before a row may be paused; a long row runs one for each 16 tokens, which it reads again later."""
PAUSED_EVERY = 4
"""Every fourth free place is a paused row's."""
MOST_WAITING, FEW = 2**16, 8
"""Rows that may wait; a request of at most 8 rows is queued in any case."""
Told: TypeAlias = Rollout | RillflowError
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """A row that a client wants continued."""

    begin: Rollout
    """The row at the start."""
    sampling: SamplingConfig
    """Sampling settings."""
    stops: tuple[str, ...]
    """Stop texts, in addition to those of the engine."""
    is_streamed: bool
    """Whether the client receives the row before it has ended."""
    tell: Callable[[Told, bool], None]
    """Receives the row, and whether it has ended; called in the engine's thread."""
    name: str = "the request"
    """Name in errors."""
    is_left: Callable[[], bool] = lambda: False
    """Whether the client no longer wants the row; called in the engine's thread, after ``wake``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A function for the engine's thread."""

    function: Callable[[], Any]
    """The function."""
    result: Future[Any]
    """Receives its result or error."""


class EngineQueue:
    """The rows that clients want, and the engine that samples them.

    Args:
        engine: has ``Capability.ROWS``; only the thread that calls ``turn`` and ``load`` calls its methods.
        tokenizer: tokeniser of the model.
        max_rows: largest number of rows in the engine.
        pauses: whether running rows are paused while others wait. A paused row reads its tokens again, so its
            later log probabilities may differ in rounding.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, max_rows: int, pauses: bool = False) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.version = 0
        """Version of the newest weights."""
        self._can_look = Capability.LOOK in engine.can
        self._max_rows, self._passes = max_rows, 0
        self._lock, self._inbox = Lock(), list[deque[Wanted]]()
        self._failure: RillflowError | None = None
        self._jobs = deque[Job]()
        self._requests, self._suspects = deque[deque[Wanted]](), deque[Wanted]()
        self._pauses = pauses and self._can_look
        self._paused, self._num_entered, self._num_waiting = deque[Wanted](), 0, 0
        self._entered: dict[RowId, int] = {}  # number of the pass before which a row entered
        self._rows: dict[RowId, Wanted] = {}
        self._kept: dict[Wanted, Rollout] = {}
        self._new: set[RowId] = set()
        self.woken, self._wake = os.pipe()
        """File descriptor to poll for new entries."""
        for descriptor in (self.woken, self._wake):
            os.set_blocking(descriptor, False)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on; see Engine."""
        self.version = version
        self.engine.load(version, weights)

    def put(self, *request: Wanted) -> None:
        """Begin the rows of one request; from any thread."""
        with self._lock:
            failure = self._failure
            waiting = self._num_waiting + sum(map(len, self._inbox))
            if failure is None and len(request) > FEW and waiting + len(request) > MOST_WAITING:
                why = f"the limit is {MOST_WAITING:,}"
                failure = Declined(429, f"{waiting:,} rows wait to be sampled", why, "send it again later")
            if failure is None:
                self._inbox.append(deque(request))
        if failure is not None:
            _tell_all(request, failure)
        self.wake()

    def wake(self) -> None:
        """Make the next ``turn`` remove the rows whose clients have left; from any thread."""
        with suppress(BlockingIOError):
            os.write(self._wake, b".")

    def turn(self) -> bool:
        """Process the inbox and run one pass; return whether rows run.

        Raises:
            EngineLost: the engine's process has ended; no row is at fault.
            RillflowError: the pass failed; the rows at fault were told, and the others continue.
            Exception: the engine raised another error, and no row is at fault: the engine is broken.
        """
        with suppress(BlockingIOError):
            os.read(self.woken, 1 << 16)
            self._sort()
        self._pause()
        self._admit()
        self._num_waiting = len(self._paused) + sum(map(len, self._requests))
        did_job = self._run_job()
        if not self.engine.has_work:
            return did_job or bool(self._suspects or self._requests or self._paused)
        try:
            with losses():
                ended = self.engine.step()
        except EngineLost:
            raise
        except Exception as error:
            if self._isolate(error) and not isinstance(error, RillflowError):
                why = f"{type(error).__name__}: {error}"
                raise StreamError("the engine failed on a request and ended it", why=why) from error
            raise
        self._new.clear()
        for rollout in ended:
            self._end(rollout)
        self._passes += 1
        if self._can_look and self._passes % LOOK_EVERY == 0:
            self._look(every_row=self._passes % KEEP_EVERY == 0)
        return True

    def fail(self, error: RillflowError) -> None:
        """End every row, and every later row, with this error; the engine is not used again."""
        with self._lock:
            self._failure, inbox, self._inbox = error, self._inbox, []
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(error)
        _tell_all((wanted for request in inbox for wanted in request), error)
        self._tell_everybody(error)

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Run a function in the engine's thread, between two passes; from any thread.

        The future has the function's result or error, or the error that ended the engine.
        """
        job = Job(function=function, result=Future[Any]())
        with self._lock:
            failure = self._failure
            if failure is None:
                self._jobs.append(job)
        if failure is not None:
            job.result.set_exception(failure)
        self.wake()
        return job.result

    def _run_job(self) -> bool:
        """Run the oldest job; return whether there was one."""
        with self._lock:
            job = self._jobs.popleft() if self._jobs else None
        if job is None:
            return False
        if not job.result.set_running_or_notify_cancel():  # the client has left
            return True
        try:
            job.result.set_result(job.function())
        except Exception as error:  # noqa: BLE001  it ends the job, and the engine is not concerned
            job.result.set_exception(error)
        return True

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.woken)
        os.close(self._wake)

    def _sort(self) -> None:
        """Queue the new requests; remove every row whose client has left."""
        with self._lock:
            inbox, self._inbox = self._inbox, []
        self._requests.extend(inbox)
        for wanted in [each for each in self._suspects if each.is_left()]:
            self._suspects.remove(wanted)
            self._kept.pop(wanted, None)
        for wanted in [each for each in self._paused if each.is_left()]:
            self._paused.remove(wanted)
            self._kept.pop(wanted, None)
        stay = (deque(each for each in request if not each.is_left()) for request in self._requests)
        self._requests = deque(filter(None, stay))
        for row, wanted in [*self._rows.items()]:
            if wanted.is_left():
                self._forget(row)
                self.engine.abort(row)

    def _pause(self) -> None:
        """Take out the rows that ran longest, if others wait for their places."""
        waiting = len(self._requests) + len(self._paused)
        if not (self._pauses and waiting) or len(self._rows) < self._max_rows or self._suspects:
            return
        due = [
            row
            for row, wanted in self._rows.items()
            if self._passes - self._entered[row] >= max(SLICE, len(wanted.begin.tokens) // TOKENS_PER_PASS)
        ]
        for row in sorted(due, key=self._entered.__getitem__)[:waiting]:
            wanted = self._forget(row)
            self._kept[wanted] = self.engine.abort(row)
            self._paused.append(wanted)

    def _next_request(self) -> deque[Wanted]:
        """Return the request whose row enters next; every fourth is a paused row, if there is one."""
        self._num_entered += 1
        if self._paused and (not self._requests or self._num_entered % PAUSED_EVERY == 0):
            return deque([self._paused.popleft()])
        return self._requests.popleft()

    def _admit(self) -> None:
        """Fill the engine; requests take turns. A row on trial is the only new row of its pass."""
        if self._suspects and not self._new:
            self._enter(self._suspects.popleft(), is_new=True)
        held = deque[deque[Wanted]]()
        while len(self._rows) < self._max_rows and not self._suspects:
            if not (self._requests or self._paused):
                break
            request = self._next_request()
            if request[0].begin.row in self._rows:  # the same seed and prompt: the earlier row ends first
                held.append(request)
                continue
            wanted = request.popleft()
            if request:
                self._requests.append(request)
            self._enter(wanted, is_new=True)
        self._requests.extendleft(reversed(held))

    def _enter(self, wanted: Wanted, *, is_new: bool) -> None:
        row = wanted.begin.row
        try:
            self._check(wanted.sampling)
            with losses():
                self.engine.add(self._kept.get(wanted, wanted.begin), wanted.sampling)
        except EngineLost:
            self._requests.appendleft(deque([wanted]))  # no row is at fault
            raise
        except RillflowError as error:
            wanted.tell(_of_request(error, wanted), True)
        except Exception as error:  # noqa: BLE001  an engine may raise any error for a row
            wanted.tell(_failed(error, wanted), True)
        else:
            self._rows[row], self._entered[row] = wanted, self._passes
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
                    why=f"it can {', '.join(sorted(self.engine.can)) or 'only sample'}",
                    fix="omit the parameter that needs it",
                )

    def _isolate(self, error: Exception) -> bool:
        """End the row at fault for a failed pass and put the others back; return whether one may be found."""
        rows, new = self._rows, self._new
        self._rows, self._new = {}, set()
        self._entered.clear()
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
            wanted = rows.pop(row)
            self._kept.pop(wanted, None)
            wanted.tell(_failed(error, wanted), True)
        if not blamed:
            self._suspects.extend(rows.pop(row) for row in [*rows] if row in new)
        for row, wanted in rows.items():
            self._enter(wanted, is_new=row in new)
        return True

    def _tell_everybody(self, error: Exception) -> None:
        waiting = [
            *self._rows.values(),
            *self._suspects,
            *self._paused,
            *(each for rows in self._requests for each in rows),
        ]
        for held in (self._rows, self._kept, self._new, self._suspects, self._requests, self._paused):
            held.clear()
        _tell_all(waiting, error)

    def _forget(self, row: RowId) -> Wanted:
        self._new.discard(row)
        self._entered.pop(row, None)
        wanted = self._rows.pop(row)
        self._kept.pop(wanted, None)
        return wanted

    def _end(self, rollout: Rollout) -> None:
        wanted = self._forget(rollout.row)
        wanted.tell(self._stopped(wanted, rollout) or rollout, True)

    def _look(self, *, every_row: bool) -> None:
        for row, wanted in [*self._rows.items()]:
            if every_row or wanted.is_streamed or wanted.stops:
                rollout = self._kept[wanted] = self.engine.look(row)
                if (stopped := self._stopped(wanted, rollout)) is not None:
                    self.engine.abort(row)
                    self._end(stopped)
                elif wanted.is_streamed and len(rollout.tokens) > len(wanted.begin.tokens):
                    wanted.tell(rollout, False)

    def _stopped(self, wanted: Wanted, rollout: Rollout) -> Rollout | None:
        """Return the row up to the token that completes a stop text, however late the stop is found."""
        begin = len(wanted.begin.tokens)
        own = rollout.tokens[begin:]

        def has(count: int) -> bool:
            text = self.tokenizer.decode(own[:count])
            return any(stop in text for stop in wanted.stops)

        if not wanted.stops or not has(len(own)):
            return None
        return rollout.first(begin + bisect_left(range(len(own)), True, key=has), Finish.STOP)


def _tell_all(rows: Iterable[Wanted], error: Exception) -> None:
    for wanted in rows:
        wanted.tell(_failed(error, wanted), True)


def _of_request(error: RillflowError, wanted: Wanted) -> StreamError:
    """Return the error with the request's name instead of the row id, which clients do not know."""
    what, why = (text.replace(f"row ({wanted.begin.row})", wanted.name) for text in (error.what, error.why))
    return StreamError(what, why, error.fix)


def _failed(error: Exception, wanted: Wanted) -> Declined:
    """Return the error of a row that failed in the engine."""
    if isinstance(error, Declined):
        return error
    if isinstance(error, RillflowError):
        told = _of_request(error, wanted)
        return Declined(500, told.what, told.why, told.fix)
    why = f"{type(error).__name__}: {error}"
    return Declined(500, f"the engine failed on {wanted.name}", why, "read the server's log")
