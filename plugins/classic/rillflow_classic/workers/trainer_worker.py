"""Trainer worker: assembles the next batch while the present one is trained.

    sample stream ─> FragmentQueue: newest first ─ join: the only copy ─> next batch ─> learner
    └───────────────────────────────── thread ──────────────────────────┘

Loop of the thread
    consumes      fragments of the sample stream
    waits for     a fragment, and for room for the next batch: one batch is ahead
    unblocked by  an actor; the trainer that takes the batch
    produces      batches
    shuts down    healthy: ``close``. Its error is raised by ``next``
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from rillflow.errors import ConfigError
from rillflow.records.metrics import Metrics, Sum
from rillflow_classic.fragment import Fragment
from rillflow_classic.operators.steps import Rollout, join
from rillflow_classic.policy import Learner
from rillflow_classic.streams.streams import Received, Streams

PAUSE_S = 0.05
"""Longest wait of the thread before it looks whether it is to end."""


@dataclass(kw_only=True, eq=False)
class _Waiting:
    """A fragment in the queue."""

    version: int
    """Oldest version of the weights that acted."""
    fragments: Mapping[str, Fragment]
    """Fragment by policy; the episodes count in its first batch."""
    release: Callable[[], None]
    """Gives its memory back."""
    uses: int = 0
    """Batches that it was in."""


class FragmentQueue:
    """Fragments that wait for the trainer, newest first.

    Args:
        room: fragments that the stream holds.
        batch: fragments of a batch.
        reuses: number of batches that each fragment may be in; fragments that were in fewer come first.
        max_lag: fragments whose oldest step acted with weights more versions old are dropped; None: none.

    Raises:
        ConfigError: the stream holds no batch.
    """

    def __init__(self, room: int, *, batch: int = 1, reuses: int = 1, max_lag: int | None = None) -> None:
        if not 1 <= batch <= room:
            raise ConfigError(
                f"workers.batch is {batch}, and the stream holds {room} fragments",
                why="a batch is complete only if all its fragments wait in the stream: workers.actors x "
                "workers.ring x workers.depth",
                fix=f"set workers.batch to at most {room}, or raise workers.depth",
            )
        self._capacity = min(room, max(2 * batch, room // 2))
        self._batch, self._reuses, self._max_lag = batch, reuses, max_lag
        self._waiting: list[_Waiting] = []
        self.dropped = 0
        """Number of fragments that were too old or too many."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, received: Received) -> None:
        """Add a fragment; if half of the stream and two batches wait, drop the oldest one."""
        if len(self) == self._capacity:
            self._drop(self._waiting[-1:])
        version = min(int(each.versions.min()) for each in received.fragments.values())
        added = _Waiting(version=version, fragments=received.fragments, release=received.release)
        self._waiting.insert(0, added)

    def take(self, version: int) -> Rollout | None:
        """Return the next batch for a learner's version, side by side; None while there are too few."""
        if self._max_lag is not None:
            self._drop([each for each in self._waiting if version - each.version > self._max_lag])
        if len(self) < self._batch:
            return None
        taken = sorted(self._waiting, key=lambda each: each.uses)[: self._batch]
        rollout = assembled([each.fragments for each in taken])
        for each in taken:
            each.uses += 1
            each.fragments = {name: replace(one, episodes=()) for name, one in each.fragments.items()}
        self._end([each for each in taken if each.uses == self._reuses])
        return rollout

    def clear(self) -> None:
        """Drop all fragments."""
        self._drop(self._waiting)

    def _drop(self, dropped: Sequence[_Waiting]) -> None:
        self.dropped += len(dropped)
        self._end(dropped)

    def _end(self, ended: Sequence[_Waiting]) -> None:
        self._waiting = [each for each in self._waiting if each not in ended]
        for each in ended:
            each.release()


class TrainerWorker:
    """The learners' end of the sample stream.

    Args:
        learners: learner of every policy, by name.
        streams: the trainer's end of the streams.
        fragments: queue of fragments that wait.
        prefetch: whether a thread assembles the next batch meanwhile.
    """

    def __init__(
        self, learners: Mapping[str, Learner], streams: Streams, fragments: FragmentQueue, *, prefetch: bool
    ) -> None:
        self._learners, self._streams, self._fragments = learners, streams, fragments
        self._is_closed, self._reported = False, fragments.dropped
        self._thread = ThreadPoolExecutor(1, "trainer-batches") if prefetch else None
        self._ahead = self._thread.submit(self._prefetched) if self._thread is not None else None

    def next(self, wait_s: float) -> Rollout | None:
        """Return the next batch; None if there are too few fragments in time."""
        if self._thread is None or self._ahead is None:
            return self._assembled(wait_s)
        if not wait([self._ahead], wait_s).done:
            return None
        batch, self._ahead = self._ahead.result(), self._thread.submit(self._prefetched)
        return batch

    def metrics(self) -> Metrics:
        """Return what the queue dropped since the last call."""
        before, self._reported = self._reported, self._fragments.dropped
        return {"actor/dropped_fragments/sum": Sum(value=float(self._reported - before))}

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown()

    def _prefetched(self) -> Rollout | None:
        batch = None
        while batch is None and not self._is_closed:
            batch = self._assembled(PAUSE_S)
        return batch

    def _assembled(self, wait_s: float) -> Rollout | None:
        """Take what has arrived, and join a batch."""
        version = min(learner.version for learner in self._learners.values())
        batch = self._fragments.take(version)
        if batch is None:
            for each in self._streams.take(wait_s):
                self._fragments.put(each)
            batch = self._fragments.take(version)
        return batch


def assembled(items: Sequence[Mapping[str, Fragment]]) -> Rollout:
    """Return fragments of several lanes side by side, in memory of their own."""
    if len(items) == 1:
        items = [copy.deepcopy(items[0])]
    return join([each if len(each) > 1 else next(iter(each.values())) for each in items])
