"""Trainer worker: assembles the next batch while the present one is trained.

    sample stream ─> FragmentQueue ─ join: the only copy ─> next batch ─> learner
    └────────────────────────── thread ─────────────────┘

Loop of the thread
    consumes      fragments of the sample stream
    waits for     a fragment, and for room for the next batch: one batch is ahead
    unblocked by  an actor; the trainer that takes the batch
    produces      batches
    shuts down    healthy: ``close``. Its error is raised by ``next``
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rillflow.errors import ConfigError
from rillflow.records.metrics import Metrics, Sum
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.policy import Learner
from rillflow_classic.streams.stream import FragmentSource, Received
from rillflow_classic.workers.buffer_worker import FragmentQueue
from rillflow_classic.workers.recording import arrays_of, fragment_of

PAUSE_S = 0.05
"""Longest wait of the thread before it looks whether it is to end."""


class TrainerWorker:
    """The learners' end of the sample stream.

    Args:
        learners: learner of every policy, by name.
        source: sample stream.
        fragments: queue of fragments that wait.
        batch: fragments of a batch.
        prefetch: whether a thread assembles the next batch meanwhile.
        room: fragments that the stream holds; those of a larger batch are copied as they come.
    """

    def __init__(
        self,
        learners: Mapping[str, Learner],
        source: FragmentSource,
        fragments: FragmentQueue,
        *,
        batch: int = 1,
        prefetch: bool = True,
        room: int = 1,
    ) -> None:
        if fragments.table.capacity < batch:
            raise ConfigError(
                f"a batch of {batch} fragments from a queue of {fragments.table.capacity}",
                why="the queue holds all fragments of a batch",
                fix="enlarge the queue, or take smaller batches",
            )
        self._owns = fragments.reuses > 1 or batch > room
        self.learners, self.fragments, self._batch = learners, fragments, batch
        self._source = source
        self._lock = threading.Lock()
        self._ready: queue.Queue[Rollout] = queue.Queue(1)
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._prefetch, name="trainer-batches", daemon=True)
        self._has_thread = prefetch
        if prefetch:
            self._thread.start()

    def next(self, wait_s: float) -> Rollout | None:
        """Return the next batch: fragments side by side; None if there are too few in time."""
        if not self._has_thread:
            return self._assembled(wait_s)
        try:
            return self._ready.get(timeout=wait_s) if wait_s > 0 else self._ready.get_nowait()
        except queue.Empty:
            if self._error is not None:
                raise self._error from None
            return None

    def metrics(self) -> Metrics:
        """Return what the queue dropped since the last call."""
        with self._lock:
            dropped = sum(self.fragments.table.dropped.values())
            self.fragments.table.dropped.clear()
        return {"actor/dropped_fragments/sum": Sum(value=float(dropped))}

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if self._has_thread:
            self._thread.join()

    def _prefetch(self) -> None:
        try:
            while not self._is_closed:
                batch = self._assembled(PAUSE_S)
                while batch is not None and not self._is_closed:
                    with contextlib.suppress(queue.Full):
                        self._ready.put(batch, timeout=PAUSE_S)
                        batch = None
        except BaseException as error:  # noqa: BLE001  ``next`` raises it
            self._error = error

    def _assembled(self, wait_s: float) -> Rollout | None:
        """Take what has arrived, and join a batch."""
        with self._lock:
            batch = self._joined()
        if batch is not None:
            return batch
        received = self._source.take(wait_s)
        with self._lock:
            for each in received:
                if self._owns:
                    self.fragments.put(copied(each))
                    each.release()
                else:
                    self.fragments.put(each)
            return self._joined()

    def _joined(self) -> Rollout | None:
        version = min(learner.version for learner in self.learners.values())
        taken = self.fragments.take(self._batch, version)
        if taken is None:
            return None
        is_view = self._batch == 1 and not self._owns
        items = [copied(each) if is_view else each for each in taken.items]
        several = len(items[0].fragments) > 1
        batch = join([each.fragments if several else next(iter(each.fragments.values())) for each in items])
        self.fragments.done(taken)
        return batch


def copied(received: Received) -> Received:
    """Return fragments in memory of their own."""
    fragments = {
        name: fragment_of(
            {field: np.array(array) for field, array in arrays_of(fragment).items()},
            episodes=fragment.episodes,
            policy=fragment.policy,
            actor=fragment.actor,
        )
        for name, fragment in received.fragments.items()
    }
    return replace(received, fragments=fragments, release=_nothing)


def _nothing() -> None:
    """Do nothing."""
