"""Work reports: what a worker that polls did, and how long it waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rillflow.records.metrics import Mean, Metrics


@dataclass(frozen=True, kw_only=True)
class WorkReport:
    """What a worker did since its last report."""

    kind: str
    """Area of its metrics: ``actor``, ``policy_worker``."""
    rows: int
    """Observations that it handled: environment steps with resets, or rows of batches."""
    batches: int
    """Fragments, or batches of requests, that it finished."""
    idle_s: float
    """Seconds in which it waited for actions, requests, or room in a stream."""
    elapsed_s: float
    """Seconds since the last report."""

    @property
    def metrics(self) -> Metrics:
        """The share of idle time, and the rows of a batch."""
        return {
            f"{self.kind}/idle/mean": Mean(total=self.idle_s, count=self.elapsed_s),
            f"{self.kind}/batch/mean": Mean(total=float(self.rows), count=float(self.batches)),
        }


class WorkMeter:
    """Counts the work of one worker."""

    def __init__(self, kind: str) -> None:
        self._kind, self._began = kind, time.perf_counter()
        self.rows = self.batches = 0
        self._idle_s = 0.0

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Count the time of a wait."""
        began = time.perf_counter()
        yield
        self._idle_s += time.perf_counter() - began

    def report(self) -> WorkReport:
        """Return what was counted since the last report."""
        now = time.perf_counter()
        made = WorkReport(
            kind=self._kind,
            rows=self.rows,
            batches=self.batches,
            idle_s=self._idle_s,
            elapsed_s=now - self._began,
        )
        self.rows = self.batches = 0
        self._idle_s, self._began = 0.0, now
        return made
