"""Polling: what workers of streams have in common, and their reports of work and idle time.

Loop of ``poll``
    consumes      what ``turn`` of the worker finds in its streams
    waits for     something to do, at most PAUSE_S
    unblocked by  another worker, or the trainer's stop
    shuts down    healthy: ``poll`` returns. Killed: its process is replaced, and the others go on
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from rillflow.records.metrics import Mean, Metrics
from rillflow_classic.streams.streams import Streams

PAUSE_S = 0.05
"""Longest wait of ``poll`` before it looks at its streams again."""


@dataclass(kw_only=True)
class WorkReport:
    """What a worker did since its last report."""

    kind: str
    """Area of its metrics: ``actor``, ``policy_worker``."""
    rows: int = 0
    """Observations that it handled: environment steps with resets, or rows of batches."""
    batches: int = 0
    """Fragments, or batches of requests, that it finished."""
    idle_s: float = 0.0
    """Seconds in which it waited for actions, requests, or room in a stream."""
    elapsed_s: float = 0.0
    """Seconds since the last report."""
    began_s: float = field(default_factory=time.perf_counter)
    """Its start on this process's ``perf_counter``."""

    @property
    def metrics(self) -> Metrics:
        """The share of idle time, and the rows of a batch."""
        return {
            f"{self.kind}/idle/mean": Mean(total=self.idle_s, count=self.elapsed_s),
            f"{self.kind}/batch/mean": Mean(total=float(self.rows), count=float(self.batches)),
        }


class PollingWorker(ABC):
    """A worker that the trainer lets poll its streams, again and again.

    Args:
        kind: area of its metrics.
        streams: its end of the streams; None for a worker that is only called.
    """

    def __init__(self, kind: str, streams: Streams | None) -> None:
        self.streams, self.report = streams, WorkReport(kind=kind)

    @abstractmethod
    def turn(self) -> bool:
        """Do what there is to do; return whether there was anything."""

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to do, at most this long."""
        assert self.streams is not None, "the worker has no streams"
        began_s = time.perf_counter()
        self.streams.wait(seconds)
        self.report.idle_s += time.perf_counter() - began_s

    def poll(self, budget_s: float) -> WorkReport:
        """Take turns for a while, at least one, or until the trainer stops all workers."""
        assert self.streams is not None, "the worker has no streams"
        deadline = time.monotonic() + budget_s
        while not self.streams.is_stopped:
            is_busy = self.turn()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not is_busy:
                self.wait(min(left, PAUSE_S))
        found, self.report = self.report, WorkReport(kind=self.report.kind)
        found.elapsed_s = self.report.began_s - found.began_s
        return found
