"""Buffer worker: keeps fragments between actors and the trainer.

    actors ─ sample stream ─> FragmentQueue: newest first ─> trainer
    actors ─ sample stream ─> BufferWorker: reanalysis ─ sample stream ─> trainer

The queue is a table of the data plane: a fragment is a group, and each use of it is a stage. So each use is
leased to one taker and done once; groups that are too old or too many are dropped with a reason; a group's
memory is given back after its last use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rillflow.data_plane.instructions import Begun, Delete, Instruction, Lease
from rillflow.data_plane.schema import ColumnType, Schema, StageColumns
from rillflow.data_plane.table import Table
from rillflow.errors import ConfigError
from rillflow_classic.fragment import Fragment
from rillflow_classic.streams.stream import FragmentSink, FragmentSource, ParameterReader, Received
from rillflow_classic.workers.recording import arrays_of

LEASE_S = 600.0
"""Seconds after which a taker that is not done loses its fragments."""
Reanalysis = Callable[[Mapping[str, Fragment]], Mapping[str, Fragment]]
"""Computes fragments anew, for example their values with newer weights; shapes and types stay."""


@dataclass(frozen=True, kw_only=True)
class TakenFragments:
    """Fragments of one batch, leased."""

    lease: Lease
    """The lease."""
    items: Sequence[Received]
    """Newest first."""


class FragmentQueue:
    """Fragments that wait for a trainer, newest first.

    Args:
        capacity: largest number of fragments; a further one replaces the oldest.
        reuses: number of batches that each fragment may be in.
        max_lag: fragments whose oldest step acted with weights more versions old are dropped; None: none.
        clock: seconds.
    """

    def __init__(
        self,
        capacity: int,
        *,
        reuses: int = 1,
        max_lag: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity < 1 or reuses < 1:
            raise ConfigError(
                f"a queue of {capacity} fragments that are used {reuses} times",
                why="it holds at least one fragment, which is used at least once",
            )
        self.reuses = reuses
        """Number of batches that each fragment may be in."""
        self._uses = [f"use_{number}" for number in range(reuses)]
        schema = Schema(
            columns={"fragment": ColumnType(dtype="int64")},
            stages=tuple(
                StageColumns(name=use, reads=("fragment",), order="ready_first") for use in self._uses
            ),
        )
        self.table = Table(schema, capacity=capacity, now=clock())
        self._max_lag, self._clock = max_lag, clock
        self._held: dict[int, Received] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, received: Received) -> None:
        """Add a fragment; drop the oldest one if there is no room."""
        now = self._clock()
        if not self.table.room:
            self._follow(self.table.drop(np.array([self.table.oldest]), "replaced by a newer one", now))
        holder = f"actor {received.actor}"
        for said in self.table.begin(1, holder=holder, now=now, version=received.version):
            if isinstance(said, Begun):
                self._held[int(said.ids[0])] = received

    def take(self, count: int, version: int, holder: str = "trainer") -> TakenFragments | None:
        """Lease the newest fragments; None while there are too few.

        Args:
            count: number of fragments.
            version: version of the learner.
            holder: name of the taker.
        """
        now = self._clock()
        self._follow(self.table.expire(now))
        least = None if self._max_lag is None else version - self._max_lag
        for use in self._uses:
            if len(newest := self.table.ready(use)[::-1][:count]) < count:
                continue
            said = self.table.take(
                use,
                count,
                holder=holder,
                now=now,
                deadline=now + LEASE_S,
                least=count,
                least_version=least,
                only=newest,
            )
            self._follow(said)
            leases = [each for each in said if isinstance(each, Lease)]
            if leases:
                items = [self._held[group] for group in leases[0].ids.tolist()]
                return TakenFragments(lease=leases[0], items=items)
        return None

    def done(self, taken: TakenFragments) -> None:
        """End a lease; the memory of fragments without a further use is given back."""
        self._follow(self.table.done(taken.lease.number, taken.lease.ids, now=self._clock()))

    def clear(self, reason: str) -> None:
        """Drop all fragments."""
        if self._held:
            self._follow(self.table.drop(np.array(sorted(self._held)), reason, self._clock()))

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Delete):
                for group in each.ids.tolist():
                    self._held.pop(group).release()
                self.table.cleared(each.writer, each.ids)


class BufferWorker:
    """Stands between two sample streams, and computes fragments anew on their way.

    Args:
        source: where fragments come from.
        sink: where they go; the worker is an actor with one lane there.
        reanalyse: what happens to them.
        parameters: the trainer's stop.
    """

    def __init__(
        self,
        source: FragmentSource,
        sink: FragmentSink,
        reanalyse: Reanalysis,
        parameters: ParameterReader,
    ) -> None:
        self._source, self._sink, self._reanalyse = source, sink, reanalyse
        self._parameters = parameters
        self._waiting: list[Received] = []

    def poll(self, budget_s: float) -> int:
        """Pass fragments on for a while, or until the trainer stops all workers; return their number."""
        deadline, passed = time.monotonic() + budget_s, 0
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not self._waiting:
                self._waiting = self._source.take(min(left, 0.05))
            elif (arrays := self._sink.reserve(0)) is None:
                self._sink.wait(min(left, 0.05))
            else:
                received = self._waiting.pop(0)
                made = {}
                for name, fragment in self._reanalyse(received.fragments).items():
                    for field, array in arrays_of(fragment).items():
                        arrays[name][field][...] = array
                    made[name] = replace(fragment, actor=received.actor)
                received.release()
                self._sink.put(0, made)
                passed += 1
            if self._parameters.is_stopped or time.monotonic() >= deadline:
                return passed
