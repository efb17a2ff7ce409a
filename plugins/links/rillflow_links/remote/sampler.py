"""RemoteSampler: sample rows of a run on another machine, over a slow link.

    fetch thread   manifest ─ difference or whole ─ checked ─> arrival ──┐
    take thread    rows/take ─> inbox ────────────────────────────────┐  │
    main           between two passes: load the arrival once no row runs, admit rows, engine.step ─> outbox
    put thread     outbox ─> rows/put                                    every thread: RetryPatience
    renew thread   rows/renew of every lease

Loop of the main thread (``run``)
    consumes      the inbox, an arrival
    waits for     rows, or weights that the rows need
    unblocked by  the take and the fetch thread; a signal
    produces      ended rows in the outbox
    shuts down    healthy: a signal or the run's end; ended rows are put, leases are given back. An error of
                  any thread ends the loop and is raised there

Downloads never stop sampling: they fill a copy of their own. Only while that is copied into the module no
row runs. Rows of one version never continue with another one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rillflow.errors import RillflowError, StreamError
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow_links.remote.client import LeasedRows, LeaseEnded, RowToSample, RunClient, RunEnded, WeightsGone
from rillflow_links.remote.patience import RetryPatience, Stopped
from rillflow_links.remote.remote_model import RemoteModel
from rillflow_links.remote.weight_copy import WeightCopy, WeightUpdate

POLL_S = 5.0
"""Longest wait of a request at the run: so long does leaving take at most."""


@dataclass(frozen=True, kw_only=True)
class SamplerLimits:
    """Settings of a remote sampler."""

    rows: int = 64
    """Rows that are sampled at once."""
    lease_s: float = 60.0
    """Time until rows of a sampler that died go to others."""
    patience_s: float = 3600.0
    """Longest time without an answer of the run."""


@dataclass(kw_only=True)
class SamplerCounts:
    """Counts of a remote sampler's rows, tokens, weights and pauses."""

    rows: int = 0
    """Rows that the run accepted."""
    tokens: int = 0
    """Tokens of these rows."""
    lost_rows: int = 0
    """Leased rows that went to others."""
    versions: int = 0
    """Versions of the weights that were loaded."""
    sent_bytes: int = 0
    """Bytes of the fetched weights."""
    pauses_s: list[float] = field(default_factory=list)
    """Seconds without a sampled row, while rows waited for weights, before each loaded version."""


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A leased row, from the inbox to the outbox."""

    lease: str
    session: str
    row: RowToSample

    @property
    def key(self) -> RowId:
        """Row id in the engine; its sample is the row's seed."""
        return RowId(self.row.id[0], self.row.id[1], self.row.seed)


class RemoteSampler:
    """Samples rows of a run until it ends or ``stop`` is called.

    Args:
        client: requests to the run.
        copy: the run's weights in memory.
        limits: settings.
        device: device of the module.
        tell: shows a line to the user.
    """

    def __init__(
        self,
        client: RunClient,
        copy: WeightCopy,
        limits: SamplerLimits,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self._client, self._copy, self._limits, self._device = client, copy, limits, device
        self._tell, self.counts = tell, SamplerCounts()
        self._changed = threading.Condition()
        self._about: dict[str, Any] = {}
        self._patience = RetryPatience(limits.patience_s, tell, self._check_model)
        self._leases: dict[str, set[int]] = {}
        self._inbox, self._outbox = deque[_Held](), deque[tuple[_Held, dict[str, Any]]]()
        self._running: dict[RowId, _Held] = {}
        self._arrival: WeightUpdate | None = None
        self._error: BaseException | None = None
        self._stopping = self._leaving = False
        self._loaded: WeightUpdate | None = None
        self._pause_s, self._ended = 0.0, ""
        self._model: RemoteModel | None = None
        self._engine: NativeEngine | None = None

    def stop(self) -> None:
        """Leave soon: stop sampling, put what has ended, give the rest back; from any thread or a signal."""
        self._stopping = True
        self._patience.stop()

    def run(self) -> str:
        """Sample; return why it ended.

        Raises:
            RillflowError: the token is wrong, the run trains another model, or it did not answer in time.
        """
        loops = (self._fetch, self._take, self._put, self._renew)
        threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        try:
            self._about = self._patience.during(self._client.model)
            for each in threads:
                each.start()
            while self._pass():
                pass
        except Stopped:
            pass
        finally:
            self._leave([each for each in threads if each.is_alive()])
        if self._error is not None:
            raise self._error
        return self._ended or "stopped"

    # The main thread

    def _pass(self) -> bool:
        """Load weights that arrived, admit rows, sample a token of each; return False at the end."""
        with self._changed:
            if self._stopping or self._error is not None or self._ended:
                return False
            self._drop_lost()
            arrival = self._arrival if not self._running else None
        began = time.monotonic()
        if arrival is not None:
            self._load(arrival)
        self._admit()
        if self._engine is not None and self._engine.has_work:
            self._pause_s += time.monotonic() - began if arrival is not None else 0.0
            self._finish(self._engine.step())
            return True
        with self._changed:
            is_short = bool(self._inbox)
            self._changed.wait_for(self._has_news, 0.5)
        if is_short:  # rows wait for weights
            self._pause_s += time.monotonic() - began
        return True

    def _has_news(self) -> bool:
        return (
            self._stopping
            or self._error is not None
            or bool(self._ended)
            or (self._arrival is not None and not self._running)
            or any(self._may_sample(each) for each in self._inbox)
        )

    def _load(self, arrival: WeightUpdate) -> None:
        if self._model is None:
            self._model = RemoteModel(self._about, self._copy.held, self._device)
            self._engine = self._model.engine(self._limits.rows)
        else:
            self._model.load(self._copy.held)
        assert self._engine is not None, "it was made with the model"
        self._engine.load(arrival.version, {})
        self._loaded = arrival
        self.counts.versions += 1
        self.counts.sent_bytes += arrival.sent_bytes
        self.counts.pauses_s.append(self._pause_s)
        self._tell(told(arrival, self._pause_s))
        self._pause_s = 0.0
        with self._changed:
            self._arrival = None
            self._changed.notify_all()

    def _may_sample(self, held: _Held) -> bool:
        loaded = self._loaded
        return (
            loaded is not None
            and self._arrival is None
            and held.session == loaded.session
            and held.row.oldest_version <= loaded.version
        )

    def _admit(self) -> None:
        """Give the rows to the engine that the loaded weights may sample."""
        with self._changed:
            fit = [each for each in self._inbox if self._may_sample(each)]
            self._inbox = deque(each for each in self._inbox if not self._may_sample(each))
        for each in fit:
            assert self._engine is not None, "weights are loaded"
            if each.key in self._running:  # leased again: the earlier lease has ended
                self._engine.abort(self._running.pop(each.key).key)
            row = each.row
            sampling = SamplingConfig(temperature=row.temperature, max_tokens=row.max_tokens)
            self._engine.add(Rollout.start(each.key, row.tokens), sampling)
            self._running[each.key] = each

    def _finish(self, rollouts: Sequence[Rollout]) -> None:
        """Put ended rows into the outbox."""
        ended = []
        for rollout in rollouts:
            held = self._running.pop(rollout.row)
            begin = len(held.row.tokens)
            ended.append(
                (
                    held,
                    {
                        "row": held.row.row,
                        "version": rollout.versions[-1],
                        "tokens": list(rollout.tokens[begin:]),
                        "logprobs": list(rollout.logprobs[begin:]),
                        "finish": "stop" if rollout.finish is Finish.STOP else "length",
                    },
                )
            )
        if ended:
            with self._changed:
                self._outbox += ended
                self._changed.notify_all()

    def _drop_lost(self) -> None:
        """Drop the rows whose lease has ended."""
        self._inbox = deque(each for each in self._inbox if each.lease in self._leases)
        for key, held in [*self._running.items()]:
            if held.lease not in self._leases and self._engine is not None:
                self._engine.abort(key)
                del self._running[key]

    def _leave(self, threads: Sequence[threading.Thread]) -> None:
        """Put what has ended, then give every lease back."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        if is_over := bool(self._ended) or self._error is not None:
            self._patience.stop()
            self._client.close()
        until = time.monotonic() + 3 * POLL_S
        for each in threads:
            each.join(max(0.0, until - time.monotonic()))
        for lease in [] if is_over else [*self._leases]:
            try:
                self._client.give_back(lease)
            except StreamError:
                self._tell(f"the lease {lease} could not be given back; it ends by itself")
        self._client.close()

    # The other threads

    def _guarded(self, loop: Callable[[], None]) -> None:
        """Run a loop; its error ends the sampler."""
        try:
            loop()
        except Stopped:
            pass
        except RunEnded as error:
            self._end(f"the run has ended ({error.why})")
        except BaseException as error:  # noqa: BLE001  raised again by the main thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _end(self, why: str) -> None:
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._leaving or self._stopping

    def _fetch(self) -> None:
        while not self._is_over():
            session = self._about.get("session", "")
            newer_than = self._copy.version if self._copy.session == session else -1
            manifest = self._patience.during(partial(self._client.manifest, newer_than, POLL_S))
            if manifest is None:
                continue
            try:
                arrival = self._patience.during(partial(self._copy.update, manifest, self._client.file))
            except WeightsGone:
                continue  # newer ones are there
            with self._changed:
                self._arrival = arrival
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._arrival is None or self._is_over())

    def _take(self) -> None:
        while not self._is_over():
            with self._changed:
                self._changed.wait_for(lambda: self._room() > 0 or self._is_over())
                count = self._room()
            if self._is_over():
                return
            how = {"lease_s": self._limits.lease_s, "wait_s": POLL_S}
            taken = self._patience.during(partial(self._client.take, count, **how))
            if taken is not None:
                self._accept(taken)

    def _room(self) -> int:
        return self._limits.rows - len(self._inbox) - len(self._running)

    def _accept(self, taken: LeasedRows) -> None:
        if taken.session != self._about.get("session", taken.session):
            self._patience.during(self._check_model)
        with self._changed:
            self._leases[taken.lease] = {each.row for each in taken.rows}
            if not self._is_over():
                self._inbox += [
                    _Held(lease=taken.lease, session=taken.session, row=each) for each in taken.rows
                ]
            self._changed.notify_all()

    def _put(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._outbox) or self._leaving)
                if not self._outbox:
                    return
                lease = self._outbox[0][0].lease
                rows = [row for held, row in self._outbox if held.lease == lease]
                self._outbox = deque(each for each in self._outbox if each[0].lease != lease)
            try:
                self._patience.during(partial(self._client.put, lease, rows))
            except LeaseEnded as error:
                self._lose(lease, error)
                continue
            with self._changed:
                self.counts.rows += len(rows)
                self.counts.tokens += sum(len(each["tokens"]) for each in rows)
                left = self._leases.get(lease, set())
                left -= {each["row"] for each in rows}
                if not left:
                    self._leases.pop(lease, None)
                self._changed.notify_all()

    def _renew(self) -> None:
        while not self._is_over():
            with self._changed:
                self._changed.wait_for(self._is_over, self._limits.lease_s / 3)
                leases = [*self._leases]
            for lease in leases:
                try:
                    self._patience.during(partial(self._client.renew, lease, self._limits.lease_s))
                except LeaseEnded as error:
                    self._lose(lease, error)

    def _lose(self, lease: str, error: RillflowError) -> None:
        with self._changed:
            lost = self._leases.pop(lease, None)
            self.counts.lost_rows += len(lost or ())
            self._changed.notify_all()
        if lost:
            self._tell(f"lost {len(lost)} rows: {error.what} ({error.why})")

    def _check_model(self) -> None:
        """Read the model again after the run was away.

        Raises:
            StreamError: it is another one.
        """
        if not self._about:
            return
        about = self._client.model()
        odd = [
            key
            for key in ("config", "vocabulary", "stop_tokens", "context")
            if about[key] != self._about[key]
        ]
        if odd:
            raise StreamError(
                f"the run trains another model now: its {odd[0]} differs",
                why="the weights and rows of this sampler belong to the model that it joined with",
                fix="run rillflow join again",
            )
        self._about = about


def told(update: WeightUpdate, pause_s: float) -> str:
    """Return the line about a loaded version."""
    kind = "whole" if update.base < 0 else f"difference from {update.base}"
    ratio = update.whole_bytes / max(1, update.sent_bytes)
    changed = "" if update.changed != update.changed else f", {update.changed:.2%} of the values changed"
    return (
        f"version {update.version}: {kind}, {update.sent_bytes:,} bytes ({ratio:.1f} times fewer){changed}, "
        f"fetched in {update.fetch_s:.2f} s, pause {pause_s:.2f} s"
    )
