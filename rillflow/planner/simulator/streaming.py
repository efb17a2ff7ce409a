"""Streaming: generation, scoring and training side by side; rows flow from one to the next by groups.

 prompts ─> sampling ── groups ──> scoring ── groups ──> admission ── batch b ──> stages in turn ─┐
               ^  ^                                         │                                      │
               │  └──────────── may a group begin? ─────────┘                                      │
               └───────────────────────── version b + 1 of the weights <─── publish ───────────────┘

sampling  consumes prompts, versions; waits for slots, cache, the admission; unblocked by rows that end and
          batches that are formed; produces groups
scoring   consumes complete groups; waits for its devices; unblocked by time; produces scored groups
training  consumes batches; waits for enough groups and the pools of its stages; unblocked by groups that are
          scored and stages that end; produces versions

One heap holds what will happen: (seconds, kind, number). The loop takes the events of one moment, lets the
state machines move, forms a batch if the pool of its first stage is free, and begins rows. It ends with the
last step; what is then on its way is counted as unfinished. Nothing can crash but a row that fits nowhere,
which is an error before time passes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from enum import IntEnum
from itertools import chain

from rillflow.errors import PlanError
from rillflow.planner.schedule import BESIDE
from rillflow.planner.simulator.admission import Admission, Drop, Group, Wait
from rillflow.planner.simulator.book import WHOLE, Book
from rillflow.planner.simulator.in_step import STOPPED
from rillflow.planner.simulator.layout import Layout
from rillflow.planner.simulator.result import Cause, Simulation
from rillflow.planner.simulator.sampling import Sampling
from rillflow.planner.simulator.scoring import Scoring, by_group
from rillflow.planner.simulator.turns import Start, Task, Turns
from rillflow.planner.work import Work

TOO_OLD = "older than the freshness bound"


class _Kind(IntEnum):
    """What happens; of events of one moment, in this order."""

    REPLICA = 0
    SCORED = 1
    ENDED = 2
    PUBLISHED = 3


class Streaming:
    """Steps of a plan whose rows flow.

    Args:
        layout: what is simulated; its plan has a freshness bound above 0.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        plan, workload = layout.plan, layout.problem.workload
        rule = Drop if plan.late == "drop" else Wait
        self._admission: Admission = rule(freshness=plan.freshness, prompts=workload.prompts)
        self._book = Book(layout.lanes)
        publish = next(task for task in layout.tasks if self._is_publish(task.stage))
        exposed = publish.seconds if layout.settings.crossing == "exposed" else 0.0
        self._crossing_s = publish.seconds
        self._sampling = Sampling(layout, self._admission, self._book, load_s=exposed)
        scored = by_group(layout)
        self._scoring = Scoring(scored, prompts=workload.prompts, book=self._book)
        apart = {task.stage for task in scored} | set(layout.generating)
        self._batch_tasks = [
            _last_group(task, apart, 1.0 / workload.prompts)
            for task in layout.tasks
            if task.stage not in apart
        ]
        self._turns = Turns(self._batch_tasks)
        self._first = next(task.pool for task in self._batch_tasks if task.pool != BESIDE)
        self._free_s = dict.fromkeys((task.pool for task in self._batch_tasks), 0.0)
        self._events: list[tuple[float, _Kind, int, int]] = []
        self._groups: dict[int, Group] = {}
        self._batches: dict[int, Sequence[Group]] = {}
        self._ends: list[float] = []
        self._tokens: list[int] = []
        self._ages: dict[int, int] = defaultdict(int)
        self._dropped: dict[str, int] = defaultdict(int)
        self._trained = 0

    def run(self, steps: int) -> Simulation:
        """Until so many steps have ended."""
        now = 0.0
        self._sampling.begin(now)
        self._push_replicas()
        while len(self._ends) < steps:
            if not self._events:
                raise _stalled(self._admission, now)
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                _, kind, first, second = heapq.heappop(self._events)
                self._happen(kind, first, second, now)
                self._push_replicas()
            self._form(now)
            self._sampling.begin(now)
            self._push_replicas()
        return self._simulation(now, steps)

    def _happen(self, kind: _Kind, first: int, second: int, now: float) -> None:
        match kind:
            case _Kind.REPLICA:
                self._score(self._sampling.advance(first, now), now)
            case _Kind.SCORED:
                self._admission.complete(self._groups.pop(first))
            case _Kind.PUBLISHED:
                self._score(self._sampling.publish(first, now), now)
            case _Kind.ENDED:
                starts = self._turns.ended(first, second, now)
                if self._turns.is_over(first):
                    self._count(first, self._batches.pop(first), now)
                self._start(starts)

    def _score(self, groups: Sequence[Group], now: float) -> None:
        """Hand complete groups to scoring."""
        for group in groups:
            stopped = len(group.rows) - len(group.kept)
            if stopped:
                self._dropped[STOPPED] += stopped
            self._groups[group.prompt] = group
            scored_s = self._scoring.score(now, self._admission.batch + 1)
            heapq.heappush(self._events, (scored_s, _Kind.SCORED, group.prompt, 0))

    def _form(self, now: float) -> None:
        """Form batches as long as the pool of their first stage is free and groups are there."""
        while self._turns.is_free(self._first):
            batch = self._admission.batch
            groups = self._admission.take()
            for group in self._admission.take_dropped():
                self._dropped[TOO_OLD] += len(group.kept)
                del self._sampling.live[group.prompt]
            if not groups:
                return
            for group in groups:
                del self._sampling.live[group.prompt]
            self._batches[batch] = groups
            self._begin(batch, now)

    def _count(self, batch: int, groups: Sequence[Group], now: float) -> None:
        """Count a batch whose stages have all ended."""
        self._ends.append(now)
        for group in groups:
            self._trained += len(group.kept)
            for row in group.kept:
                self._ages[batch - group.versions[row.sample]] += 1
        rows = [row for group in groups for row in group.kept]
        self._tokens.append(sum(row.prompt_tokens + row.response_tokens for row in rows))

    def _begin(self, batch: int, now: float) -> None:
        """Let the training side begin a batch; its rows have travelled but for the last group's."""
        overhead = self._layout.problem.overhead_s
        begun = now + overhead
        self._book.idle(self._first, WHOLE, Cause.DATA, batch + 1, self._free_s[self._first], now)
        self._book.idle(self._first, WHOLE, Cause.OVERHEAD, batch + 1, now, begun)
        self._free_s[self._first] = begun
        self._start(self._turns.begin(batch, begun, {}))

    def _start(self, starts: Sequence[Start]) -> None:
        for start in starts:
            task, step, end_s = start.task, start.step + 1, start.start_s + start.task.seconds
            if self._is_publish(task.stage):
                hidden = self._layout.settings.crossing == "hidden"
                end_s = start.start_s if hidden else end_s
                there_s = start.start_s + (self._crossing_s if hidden else 0.0)
                heapq.heappush(self._events, (there_s, _Kind.PUBLISHED, step, 0))
            if task.pool != BESIDE:
                self._book.idle(task.pool, WHOLE, Cause.DATA, step, self._free_s[task.pool], start.start_s)
                self._free_s[task.pool] = end_s
            self._book.work(task.pool, WHOLE, task.name, step, start.start_s, end_s)
            heapq.heappush(self._events, (end_s, _Kind.ENDED, start.step, task.stage))

    def _push_replicas(self) -> None:
        for next_s, place in self._sampling.changes():
            heapq.heappush(self._events, (next_s, _Kind.REPLICA, place, 0))

    def _simulation(self, now: float, steps: int) -> Simulation:
        layout = self._layout
        self._sampling.close(now)
        self._scoring.close(now, steps)
        for pool, free_s in self._free_s.items():
            self._book.idle(pool, WHOLE, Cause.DATA, steps, free_s, now)
        spans = self._book.close(now)
        pools = [pool.name for pool in layout.plan.pools]
        cached = dict.fromkeys(layout.generating, self._sampling.peak_tokens)
        live = [*self._sampling.live.values(), *chain.from_iterable(self._batches.values())]
        return Simulation(
            step_s=tuple(end - before for end, before in zip(self._ends, [0.0, *self._ends], strict=False)),
            rows_per_step=layout.problem.workload.rows,
            tokens=tuple(self._tokens[:steps]),
            generation_s=(),
            pools=self._book.pool_times(
                spans, pools, {pool: layout.peak_bytes(pool, cached) for pool in pools}
            ),
            ages=dict(sorted(self._ages.items())),
            begun=self._sampling.begun,
            trained=self._trained,
            dropped=dict(self._dropped),
            unfinished=sum(len(group.kept if group.is_complete else group.rows) for group in live),
            spans=spans,
        )

    def _is_publish(self, stage: int) -> bool:
        return self._layout.problem.work(self._layout.problem.graph.stages[stage]) is Work.PUBLISH


def _last_group(task: Task, apart: Set[int], share: float) -> Task:
    """A task of a batch as its rows come: those of all groups but the last have travelled by then."""
    inputs = tuple(
        replace(edge, seconds=edge.seconds * share) if edge.source in apart else edge for edge in task.inputs
    )
    return replace(task, inputs=inputs)


def _stalled(admission: Admission, now: float) -> PlanError:
    return PlanError(
        f"nothing happens any more after {now:g} s, before batch {admission.batch}",
        why="the simulation waits for rows that cannot begin: this is a fault of the simulator",
        fix="report the plan and the seed",
    )
