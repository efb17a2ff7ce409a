"""RowLeases: the rows of a run that programs in other processes sample; each is leased, put, and checked.

    engine's thread                                                        threads of the server
    offer ─> ready <────────────────────────────────────── take ─ leased to a client
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

from rillflow.data_plane.instructions import Delete, Instruction, Lease
from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.data_plane.table import Table
from rillflow.errors import StreamError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.serving.http_body import Declined
from rillflow_service.requests import OfLease, PutRows, SampledRow, TakeRows

SAMPLE = "sample"
_SCHEMA = Schema(
    columns={"prompt": ColumnType(dtype="int64", ragged=True)},
    stages=(StageColumns(name=SAMPLE, reads=("prompt",), order="ready_first"),),
)
CAPACITY = 2**20
"""Largest number of outstanding rows."""
CLIENTS_REMEMBERED = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Offered:
    """A row that the run wants sampled."""

    rollout: Rollout
    """The row so far."""
    temperature: float
    """Temperature of the sampled tokens; 0 takes the likeliest."""
    most: int
    """Largest number of tokens to sample."""
    oldest: int
    """Oldest version of the weights that may sample it: the one that was loaded when the run offered it."""
    seed: int
    """Seed of its random numbers, a function of the run's seed and the row."""

    def told(self, number: int) -> dict[str, Any]:
        """Return the row in the form for clients."""
        return {
            "row": number,
            "id": list(self.rollout.row),
            "tokens": list(self.rollout.tokens),
            "max_tokens": self.most,
            "temperature": self.temperature,
            "seed": self.seed,
            "oldest_version": self.oldest,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """Rows that a client has put and that nobody has checked yet."""

    client: str
    """Name of the client."""
    lease: int
    """Lease of the rows."""
    rows: Sequence[SampledRow]
    """The rows."""
    answered: Future[None] = field(default_factory=Future)
    """Gets a result when the rows are accepted, or the error that refuses them."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the rows."""
        return [each.row for each in self.rows]


class RefusedRow(Declined):
    """A put row that breaks a rule.

    Args:
        rule: name of the rule, counted by ``status``.
    """

    def __init__(self, rule: str, what: str, why: str, fix: str, status: int = 422) -> None:
        super().__init__(status, what, why, fix)
        self.rule = rule


class RowLeases:
    """Rows that a run offers and clients sample.

    Args:
        ring: called when a waiting taker should look again; from any thread.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring, self._made = ring, time.monotonic()
        self._session = secrets.token_hex(4)
        self._table = Table(_SCHEMA, capacity=CAPACITY)
        self._rows: dict[int, Offered] = {}
        self._numbers: dict[RowId, int] = {}
        self._proposed = deque[Proposal]()
        self._changed = Condition()
        self._heard: dict[str, float] = {}
        self._ended = ""
        self.accepted = 0
        """Number of accepted rows."""
        self.refused: Counter[str] = Counter()
        """Number of refused puts, by rule."""
        self.last_refusal = ""
        """The last refusal, as its client was told."""

    @property
    def session(self) -> str:
        """Name of this engine's life; leases begin with it, and a run that starts again has another."""
        return self._session

    @property
    def is_over(self) -> bool:
        """Whether every later request of rows is refused."""
        return bool(self._ended)

    @property
    def has_rows(self) -> bool:
        """Whether a row is not back."""
        return bool(self._rows)

    def offer(self, offered: Offered) -> None:
        """Let a client sample a row.

        Raises:
            StreamError: there are CAPACITY rows.
        """
        with self._changed:
            if not self._table.room:
                raise StreamError(
                    f"the run offers row ({offered.rollout.row}) beside {len(self._rows)} others",
                    why=f"at most {CAPACITY} rows are outstanding, counted from the oldest",
                    fix="start more samplers",
                )
            number = self._table.begun
            self._table.begin(1, holder="the run", now=self._now)
            self._numbers[offered.rollout.row], self._rows[number] = number, offered
        self._ring()

    def holds(self, row: RowId) -> bool:
        """Return whether a row is offered and not back."""
        return row in self._numbers

    def withdraw(self, row: RowId) -> Rollout:
        """Take a row back, leased or not, and return it as it was offered."""
        with self._changed:
            number = self._numbers.pop(row)
            self._obey(self._table.drop(np.array([number]), "the run took the row back", self._now))
            return self._rows.pop(number).rollout

    def clear(self) -> None:
        """Take every row back."""
        for row in [*self._numbers]:
            self.withdraw(row)

    def proposals(self, wait_s: float) -> list[Proposal]:
        """Wait for at least one put; return all that came."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._proposed), wait_s)
            self._expire()
            found, self._proposed = [*self._proposed], deque()
            return found

    def offers(self, put: Proposal) -> list[Offered]:
        """Return the rows that a put answers.

        Raises:
            Declined: the lease does not have one of them any more.
        """
        with self._changed:
            self._require(put.lease, put.client, put.numbers)
            return [self._rows[number] for number in put.numbers]

    def complete(self, put: Proposal) -> None:
        """Accept a put, whose rows have been checked.

        Raises:
            Declined: the lease has ended meanwhile.
        """
        with self._changed:
            self._require(put.lease, put.client, put.numbers)
            self._obey(self._table.done(put.lease, np.array(put.numbers), now=self._now))
            for number in put.numbers:
                del self._numbers[self._rows.pop(number).rollout.row]
            self.accepted += len(put.rows)
        put.answered.set_result(None)

    def count(self, error: StreamError, client: str) -> bool:
        """Count a refusal; return whether it is the first by its rule."""
        rule = error.rule if isinstance(error, RefusedRow) else "request"
        with self._changed:
            self.refused[rule] += 1
            self.last_refusal = f"{client}: {error.what}; {error.why}"
            return self.refused[rule] == 1

    def take(self, request: TakeRows, client: str) -> dict[str, Any] | None:
        """Return a lease and its rows, as clients see them; None while no row is ready.

        Raises:
            Declined: the run has ended.
        """
        with self._changed:
            self._hear(client)
            now = self._now
            until = now + request.lease_s
            for each in self._table.take(SAMPLE, request.count, holder=client, now=now, deadline=until):
                if isinstance(each, Lease):
                    rows = [self._rows[number].told(number) for number in each.ids.tolist()]
                    return {"lease": f"{self._session}.{each.number}", "rows": rows}
            return None

    def propose(self, request: PutRows, client: str) -> Future[None]:
        """Hand put rows to the engine's thread; return the future that answers the put.

        Raises:
            Declined: the lease does not have one of them.
        """
        with self._changed:
            lease = self._named(request.lease, client, [each.row for each in request.rows])
            put = Proposal(client=client, lease=lease, rows=request.rows)
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
            self._table.renew(self._named(request.lease, client), self._now + request.lease_s)

    def give_back(self, lease: str, client: str) -> None:
        """End a lease; its rows go to other clients.

        Raises:
            Declined: the lease has ended, or is another client's.
        """
        with self._changed:
            self._obey(self._table.give_back(self._named(lease, client), self._now))

    def status(self) -> dict[str, Any]:
        """Return counts of rows, refusals and clients, as JSON."""
        with self._changed:
            self._expire()
            _, ready, leased, _ = self._table.counts()[SAMPLE]
            now = self._now
            return {
                "ready": ready,
                "leased": leased,
                "accepted": self.accepted,
                "refused": dict(self.refused),
                "last_refusal": self.last_refusal,
                "heard_s": {name: round(now - at, 1) for name, at in self._heard.items()},
            }

    def close(self, why: str) -> None:
        """Refuse every open put and every later request."""
        with self._changed:
            self._ended = why
            while self._proposed:
                self._proposed.popleft().answered.set_exception(self._over())
        self._ring()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._made

    def _over(self) -> Declined:
        return Declined(
            410, "the run takes no more rows", why=self._ended, fix="stop; connect to the next run"
        )

    def _hear(self, client: str) -> None:
        """Note a request of a client.

        Raises:
            Declined: the run has ended.
        """
        if self._ended:
            raise self._over()
        self._heard.pop(client, None)
        self._heard[client] = self._now
        for name in [*self._heard][:-CLIENTS_REMEMBERED]:
            del self._heard[name]
        self._expire()

    def _expire(self) -> None:
        if self._table.deadline <= self._now:
            self._obey(self._table.expire(self._now))

    def _named(self, lease: str, client: str, rows: Sequence[int] = ()) -> int:
        """Return the number of a client's lease, which has these rows."""
        self._hear(client)
        session, _, number = lease.partition(".")
        if session != self._session or not number.isdecimal() or len(number) > 12:
            what = f"there is no lease {lease[:40]!r}"
            raise RefusedRow("lease", what, "this run gave no such lease", "take rows again", 409)
        self._require(int(number), client, rows)
        return int(number)

    def _require(self, number: int, client: str, rows: Sequence[int]) -> None:
        """Raise Declined unless the client holds a lease that has these rows."""
        try:
            lease = self._table.lease(number, np.array(rows, np.int64))
        except StreamError as error:
            what = error.what.replace("group", "row")
            raise RefusedRow("lease", what, error.why, "take rows again", 409) from None
        if lease.holder != client:
            why = f"{lease.holder} holds it"
            fix = "put rows under the X-Rillflow-Client that took them"
            raise RefusedRow("lease", f"{client} does not hold lease {number}", why, fix, 409)

    def _obey(self, out: Sequence[Instruction]) -> None:
        """Confirm deletions, which free slots, and wake the takers."""
        for each in out:
            if isinstance(each, Delete):
                self._table.cleared(each.writer, each.ids)
        self._ring()
