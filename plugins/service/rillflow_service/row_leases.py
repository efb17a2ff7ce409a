"""RowLeases: the rows of a run that programs in other processes sample; each is leased, put, and checked.

    engine's thread                                                        threads of the server
    offer ─> waiting ─ slots of the table are free ─> ready <─ take ─ leased to a client
    withdraw ─> dropped: a later put is refused             ^            │ renew, deadline, give back
    proposals <─────────────── put: the lease has its rows ─┴────────────┘
        └─ checked there ─> complete, or refused: the rows stay leased

consumes      rows that the run offers; requests of clients
waits for     ``proposals``: a put, at most the given time; takers wait in the server, woken by ``ring``
produces      each offered row once, or withdrawn; each put answered once
shuts down    ``close``: every open put and every later request is refused with the reason

Any thread may call any method: a lock makes the calls one after the other. The table never sees a clock of
its own, so leases end when the next call of any method looks.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

import numpy as np

from rillflow.data_plane.instructions import Begun, Delete, Instruction, Lease
from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.data_plane.table import Table
from rillflow.errors import StreamError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.serving.http_body import Declined
from rillflow_service.requests import OfLease, PutRows, SampledRow, TakeRows

SAMPLE = "sample"
_SCHEMA = Schema(
    columns={"prompt": ColumnType(dtype="int64", ragged=True)},
    stages=(StageColumns(name=SAMPLE, reads=("prompt",), order="ready_first"),),
)
CAPACITY = 2**16
"""Rows between the oldest that is not back and the newest that clients may take."""
CLIENTS_REMEMBERED = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Offered:
    """A row that the run wants sampled."""

    number: int
    """Number of the row in this run."""
    rollout: Rollout
    """The row so far."""
    sampling: SamplingConfig
    """Sampling settings."""
    most: int
    """Largest number of tokens to sample."""
    oldest: int
    """Oldest version of the weights that may sample it: the one that was loaded when the run offered it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Granted:
    """Rows that a client has leased."""

    lease: str
    """Lease, as clients name it."""
    rows: Sequence[Offered]
    """The rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """Rows that a client has put and that nobody has checked yet."""

    client: str
    """Name of the client."""
    number: int
    """Lease of the rows."""
    rows: Sequence[SampledRow]
    """The rows."""
    answered: Future[None] = field(default_factory=Future)
    """Gets a result when the rows are accepted, or the error that refuses them."""


class RefusedRow(Declined):
    """A put row that breaks a rule.

    Args:
        rule: name of the rule, counted by ``status``.
    """

    def __init__(self, rule: str, what: str, why: str, fix: str = "") -> None:
        super().__init__(422, what, why, fix)
        self.rule = rule


class RowLeases:
    """Rows that a run offers and clients sample.

    Args:
        ring: called when a waiting taker should look again; from any thread.
        clock: returns seconds; only differences matter.
    """

    def __init__(
        self, ring: Callable[[], None] = lambda: None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ring, self._clock, self._made = ring, clock, clock()
        self._session = secrets.token_hex(4)
        self._table = Table(_SCHEMA, capacity=CAPACITY)
        self._waiting = deque[tuple[Rollout, SamplingConfig, int, int]]()
        self._rows: dict[int, Offered] = {}
        self._numbers: dict[RowId, int] = {}
        self._proposed = deque[Proposal]()
        self._changed = Condition()
        self._clients: dict[str, float] = {}
        self._ended = ""
        self.accepted = 0
        """Number of accepted rows."""
        self.refused: Counter[str] = Counter()
        """Number of refused puts, by rule."""
        self.last_refusal = ""
        """The last refusal, as its client was told."""

    @property
    def has_rows(self) -> bool:
        """Whether a row is not back."""
        return bool(self._rows or self._waiting)

    def offer(self, rollout: Rollout, sampling: SamplingConfig, *, most: int, oldest: int) -> None:
        """Let a client sample a row; see Offered."""
        with self._changed:
            self._waiting.append((rollout, sampling, most, oldest))
            self._fill()

    def holds(self, row: RowId) -> bool:
        """Return whether a row is offered and not back."""
        with self._changed:
            return row in self._numbers or any(each[0].row == row for each in self._waiting)

    def withdraw(self, row: RowId) -> Rollout:
        """Take a row back, leased or not, and return it as it was offered."""
        with self._changed:
            for each in self._waiting:
                if each[0].row == row:
                    self._waiting.remove(each)
                    return each[0]
            number = self._numbers.pop(row)
            out = self._table.drop(np.array([number]), "the run took the row back", self._now)
            self._obey(out)
            return self._rows.pop(number).rollout

    def clear(self) -> None:
        """Take every row back."""
        with self._changed:
            self._waiting.clear()
            for row in [*self._numbers]:
                self.withdraw(row)

    def proposals(self, wait_s: float) -> list[Proposal]:
        """Return the puts that came; wait for one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._proposed), wait_s)
            self._expire()
            found, self._proposed = [*self._proposed], deque()
            return found

    def pairs(self, put: Proposal) -> list[tuple[SampledRow, Offered]]:
        """Return put rows with the offered ones.

        Raises:
            Declined: the lease does not have one of them any more.
        """
        with self._changed:
            self._lease(put.number, put.client, [each.row for each in put.rows])
            return [(each, self._rows[each.row]) for each in put.rows]

    def complete(self, put: Proposal) -> None:
        """Accept put rows that ``pairs`` has returned in this turn of the engine's thread.

        Raises:
            Declined: the lease has ended meanwhile.
        """
        with self._changed:
            numbers = [each.row for each in put.rows]
            self._lease(put.number, put.client, numbers)
            self._obey(self._table.done(put.number, np.array(numbers), now=self._now))
            for number in numbers:
                del self._numbers[self._rows.pop(number).rollout.row]
            self.accepted += len(numbers)
        put.answered.set_result(None)

    def count(self, error: StreamError, client: str) -> bool:
        """Count a refusal; return whether it is the first by its rule."""
        rule = error.rule if isinstance(error, RefusedRow) else "request"
        rule = "lease" if isinstance(error, Declined) and error.status == 409 else rule
        with self._changed:
            self.refused[rule] += 1
            self.last_refusal = f"{client}: {error.what}; {error.why}"
            return self.refused[rule] == 1

    def take(self, request: TakeRows, client: str) -> Granted | None:
        """Return a lease of rows; None while no row is ready.

        Raises:
            Declined: the run has ended.
        """
        with self._changed:
            self._hear(client)
            now = self._now
            out = self._table.take(
                SAMPLE, request.count, holder=client, now=now, deadline=now + request.lease_s
            )
            for lease in (each for each in out if isinstance(each, Lease)):
                rows = [self._rows[number] for number in lease.ids.tolist()]
                return Granted(lease=f"{self._session}.{lease.number}", rows=rows)
            return None

    def propose(self, request: PutRows, client: str) -> Future[None]:
        """Hand put rows to the engine's thread; return what answers the put.

        Raises:
            Declined: the lease does not have one of them.
        """
        with self._changed:
            self._hear(client)
            put = Proposal(client=client, number=self._named(request.lease), rows=request.rows)
            self._lease(put.number, client, [each.row for each in put.rows])
            put.answered.set_running_or_notify_cancel()  # a client that hangs up cancels nothing
            self._proposed.append(put)
            self._changed.notify_all()
            return put.answered

    def renew(self, request: OfLease, client: str) -> None:
        """Move the deadline of a lease.

        Raises:
            Declined: the lease has ended, or is another client's.
        """
        with self._changed:
            self._hear(client)
            number = self._named(request.lease)
            self._lease(number, client, [])
            self._table.renew(number, self._now + request.lease_s)

    def give_back(self, lease: str, client: str) -> None:
        """End a lease; its rows go to other clients.

        Raises:
            Declined: the lease has ended, or is another client's.
        """
        with self._changed:
            self._hear(client)
            number = self._named(lease)
            self._lease(number, client, [])
            self._obey(self._table.give_back(number, self._now))

    def status(self) -> dict[str, Any]:
        """Return counts of rows, refusals and clients, as JSON."""
        with self._changed:
            self._expire()
            _, ready, taken, _ = self._table.counts()[SAMPLE]
            now = self._now
            return {
                "ready": ready + len(self._waiting),
                "leased": taken,
                "accepted": self.accepted,
                "refused": dict(self.refused),
                "last_refusal": self.last_refusal,
                "heard_s": {name: round(now - at, 1) for name, at in self._clients.items()},
            }

    def close(self, why: str) -> None:
        """Refuse every open put and every later request."""
        with self._changed:
            self._ended = why
            for put in self._proposed:
                put.answered.set_exception(self._over())
            self._proposed.clear()
        self._ring()

    @property
    def _now(self) -> float:
        return self._clock() - self._made

    def _over(self) -> Declined:
        return Declined(
            410, "the run takes no more rows", why=self._ended, fix="stop; connect to the next run"
        )

    def _hear(self, client: str) -> None:
        if self._ended:
            raise self._over()
        self._clients.pop(client, None)
        self._clients[client] = self._now
        for name in [*self._clients][:-CLIENTS_REMEMBERED]:
            del self._clients[name]
        self._expire()

    def _expire(self) -> None:
        if self._table.deadline <= self._now:
            self._obey(self._table.expire(self._now))

    def _named(self, lease: str) -> int:
        session, _, number = lease.partition(".")
        if session != self._session or not number.isdecimal() or len(number) > 12:
            raise Declined(
                409,
                f"there is no lease {lease[:40]!r}",
                why="this run gave no such lease",
                fix="take rows again",
            )
        return int(number)

    def _lease(self, number: int, client: str, rows: Sequence[int]) -> None:
        """Raise Declined unless the client holds a lease that has these rows."""
        try:
            lease = self._table.lease(number, np.array(rows, np.int64))
        except StreamError as error:
            raise Declined(409, error.what.replace("group", "row"), error.why, "take rows again") from None
        if lease.holder != client:
            raise Declined(
                409,
                f"{client} does not hold lease {number}",
                why=f"{lease.holder} holds it",
                fix="put rows under the X-Rillflow-Client that took them",
            )

    def _fill(self) -> None:
        """Give waiting rows to the table while it has room."""
        while self._waiting and self._table.room:
            rollout, sampling, most, oldest = self._waiting.popleft()
            out = self._table.begin(1, holder="the run", now=self._now)
            (number,) = next(each.ids.tolist() for each in out if isinstance(each, Begun))
            self._numbers[rollout.row] = number
            self._rows[number] = Offered(
                number=number, rollout=rollout, sampling=sampling, most=most, oldest=oldest
            )
        self._ring()

    def _obey(self, out: Sequence[Instruction]) -> None:
        """Confirm deletions, which free slots, and wake the takers."""
        for each in out:
            if isinstance(each, Delete):
                self._table.cleared(each.writer, each.ids)
        self._fill()
