"""Sessions: what the event loop knows about clients, models, the order of requests and their results.

    request (model, seq) ─┬─ seq seen, same body ────> the same future: a retry is not executed again
                          ├─ seq seen, other body ───> a future that fails
                          ├─ seq is the next ────────> dispatched, and those that waited for it
                          └─ later seq ──────────────> waits for the earlier ones, at most ``EARLIER_S``

    no heartbeat for ``HEARTBEAT_S`` ─> the session ends: its models are released; checkpoints stay

Every method runs in the event loop. Time comes from a clock that tests replace.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from rillflow.errors import DataError, RillflowError, StreamError
from rillflow.serving.http_body import Declined
from rillflow_training_service.checkpoints import now
from rillflow_training_service.engine_thread import ServerError
from rillflow_training_service.shared_base import Shape

HEARTBEAT_S = 120.0
"""Seconds without a request or heartbeat after which a session ends; clients send one every 10 s."""
EARLIER_S = 60.0
"""Longest wait of a request for one with a smaller sequence number that has not arrived."""
KEPT_S = 900.0
"""Seconds that a result stays after it was delivered, in case that the client asks again."""
KEPT_BYTES = 2**27
"""Delivered results that stay; the oldest go first."""
MOST_SESSIONS = 1024
"""Sessions at once."""
MOST_PARTS = 4096
"""Models and sampling sessions of one session."""
MOST_OPEN = 4096
"""Requests of a session whose results were not fetched."""
OPEN_BYTES = 2**28
"""Results of a session that wait to be fetched."""
MOST_LISTED = 1000
"""Most entries of one page of a list."""
MOST_FAILED = 1024
"""Results of requests that belong to no session; the oldest go first."""


@dataclass(kw_only=True, eq=False)
class Future:
    """The result of a request, once it is there."""

    name: str
    """The request's id."""
    digest: bytes
    """Digest of the request's body."""
    body: bytes = b""
    """The result."""
    is_binary: bool = False
    """Whether the result is a protobuf message; otherwise it is JSON."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the result is there."""
    delivered: float | None = None
    """When the result was first delivered."""
    cancel: Callable[[], None] = lambda: None
    """Gives up the request."""
    num_samples: int = 0
    """Samples of a sampling request; each has an id."""

    def finish(self, found: Any) -> None:
        """Store a result: bytes, JSON or an error."""
        if self.done.is_set():
            return
        if isinstance(found, bytes):
            self.body, self.is_binary = found, True
        elif isinstance(found, RillflowError):
            category = "server" if isinstance(found, ServerError) else "user"
            self.body = json.dumps({"error": sentence(found), "category": category}).encode()
        else:
            self.body = json.dumps(found).encode()
        self.done.set()


def sentence(error: RillflowError) -> str:
    """Return an error on one line."""
    parts = [f"{name}: {text}" for name, text in (("why", error.why), ("fix", error.fix)) if text]
    return "; ".join([error.what, *parts])


@dataclass(kw_only=True, eq=False)
class Model:
    """A trained model."""

    name: str
    """Id of the model."""
    session: ClientSession
    """Session of the client that made the model."""
    base_model: str
    """Name of the base model in the client's spelling."""
    shape: Shape
    """Shape of its adapter."""
    seed: int
    """Seed of its adapter."""
    metadata: dict[str, Any]
    """The client's facts."""
    next_seq: int = 1
    """Sequence number of the request that is dispatched next."""
    waiting: dict[int, tuple[Future, Callable[[], None], float]] = field(default_factory=dict)
    """Requests that wait for an earlier one: future, dispatch, and when they came."""
    skipped: set[int] = field(default_factory=set)
    """Sequence numbers of requests that failed while they waited."""
    last_request: str = field(default_factory=now)
    """Time of the last request."""
    saved: dict[str, str] = field(default_factory=dict)
    """Paths of its newest checkpoints, by kind."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingSession:
    """Weights that a client samples from."""

    name: str
    """Id of the sampling session."""
    session: ClientSession
    """Session of the client that opened it."""
    base_model: str
    """Name of the base model in the client's spelling."""
    model: str | None
    """Model whose kept weights it samples; None for a checkpoint or the base."""
    key: str
    """Key of the model's kept weights."""
    path: str | None
    """Path of a checkpoint; None for kept weights or the base."""
    random_key: str
    """Determines the random numbers of requests without a seed."""


@dataclass(kw_only=True, eq=False)
class ClientSession:
    """A client."""

    name: str
    """Id of the session."""
    metadata: dict[str, Any]
    """The client's facts."""
    heard: float
    """When the client was last heard."""
    models: dict[str, Model] = field(default_factory=dict)
    """Trained models of the client, by id."""
    samplers: dict[str, SamplingSession] = field(default_factory=dict)
    """Sampling sessions of the client, by id."""
    futures: dict[str, Future] = field(default_factory=dict)
    """Requests of the client, by id."""
    ended: str = ""
    """Why the session ended; empty while it lives."""
    clones: int = 0
    """Copies of its sampling clients that joined."""


class Sessions:
    """All clients.

    Args:
        release: called with the id of a model that is no longer needed.
        clock: returns seconds.
    """

    def __init__(self, release: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._release, self._clock = release, clock
        self.all: dict[str, ClientSession] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._futures: dict[str, tuple[ClientSession, Future]] = {}
        self._kept, self._kept_bytes = deque[Future](), 0

    def open(self, name: str, metadata: dict[str, Any]) -> ClientSession:
        """Begin a session.

        Raises:
            Declined: there are too many.
        """
        if name and len(self.all) >= MOST_SESSIONS:
            why = f"the limit is {MOST_SESSIONS:,}; one without a heartbeat for {HEARTBEAT_S:g} s ends"
            raise Declined(429, f"there are {len(self.all):,} sessions", why, "finish sessions, or wait")
        found = self.all[name] = ClientSession(name=name, metadata=metadata, heard=self._clock())
        return found

    def hear(self, name: str) -> ClientSession:
        """Return a session that lives, and note that its client was heard.

        Raises:
            Declined: there is no such session, or it has ended.
        """
        session = self.all.get(name)
        if session is None:
            raise Declined(404, f"there is no session {name[:80]!r}", "", "make a new ServiceClient")
        if session.ended:
            raise Declined(410, f"the session {name} has ended", session.ended, "make a new ServiceClient")
        session.heard = self._clock()
        return session

    def add_model(self, model: Model) -> None:
        """Add a model to its session."""
        _require_few(model.session.models, "models")
        self._models[model.name] = model.session.models[model.name] = model

    def model(self, name: str) -> Model:
        """Return a model whose session lives.

        Raises:
            DataError: there is no such model, or its session has ended.
        """
        found = self._models.get(name)
        if found is None or found.session.ended:
            known = "" if found is None else found.session.ended
            raise DataError(
                f"there is no model {name[:120]!r}",
                why=known or "no client created it here, or it was unloaded",
                fix="create a training client; checkpoints are loaded with create_training_client_from_state",
            )
        found.session.heard, found.last_request = self._clock(), now()
        return found

    def unload(self, name: str) -> None:
        """Forget a model."""
        model = self.model(name)
        del self._models[name], model.session.models[name]
        self._give_up(model, "the model was unloaded")
        self._release(name)

    def add_sampler(self, sampler: SamplingSession) -> None:
        """Add a sampling session."""
        _require_few(sampler.session.samplers, "sampling sessions")
        self._samplers[sampler.name] = sampler.session.samplers[sampler.name] = sampler

    def sampler(self, name: str) -> SamplingSession:
        """Return a sampling session.

        Raises:
            DataError: there is none, or its session has ended.
        """
        found = self._samplers.get(name)
        if found is None or found.session.ended:
            raise DataError(
                f"there is no sampling session {name[:120]!r}",
                why="" if found is None else found.session.ended,
                fix="create a sampling client",
            )
        found.session.heard = self._clock()
        return found

    def future(self, name: str) -> Future:
        """Return a request's future.

        Raises:
            Declined: there is none.
        """
        if name not in self._futures:
            why = f"its result was delivered more than {KEPT_S:g} s ago, or the server was restarted"
            raise Declined(404, f"there is no request {name[:120]!r}", why, "send the request again")
        session, found = self._futures[name]
        session.heard = self._clock()
        return found

    def admit(
        self, session: ClientSession, name: str, body: bytes, dispatch: Callable[[Future], None]
    ) -> Future:
        """Return the future of a request; dispatch it unless it is a retry.

        Args:
            session: the client.
            name: the request's id, the same for a retry.
            body: the request.
            dispatch: begins it.
        """
        digest = sha256(body).digest()
        before = session.futures.get(name)
        if before is not None and before.digest == digest:
            return before
        if before is not None:
            return self._conflict(session, name, digest)
        _require_fetched(session)
        found = self._new(session, name, digest)
        dispatch(found)
        return found

    def admit_in_order(
        self, model: Model, seq: int, body: bytes, dispatch: Callable[[Future], None]
    ) -> Future:
        """Return the future of a model's request; dispatch it after those with smaller numbers."""

        def wait(future: Future) -> None:
            if seq < model.next_seq or seq in model.skipped:
                future.finish(_late(model, seq))
                return
            model.waiting[seq] = future, lambda: dispatch(future), self._clock()
            self._advance(model)

        return self.admit(model.session, f"{model.name}:{seq}", body, wait)

    def failed(self, session: ClientSession | None, error: RillflowError) -> Future:
        """Return a future that has failed, so that the client shows the error."""
        session = session or self.all.get("") or self.open("", {})
        for old in [*session.futures.values()][: -MOST_FAILED if not session.name else 0]:
            self._drop(old)
        session.heard = self._clock()
        found = self._new(session, f"failed:{len(self._futures)}:{time.monotonic_ns()}", b"")
        found.finish(error)
        return found

    def end(self, session: ClientSession, why: str) -> None:
        """End a session: release its models, and fail its open requests."""
        if session.ended:
            return
        session.ended = why
        for model in session.models.values():
            self._give_up(model, why)
            self._release(model.name)
        for future in session.futures.values():
            future.cancel()
            future.finish(DataError("the request was dropped", why=why, fix="make a new ServiceClient"))
            self.delivered(future)

    def sweep(self) -> None:
        """End silent sessions, fail requests that wait in vain, and drop delivered results."""
        time_s = self._clock()
        for session in [*self.all.values()]:
            if session.name and not session.ended and time_s - session.heard > HEARTBEAT_S:
                self.end(session, f"no heartbeat for {HEARTBEAT_S:g} s; its checkpoints remain")
            for model in session.models.values():
                self._fail_gaps(model, time_s)
        while self._kept and time_s - (self._kept[0].delivered or 0.0) > KEPT_S:
            self._drop_oldest()
        for session in [*self.all.values()]:
            if session.ended and not session.futures:
                for name in session.models:
                    self._models.pop(name, None)
                for name in session.samplers:
                    self._samplers.pop(name, None)
                del self.all[session.name]

    def delivered(self, future: Future) -> None:
        """Note that a result was delivered."""
        if future.delivered is not None:
            return
        future.delivered = self._clock()
        self._kept.append(future)
        self._kept_bytes += len(future.body)
        while self._kept_bytes > KEPT_BYTES:
            self._drop_oldest()

    def _drop(self, future: Future) -> None:
        """Forget a result."""
        if (found := self._futures.pop(future.name, None)) is not None:
            del found[0].futures[future.name]

    def _drop_oldest(self) -> None:
        oldest = self._kept.popleft()
        self._kept_bytes -= len(oldest.body)
        self._drop(oldest)

    def _new(self, session: ClientSession, name: str, digest: bytes) -> Future:
        found = session.futures[name] = Future(name=name, digest=digest)
        self._futures[name] = session, found
        return found

    def _conflict(self, session: ClientSession, name: str, digest: bytes) -> Future:
        again = f"{name}:again-{digest.hex()[:16]}"
        if again in session.futures:
            return session.futures[again]
        found = self._new(session, again, digest)
        found.finish(
            DataError(
                f"there are two requests {name}, with different contents",
                why="a sequence number stands for one request; only the first one was executed",
                fix="use one training client for a model, or create another one",
            )
        )
        return found

    def _advance(self, model: Model) -> None:
        while True:
            if model.next_seq in model.waiting:
                model.waiting.pop(model.next_seq)[1]()
            elif model.next_seq not in model.skipped:
                return
            model.skipped.discard(model.next_seq)
            model.next_seq += 1

    def _fail_gaps(self, model: Model, time_s: float) -> None:
        for seq, (future, _, since) in [*model.waiting.items()]:
            if time_s - since > EARLIER_S:
                del model.waiting[seq]
                model.skipped.add(seq)
                future.finish(
                    StreamError(
                        f"request {seq} of the model waited {EARLIER_S:g} s for request {model.next_seq}",
                        why="requests run in the order of their numbers, and that one has not arrived",
                        fix="create the training client again from its last checkpoint",
                    )
                )

    def _give_up(self, model: Model, why: str) -> None:
        for future, _, _ in model.waiting.values():
            future.finish(DataError("the request was dropped", why=why, fix="create the model again"))
        model.waiting.clear()


def _require_few(held: Mapping[str, Any], what: str) -> None:
    if len(held) >= MOST_PARTS:
        raise Declined(
            429, f"the session has {len(held):,} {what}", f"the limit is {MOST_PARTS:,}", "unload some"
        )


def _require_fetched(session: ClientSession) -> None:
    """Raise Declined if too many results of a session wait to be fetched."""
    waiting = [each for each in session.futures.values() if each.delivered is None]
    num_bytes = sum(len(each.body) for each in waiting)
    if len(waiting) >= MOST_OPEN or num_bytes >= OPEN_BYTES:
        what = f"{len(waiting):,} requests of the session are open, with {num_bytes:,} bytes of results"
        why = f"the limits are {MOST_OPEN:,} and {OPEN_BYTES:,}"
        raise Declined(429, what, why, "fetch results before you send more requests")


def _late(model: Model, seq: int) -> DataError:
    return DataError(
        f"request {seq} came after request {model.next_seq - 1} of the model",
        why="requests run in the order of their numbers, and this number is over",
        fix="use one training client for a model, or create another one",
    )


def listed(found: list[Any], query: Mapping[str, str]) -> tuple[list[Any], dict[str, int]]:
    """Return a page of a list, and its cursor.

    Raises:
        DataError: limit or offset is not a number.
    """
    try:
        limit, offset = int(query.get("limit", "20")[:12]), int(query.get("offset", "0")[:12])
    except ValueError:
        raise DataError("limit and offset are whole numbers") from None
    limit = min(limit, MOST_LISTED)
    page = found[max(offset, 0) : max(offset, 0) + max(limit, 0)]
    return page, {"offset": offset, "limit": limit, "total_count": len(found)}
