"""Simulate: run a plan event by event, either step by step or with groups of rows that flow between stages.

in order   prompts ─> rounds ─ parts ─> stages in turn ─> step t + k + 1, when all of step t has ended

flowing    prompts ─> stream ── groups ──> scoring ── groups ──> admission ── batch b ──> stages in turn ─┐
                        ^  ^                                         │                                     │
                        │  └──────────── may a group begin? ─────────┘                                     │
                        └─────────────── a version of the weights, after a step     <────── publish ────────┘

stream     consumes prompts, versions; waits for slots, cache, the admission; unblocked by rows that end and
           batches that are formed; produces groups
scoring    consumes complete groups; waits for its devices; unblocked by time; produces scored groups
training   consumes batches; waits for enough groups and the pools of its stages; unblocked by groups that are
           scored and stages that end; produces versions

The times of all stages of a step, a batch or a group are known when it begins: ``schedule.in_turn`` computes
them from the times when the pools become free. When rows flow, one heap holds the future events. The loop
processes all events of one moment, advances the stream, forms a batch if the pool of its first stage is free,
and begins rows. It ends with the last step; rows in progress are then unfinished. The only possible failure
is a row that fits nowhere, which raises an error.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from rillflow.controller.admission import StalenessBound
from rillflow.errors import PlanError
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import BESIDE, Timing, in_turn, last_s
from rillflow_planner.problem import Problem
from rillflow_planner.simulator.draws import Row
from rillflow_planner.simulator.layout import Layout, asked, require_flow
from rillflow_planner.simulator.result import WHOLE, Book, IdleCause, Simulation, pool_times
from rillflow_planner.simulator.sampling import CountBound, Round, SampleGroup, Stream, played

MOST_STEPS = 100_000
ENOUGH_ROWS = 4096
"""Number of simulated rows that is enough to estimate a step."""
STOPPED = "more samples than wanted"
ASIDE = "put aside, begun anew later"


def simulate(
    problem: Problem,
    costs: CostModel,
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    parts: int = 0,
    functions: Mapping[str, str] | None = None,
) -> Simulation:
    """Run steps of a plan, event by event.

    Args:
        problem: the planned step, with the plan's freshness.
        costs: cost model of the problem.
        plan: placement of the units.
        steps: number of steps from the first one on.
        seed: seed of lengths; the same seed gives the same simulation.
        parts: parts of a step's rows that move on in order; see ``Layout``.
        functions: pool whose ranks compute a function, by role.

    Raises:
        PlanError: the plan does not fit, requests something not simulated, or has a row too long for a cache.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise PlanError(f"the number of steps is {steps}", why=f"a simulation has 1 to {MOST_STEPS:,} steps")
    layout = Layout(
        problem=problem, costs=costs, plan=plan, seed=seed, parts=parts, functions=functions or {}
    )
    if layout.flows:
        require_flow(layout)
    elif plan.freshness % 1:
        why = "rows are passed on in order in steps, so each step begins a whole number of steps ahead"
        raise PlanError(f"parts is {layout.parts} and freshness {plan.freshness:g}", why=why, fix="parts = 0")
    run: _Flowing | _InOrder = _Flowing(layout) if layout.flows else _InOrder(layout)
    return run.run(steps)


def enough_steps(problem: Problem, plan: Plan) -> int:
    """Return the number of steps for a good estimate: ``ENOUGH_ROWS`` rows, with freshness twice as many.

    With freshness 0, 4 steps are the maximum. With freshness k, steps end in bursts of k + 1, so the number
    covers whole bursts, six unless they have too many rows; the estimate leaves out the first quarter.
    """
    if not plan.freshness:
        return max(1, min(4, ENOUGH_ROWS // problem.workload.rows))
    cycle = int(plan.freshness) + 1
    bursts = ENOUGH_ROWS / (cycle * problem.workload.rows)
    return 2 * cycle * max(1, int(bursts), min(3, int(4 * bursts)))


class _Run:
    """Counters and timeline of a simulation, for both orders of steps."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.workload = layout.problem.workload
        self.book = Book()
        self.pools = [pool.name for pool in layout.plan.pools]
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.generation: list[float] = []
        self.ages: dict[int, int] = defaultdict(int)
        self.dropped: dict[str, int] = defaultdict(int)
        self.begun = 0
        self.trained = 0
        self.cached: dict[int, float] = defaultdict(float)

    def work(self, timings: Iterable[Timing], step: int) -> None:
        """Record stages, and that their pools waited for data before them."""
        for timing in timings:
            pool = timing.pool if timing.pool in self.pools else BESIDE
            if pool != BESIDE:
                self.book.write(pool, WHOLE, IdleCause.DATA, step, timing.start_s)
            self.book.pass_over(pool, WHOLE, timing.start_s)
            self.book.write(pool, WHOLE, timing.name, step, timing.end_s)

    def found(self, unfinished: int) -> Simulation:
        """Return the simulation with this number of rows in progress."""
        spans = self.book.close(self.ends[-1])
        peaks = {pool: self.layout.peak_bytes(pool, self.cached) for pool in self.pools}
        return Simulation(
            step_s=tuple(end - before for end, before in zip(self.ends, [0.0, *self.ends], strict=False)),
            rows_per_step=self.workload.rows,
            tokens=tuple(self.tokens),
            generation_s=tuple(self.generation),
            pools=pool_times(spans, self.layout.lanes, peaks),
            ages=dict(sorted(self.ages.items())),
            begun=self.begun,
            trained=self.trained,
            dropped={reason: rows for reason, rows in self.dropped.items() if rows},
            unfinished=unfinished,
            spans=spans,
        )


class _InOrder(_Run):
    """Steps in order, with k + 1 in flight; one version samples a whole step, whose parts move on in order.

    On-policy (k = 0), each step generates, scores and trains before the next one begins.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._aside: list[int] = []
        self._fresh = 0
        self._free_s: dict[str, float] = {}
        self._load_s = layout.evaluation.crossing_s * (layout.plan.freshness > 0)

    def run(self, steps: int) -> Simulation:
        """Simulate this many steps."""
        for step in range(1, steps + 1):
            self._step(step)
        for pool in self.pools:
            self.book.write(pool, WHOLE, IdleCause.NOTHING, steps, self.ends[-1])
        return self.found(0)

    def _step(self, step: int) -> None:
        layout, ahead = self.layout, int(self.layout.plan.freshness)
        rounds, begin_s = self._generated(), self.ends[-1 - ahead] if step > ahead + 1 else 0.0
        self.generation.append(sum(one.seconds for one in rounds.values()))
        samplers = {layout.pool_of(stage) for stage in layout.generating}
        for pool in samplers if step > ahead + 1 and self._load_s else ():
            self._free_s[pool] = max(begin_s, self._free_s[pool]) + self._load_s
        handed = {stage: one.handed_s(layout.parts) for stage, one in rounds.items()}
        timings = in_turn(asked(layout, handed), begin_s=begin_s, free_s=self._free_s)
        trainers, stages = set[str](), len(layout.problem.graph.stages)
        for timing in timings:
            part, stage = divmod(timing.stage, stages)
            if stage in rounds:
                self._sample(timing, rounds[stage], step, handed[stage][part - 1] if part else 0.0)
            else:
                self.work([timing], step)
                trainers.add(timing.pool)
        end_s = max(self.ends[-1] if self.ends else 0.0, last_s(timings))
        self.ends.append(end_s + layout.problem.overhead_s)
        for timing in timings:
            if timing.stage % stages in layout.problem.training:  # busy until the step is recorded
                self._free_s[timing.pool] = self.ends[-1]
        for pool in () if ahead else self.pools:
            cause = IdleCause.WEIGHTS if pool in samplers - trainers else IdleCause.NOTHING
            self.book.write(pool, WHOLE, cause, step, end_s)
            self.book.write(pool, WHOLE, IdleCause.OVERHEAD, step, self.ends[-1])

    def _sample(self, timing: Timing, one: Round, step: int, since_s: float) -> None:
        """Record each replica's work since the previous part, and its wait for the slowest replica."""
        cause = IdleCause.WEIGHTS if self.layout.plan.freshness and not since_s else IdleCause.DATA
        self.book.write(timing.pool, WHOLE, cause, step, timing.start_s)
        self.book.pass_over(timing.pool, WHOLE, timing.end_s)
        idle = [0.0] * (self.layout.lanes[timing.pool] - len(one.lanes_s))
        for lane, done_s in enumerate([*one.lanes_s, *idle], 1):
            spent_s = min(max(done_s - since_s, 0.0), timing.seconds)
            self.book.pass_over(timing.pool, lane, timing.start_s)
            self.book.write(timing.pool, lane, timing.name, step, timing.start_s + spent_s)
            self.book.write(timing.pool, lane, IdleCause.TAIL, step, timing.end_s)

    def _generated(self) -> dict[int, Round]:
        """Simulate the generation of a step stage by stage; greedy stages answer only the kept prompts."""
        layout, workload, found = self.layout, self.workload, dict[int, Round]()
        prompts, samples = self._hand()
        tokens = 0
        for stage in sorted(layout.generating, key=layout.is_greedy):
            is_greedy = layout.is_greedy(stage)
            sampled = slice(-1, None) if is_greedy else slice(samples)
            rows = [layout.rows(prompt)[sampled] for prompt in prompts]
            kept = 1 if is_greedy else workload.samples
            one = played(layout.replicas(stage), rows, wanted=workload.prompts, samples=kept)
            found[stage] = one
            begun, aside = len(rows) * len(rows[0]), len(one.aside) * len(rows[0])
            self._aside += one.aside
            self.dropped[STOPPED] += begun - aside - len(one.kept)
            self.dropped[ASIDE] += aside
            self.begun += begun
            self.trained += len(one.kept)
            self.cached[stage] = max(self.cached[stage], one.peak_tokens)
            tokens += 0 if is_greedy else _tokens(one.kept)
            prompts = [*one.complete_s]
        if not found:
            self.begun += workload.rows
            self.trained += workload.rows
        self.tokens.append(tokens if found else round(workload.rows * workload.row_tokens))
        self.ages[0] += workload.rows
        return found

    def _hand(self) -> tuple[Sequence[int], int]:
        """Return prompts and samples to begin: prompts put aside once they fill a step, otherwise new
        ones.
        """
        count = self.workload.prompts
        if len(self._aside) >= count:
            prompts, self._aside = self._aside[:count], self._aside[count:]
            return prompts, self.workload.samples
        first = self._fresh
        self._fresh += self.layout.begun("prompts")
        return range(first, self._fresh), self.layout.begun("samples")


_REPLICA, _SCORED, _FREE, _TRAINED, _WEIGHTS = range(5)
"""Kinds of events, in their order within one moment: a replica reaches its next event, a group has its
scores, the pool of a batch's first stage is free, all stages of a batch have ended, weights arrive.
"""


class _Flowing(_Run):
    """Generation, scoring and training in parallel."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        batch = {"prompts": self.workload.prompts // layout.batches, "published": layout.batches}
        self._admission = (
            CountBound(freshness=layout.plan.freshness, **batch)
            if layout.problem.hardware.engine.counts
            else StalenessBound[SampleGroup](freshness=int(layout.plan.freshness), **batch)
        )
        self._stream = Stream(layout, self._admission, self.book)
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._free_s: dict[str, float] = {}
        self._pushed = count()
        self._first = next(task.pool for task in layout.by_batch if task.pool in self.pools)
        self._batches: dict[int, Sequence[SampleGroup]] = {}
        self._step_tokens = 0

    def run(self, steps: int) -> Simulation:
        """Simulate this many steps."""
        self._settle(0.0)
        while len(self.ends) < steps:
            assert self._events, f"rows that cannot begin are waited for after {self.ends}"
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                heapq.heappop(self._events)[-1]()
                self._push_replicas()
            self._settle(now)
        return self.found(self._close(self.ends[-1]))

    def _settle(self, now: float) -> None:
        """Form batches while the pool of their first stage is free, and begin rows."""
        while self._free_s.get(self._first, 0.0) <= now:
            batch, groups = self._admission.batch, self._admission.take()
            if not groups:
                break
            for group in groups:
                del self._stream.live[group.prompt]
            self._batches[batch] = groups
            self._begin(batch, now)
        self._stream.begin(now)
        self._push_replicas()

    def _close(self, now: float) -> int:
        """Record all activity until the end, and return the number of begun rows that no batch has
        consumed.
        """
        self._stream.close(now)
        for pool in self.pools:
            if not self.layout.lanes[pool]:
                self.book.write(pool, WHOLE, IdleCause.DATA, len(self.ends), now)
        self.begun = self._stream.begun
        self.cached.update(dict.fromkeys(self.layout.generating, self._stream.peak_tokens))
        live = [*self._stream.live.values(), *(group for batch in self._batches.values() for group in batch)]
        return sum(len(group.rows) for group in live)

    def _sample(self, happen: Callable[..., list[SampleGroup]], now: float, *place: int) -> None:
        """Advance the stream to an event, and pass complete groups to the stages that take single groups."""
        tasks, step = self.layout.by_group, self._admission.batch // self.layout.batches + 1
        for group in happen(now, *place):
            timings = in_turn(tasks, begin_s=now, free_s=self._free_s)
            self.work(timings, step)
            if tasks:
                self._push(last_s(timings), _SCORED, self._admission.complete, group)
            else:
                self._admission.complete(group)

    def _begin(self, batch: int, now: float) -> None:
        """Begin a batch on the training side; only its last group's rows still have to be transferred."""
        layout, step = self.layout, batch // self.layout.batches + 1
        begun_s = now + layout.problem.overhead_s / layout.batches
        self.book.write(self._first, WHOLE, IdleCause.DATA, step, now)
        self.book.write(self._first, WHOLE, IdleCause.OVERHEAD, step, begun_s)
        (version, left), publishing = divmod(batch + 1, layout.batches), layout.problem.publishing
        tasks = [task for task in layout.by_batch if not (left and task.stage in publishing)]
        timings = in_turn(tasks, begin_s=begun_s, free_s=self._free_s)
        self.work(timings, step)
        for timing in timings:
            if timing.stage in publishing:
                at_s = timing.start_s
                self._push(at_s, _WEIGHTS, self._sample, self._stream.publish, at_s, version)
        self._push(self._free_s[self._first], _FREE, lambda: None)
        self._push(last_s(timings), _TRAINED, self._count, batch, last_s(timings))

    def _count(self, batch: int, now: float) -> None:
        """Count a completed batch, and the step that ends with it."""
        for group in self._batches.pop(batch):
            self.trained += len(group.rows)
            self._step_tokens += _tokens(group.rows)
            for row in group.rows:
                self.ages[batch // self.layout.batches - group.versions[row.sample]] += 1
        if (batch + 1) % self.layout.batches == 0:
            self.ends.append(now)
            self.tokens.append(self._step_tokens)
            self._step_tokens = 0

    def _push(self, at_s: float, kind: int, happen: Callable[..., None], *told: Any) -> None:
        """Schedule an event."""
        event: Callable[[], None] = partial(happen, *told)
        heapq.heappush(self._events, (at_s, kind, next(self._pushed), event))

    def _push_replicas(self) -> None:
        for next_s, place in self._stream.changes():
            self._push(next_s, _REPLICA, self._sample, self._stream.advance, next_s, place)


def _tokens(rows: Sequence[Row]) -> int:
    return sum(row.prompt_tokens + row.response_tokens for row in rows)
