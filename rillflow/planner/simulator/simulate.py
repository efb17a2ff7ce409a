"""Simulate: a plan event by event; in step, or with rows that flow from stage to stage by groups.

in step    prompts ─> rounds ─> stages in turn ─> the next step, when all of it has ended

flowing    prompts ─> stream ── groups ──> scoring ── groups ──> admission ── batch b ──> stages in turn ─┐
                        ^  ^                                         │                                     │
                        │  └──────────── may a group begin? ─────────┘                                     │
                        └─────────────── a version of the weights, after c batches <────── publish ────────┘

stream     consumes prompts, versions; waits for slots, cache, the admission; unblocked by rows that end and
           batches that are formed; produces groups
scoring    consumes complete groups; waits for its devices; unblocked by time; produces scored groups
training   consumes batches; waits for enough groups and the pools of its stages; unblocked by groups that are
           scored and stages that end; produces versions

One heap holds what will happen: (seconds, kind, numbers). The loop takes the events of one moment, lets the
state machines move, forms a batch if the pool of its first stage is free, and begins rows. It ends with the
last step; what is then on its way is counted as unfinished. Nothing can crash but a row that fits nowhere,
which is an error before time passes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum

from rillflow.errors import PlanError
from rillflow.planner.option import Costs
from rillflow.planner.plan import Plan
from rillflow.planner.problem import Problem
from rillflow.planner.schedule import BESIDE
from rillflow.planner.simulator.admission import Drop, Group, Wait
from rillflow.planner.simulator.draws import Row
from rillflow.planner.simulator.layout import Layout, Settings, lay_out
from rillflow.planner.simulator.result import WHOLE, Book, Cause, Simulation, pool_times
from rillflow.planner.simulator.sampling import Round, Stream
from rillflow.planner.simulator.turns import Start, Turns

MOST_STEPS = 100_000
ENOUGH_ROWS = 4096
"""Rows that are simulated to know a step."""
STOPPED = "more samples than wanted"
ASIDE = "put aside, begun anew later"
TOO_OLD = "older than the freshness bound"


def simulate(
    problem: Problem,
    costs: Costs,
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    settings: Settings | None = None,
) -> Simulation:
    """Run steps of a plan, event by event.

    Args:
        problem: the step that is planned, with the plan's freshness.
        costs: its cost model.
        plan: where its units lie.
        steps: how many, from the first one on.
        seed: of lengths and of which devices are slow; the same seed gives the same simulation.
        settings: what is assumed beside the plan.

    Raises:
        PlanError: the plan does not fit, or asks for what is not simulated; a row that fits into no cache.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise PlanError(f"{steps} steps", why=f"a simulation has between 1 and {MOST_STEPS:,}")
    layout = lay_out(problem, costs, plan, seed=seed, settings=settings or Settings())
    return (_Flowing if layout.flows else _InStep)(layout).run(steps)


def enough_steps(problem: Problem, plan: Plan) -> int:
    """Steps whose mean says what a step comes to: ``ENOUGH_ROWS`` rows; ahead twice as many.

    Steps ahead come in bursts, every k + 1 of them, so they are whole cycles; the earlier half fills it.
    """
    if not plan.freshness:
        return max(1, min(4, ENOUGH_ROWS // problem.workload.rows))
    cycle = plan.freshness + 1
    return 2 * cycle * max(1, ENOUGH_ROWS // (cycle * problem.workload.rows))


class _Kind(IntEnum):
    """What happens; of events of one moment, in this order."""

    REPLICA = 0
    SCORED = 1
    ENDED = 2
    WEIGHTS = 3
    STEP = 4


class _Engine:
    """The loop, and what is counted."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.steps = 0
        self.workload = layout.problem.workload
        self.book = Book()
        self.pools = [pool.name for pool in layout.plan.pools]
        self.events: list[tuple[float, _Kind, int, int]] = []
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.generation: list[float] = []
        self.ages: dict[int, int] = defaultdict(int)
        self.dropped: dict[str, int] = defaultdict(int)
        self.begun = 0
        self.trained = 0
        self.cached: dict[int, float] = defaultdict(float)

    def happen(self, kind: _Kind, first: int, second: int, now: float) -> None:
        """Let the state machines move."""
        raise NotImplementedError

    def settle(self, now: float) -> None:
        """Begin what may begin once all events of a moment have happened."""

    def close(self, now: float) -> int:
        """Write down what is under way; how many rows are."""
        raise NotImplementedError

    def run(self, steps: int) -> Simulation:
        """Until so many steps have ended."""
        self.steps, now = steps, 0.0
        self.push(now, _Kind.STEP, 0)
        while len(self.ends) < steps:
            assert self.events, f"rows that cannot begin are waited for after {now} s"
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, kind, first, second = heapq.heappop(self.events)
                self.happen(kind, first, second, now)
            self.settle(now)
        now, unfinished = self.ends[-1], self.close(self.ends[-1])
        spans = self.book.close(now)
        peaks = {pool: self.layout.peak_bytes(pool, self.cached) for pool in self.pools}
        return Simulation(
            step_s=tuple(end - before for end, before in zip(self.ends, [0.0, *self.ends], strict=False)),
            rows_per_step=self.workload.rows,
            tokens=tuple(self.tokens[:steps]),
            generation_s=tuple(self.generation),
            pools=pool_times(spans, self.layout.lanes, peaks),
            ages=dict(sorted(self.ages.items())),
            begun=self.begun,
            trained=self.trained,
            dropped={reason: rows for reason, rows in self.dropped.items() if rows},
            unfinished=unfinished,
            spans=spans,
        )

    def push(self, at_s: float, kind: _Kind, first: int, second: int = 0) -> None:
        """Something will happen."""
        heapq.heappush(self.events, (at_s, kind, first, second))

    def work(self, start: Start, step: int, end_s: float) -> None:
        """Write a stage down, and that its pool waited for data before."""
        task, is_pool = start.task, start.task.pool in self.pools
        if is_pool:
            self.book.idle(task.pool, WHOLE, Cause.DATA, step, start.start_s)
        pool = task.pool if is_pool else BESIDE
        self.book.work(pool, WHOLE, task.name, step, end_s, start.start_s)


class _InStep(_Engine):
    """Every step generates, scores and trains before the next one begins."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._draws = layout.draws()
        self._turns = Turns(layout.tasks)
        self._aside: list[int] = []
        self._fresh = 0
        self._rounds: dict[int, Round] = {}

    def happen(self, kind: _Kind, first: int, second: int, now: float) -> None:
        """A step begins, or a stage of it has ended."""
        if kind is _Kind.STEP:
            self._rounds = self._generated()
            self.generation.append(sum(one.seconds for one in self._rounds.values()))
            self._start(self._turns.begin(first, now), first)
            return
        self._start(self._turns.ended(first, second, now), first)
        if self._turns.is_over(first):
            self._rest(first, now)

    def close(self, now: float) -> int:  # noqa: ARG002
        """Nothing is under way."""
        return 0

    def _generated(self) -> dict[int, Round]:
        """Run the generation of a step, stage by stage; a greedy one answers the prompts that are kept."""
        layout, workload, found = self.layout, self.workload, dict[int, Round]()
        prompts, samples = self._hand()
        tokens = 0
        for stage in sorted(layout.generating, key=layout.is_greedy):
            is_greedy = layout.is_greedy(stage)
            sampled = slice(-1, None) if is_greedy else slice(samples)
            rows = [self._draws.rows(prompt)[sampled] for prompt in prompts]
            kept = 1 if is_greedy else workload.samples
            one = Round(layout.replicas(stage), rows, wanted=workload.prompts, samples=kept)
            found[stage] = one
            aside = len(one.aside) * len(rows[0])
            self._aside += one.aside
            self.dropped[STOPPED] += one.stopped
            self.dropped[ASIDE] += aside
            self.begun += len(one.kept) + one.stopped + aside
            self.trained += len(one.kept)
            self.cached[stage] = max(self.cached[stage], one.peak_tokens)
            tokens += 0 if is_greedy else _tokens(one.kept)
            prompts = [group.prompt for group in one.complete]
        if not found:
            self.begun += workload.rows
            self.trained += workload.rows
        self.tokens.append(tokens if found else round(workload.rows * workload.row_tokens))
        self.ages[0] += workload.rows
        return found

    def _hand(self) -> tuple[Sequence[int], int]:
        """Prompts put aside once they fill a step, with no more rows than wanted; fresh ones else."""
        count = self.workload.prompts
        if len(self._aside) >= count:
            prompts, self._aside = self._aside[:count], self._aside[count:]
            return prompts, self.workload.samples
        first = self._fresh
        self._fresh += self.layout.prompts_begun
        return range(first, self._fresh), self.layout.samples_begun

    def _start(self, starts: Sequence[Start], step: int) -> None:
        for start in starts:
            task, one = start.task, self._rounds.get(start.task.stage)
            end_s = start.start_s + (task.seconds if one is None else one.seconds)
            self.push(end_s, _Kind.ENDED, step, task.stage)
            if one is None:
                self.work(start, step + 1, end_s)
                continue
            self.book.idle(task.pool, WHOLE, Cause.DATA, step + 1, start.start_s)
            self.book.pass_over(task.pool, WHOLE, end_s)
            for lane in range(1, self.layout.lanes[task.pool] + 1):
                done_s = one.lanes_s[lane - 1] if lane <= len(one.lanes) else 0.0
                self.book.work(task.pool, lane, task.name, step + 1, start.start_s + done_s, start.start_s)
                self.book.idle(task.pool, lane, Cause.TAIL, step + 1, end_s)

    def _rest(self, step: int, now: float) -> None:
        """Write down what pools do that have done their part, and end the step."""
        samplers = {self.layout.pool_of(stage) for stage in self.layout.generating}
        trainers = {task.pool for task in self.layout.tasks if task.stage not in self.layout.generating}
        self.ends.append(now + self.layout.problem.overhead_s)
        for pool in self.pools:
            cause = Cause.WEIGHTS if pool in samplers - trainers else Cause.NOTHING
            self.book.idle(pool, WHOLE, cause, step + 1, now)
            self.book.idle(pool, WHOLE, Cause.OVERHEAD, step + 1, self.ends[-1])
        if step + 1 < self.steps:
            self.push(self.ends[-1], _Kind.STEP, step + 1)


class _Flowing(_Engine):
    """Generation, scoring and training run side by side."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        plan, crossing = (
            layout.plan,
            sum(task.seconds for task in layout.tasks if layout.is_publish(task.stage)),
        )
        self._admission = (Drop if plan.late == "drop" else Wait)(
            freshness=plan.freshness,
            prompts=self.workload.prompts // layout.batches,
            published=layout.published,
        )
        replicas = max(layout.lanes.values())
        load_s = {"exposed": crossing, "hidden": 0.0, "staggered": crossing / replicas}[plan.weights]
        self._arrive_s = crossing if plan.weights == "hidden" else 0.0
        self._apart_s = load_s if plan.weights == "staggered" else 0.0
        self._stream = Stream(layout, self._admission, self.book, load_s=load_s)
        self._groups = Turns(layout.by_group)
        self._turns = Turns(layout.by_batch)
        self._publishes = {task.stage for task in layout.tasks if layout.is_publish(task.stage)}
        self._first = next(task.pool for task in layout.by_batch if task.pool in self.pools)
        self._scored: dict[int, Group] = {}
        self._batches: dict[int, Sequence[Group]] = {}
        self._step_tokens = 0

    def happen(self, kind: _Kind, first: int, second: int, now: float) -> None:
        """A replica, a group, a stage of a batch, or weights have come to an event."""
        match kind:
            case _Kind.REPLICA:
                self._score(self._stream.advance(first, now), now)
            case _Kind.SCORED:
                self._group(self._groups.ended(first, second, now), first)
            case _Kind.WEIGHTS:
                self._score(self._stream.publish(first, now, second), now)
            case _Kind.ENDED:
                starts = self._turns.ended(first, second, now)
                if self._turns.is_over(first):
                    self._count(first, self._batches.pop(first), now)
                self._start(starts, first)
        self._push_replicas()

    def settle(self, now: float) -> None:
        """Form batches as long as the pool of their first stage is free, and begin rows."""
        while self._turns.is_free(self._first):
            batch, groups = self._admission.batch, self._admission.take()
            for group in self._admission.dropped:
                self.dropped[TOO_OLD] += len(group.kept)
                del self._stream.live[group.prompt]
            self._admission.dropped.clear()
            if not groups:
                break
            for group in groups:
                del self._stream.live[group.prompt]
            self._batches[batch] = groups
            self._begin(batch, now)
        self._stream.begin(now)
        self._push_replicas()

    def close(self, now: float) -> int:
        """Write down what everything did until the end; rows begun that no batch has consumed."""
        self._stream.close(now)
        for pool in self.pools:
            if not self.layout.lanes[pool]:
                self.book.idle(pool, WHOLE, Cause.DATA, len(self.ends), now)
        self.begun = self._stream.begun
        self.cached.update(dict.fromkeys(self.layout.generating, self._stream.peak_tokens))
        live = [*self._stream.live.values(), *(group for batch in self._batches.values() for group in batch)]
        return sum(len(group.kept if group.is_complete else group.rows) for group in live)

    def _score(self, groups: Sequence[Group], now: float) -> None:
        """Hand complete groups to scoring."""
        for group in groups:
            self.dropped[STOPPED] += len(group.rows) - len(group.kept)
            self._scored[group.prompt] = group
            self._group(self._groups.begin(group.prompt, now), group.prompt)

    def _group(self, starts: Sequence[Start], prompt: int) -> None:
        """Go on with the stages of groups; the group is scored once all of its own have ended."""
        for start in starts:
            end_s = start.start_s + start.task.seconds
            self.work(start, self._admission.batch // self.layout.batches + 1, end_s)
            self.push(end_s, _Kind.SCORED, start.step, start.task.stage)
        if self._groups.is_over(prompt):
            self._admission.complete(self._scored.pop(prompt))

    def _begin(self, batch: int, now: float) -> None:
        """Let the training side begin a batch; its rows have travelled but for the last group's."""
        step = batch // self.layout.batches + 1
        begun_s = now + self.layout.problem.overhead_s / self.layout.batches
        self.book.idle(self._first, WHOLE, Cause.DATA, step, now)
        self.book.idle(self._first, WHOLE, Cause.OVERHEAD, step, begun_s)
        is_last = (batch + 1) % self.layout.published == 0
        without = frozenset() if is_last else self._publishes
        self._start(self._turns.begin(batch, begun_s, without=without), batch)

    def _start(self, starts: Sequence[Start], batch: int) -> None:  # noqa: ARG002
        for start in starts:
            task, end_s = start.task, start.start_s + start.task.seconds
            if task.stage in self._publishes:
                version, there_s = start.step // self.layout.published + 1, start.start_s + self._arrive_s
                for place in range(len(self._stream.lanes)) if self._apart_s else (-1,):
                    self.push(there_s + max(place, 0) * self._apart_s, _Kind.WEIGHTS, version, place)
            self.work(start, start.step // self.layout.batches + 1, end_s)
            self.push(end_s, _Kind.ENDED, start.step, task.stage)

    def _count(self, batch: int, groups: Sequence[Group], now: float) -> None:
        """Count a batch whose stages have all ended, and the step that ends with it."""
        for group in groups:
            self.trained += len(group.kept)
            self._step_tokens += _tokens(group.kept)
            for row in group.kept:
                self.ages[batch // self.layout.published - group.versions[row.sample]] += 1
        if (batch + 1) % self.layout.batches == 0:
            self.ends.append(now)
            self.tokens.append(self._step_tokens)
            self._step_tokens = 0

    def _push_replicas(self) -> None:
        for next_s, place in self._stream.changes():
            self.push(next_s, _Kind.REPLICA, place)


def _tokens(rows: Sequence[Row]) -> int:
    return sum(row.prompt_tokens + row.response_tokens for row in rows)
