"""In step: every step generates, scores and trains before the next one begins.

round of rows ─> generation's seconds ─┐
stages in turn ────────────────────────┴─> the step's timeline; the next step begins when all of it has ended

consumes        prompts: those put aside once they fill a step, fresh ones else
waits for       all stages of the step before
unblocked by    the end of the last one
produces        a step's seconds, its spans, its rows
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from rillflow.planner.schedule import BESIDE
from rillflow.planner.simulator.book import WHOLE, Book
from rillflow.planner.simulator.generation import Round, run_round
from rillflow.planner.simulator.layout import Layout
from rillflow.planner.simulator.result import Cause, Simulation
from rillflow.planner.simulator.turns import Start, Turns

STOPPED = "more samples than wanted"
ASIDE = "put aside, begun anew later"


@dataclass(frozen=True, kw_only=True)
class _Hand:
    """The prompts of a step."""

    prompts: tuple[int, ...]
    samples: int


class InStep:
    """Steps in step.

    Args:
        layout: what is simulated.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._draws = layout.draws()
        self._book = Book(layout.lanes)
        self._aside: list[int] = []
        self._fresh = 0
        self._begun = 0
        self._trained = 0
        self._dropped: dict[str, int] = defaultdict(int)
        self._cached: dict[int, float] = defaultdict(float)

    def run(self, steps: int) -> Simulation:
        """So many steps."""
        workload = self._layout.problem.workload
        seconds, tokens, generation, now = [], [], [], 0.0
        for step in range(1, steps + 1):
            rounds = self._rounds()
            taken = self._step(step, now, rounds)
            seconds.append(taken)
            generation.append(sum(found.seconds for found in rounds.values()))
            trained = [found for stage, found in rounds.items() if not self._layout.is_greedy(stage)]
            guess = round(workload.rows * workload.row_tokens)
            tokens.append(sum(found.tokens for found in trained) if rounds else guess)
            if not rounds:
                self._begun += workload.rows
                self._trained += workload.rows
            now += taken
        spans = self._book.close(now)
        pools = [pool.name for pool in self._layout.plan.pools]
        peaks = {pool: self._layout.peak_bytes(pool, self._cached) for pool in pools}
        return Simulation(
            step_s=tuple(seconds),
            rows_per_step=workload.rows,
            tokens=tuple(tokens),
            generation_s=tuple(generation),
            pools=self._book.pool_times(spans, pools, peaks),
            ages={0: steps * workload.rows},
            begun=self._begun,
            trained=self._trained,
            dropped=dict(self._dropped),
            unfinished=0,
            spans=spans,
        )

    def _hand(self) -> _Hand:
        """Prompts put aside once they fill a step, with no more rows than wanted; fresh ones else."""
        workload = self._layout.problem.workload
        if len(self._aside) >= workload.prompts:
            prompts = tuple(self._aside[: workload.prompts])
            del self._aside[: workload.prompts]
            return _Hand(prompts=prompts, samples=workload.samples)
        first, count = self._fresh, self._layout.prompts_begun
        self._fresh += count
        return _Hand(prompts=tuple(range(first, first + count)), samples=self._layout.samples_begun)

    def _rounds(self) -> dict[int, Round]:
        """Run the generation of a step, stage by stage; a greedy one answers the prompts that are kept."""
        layout, workload = self._layout, self._layout.problem.workload
        if not layout.generating:
            return {}
        hand = self._hand()
        found: dict[int, Round] = {}
        prompts = hand.prompts
        for stage in sorted(layout.generating, key=layout.is_greedy):
            wanted = 1 if layout.is_greedy(stage) else workload.samples
            rows = [layout.rows_of(stage, self._draws.rows(prompt), hand.samples) for prompt in prompts]
            replicas = layout.replicas(stage)
            one = run_round(replicas, rows, wanted=workload.prompts, samples=wanted)
            self._count(stage, one, len(rows[0]))
            found[stage] = one
            prompts = one.complete
        return found

    def _count(self, stage: int, one: Round, samples: int) -> None:
        put_aside = len(one.aside) * samples
        self._aside += one.aside
        self._begun += one.kept + one.stopped + put_aside
        self._trained += one.kept
        for reason, rows in ((STOPPED, one.stopped), (ASIDE, put_aside)):
            if rows:
                self._dropped[reason] += rows
        self._cached[stage] = max(self._cached[stage], one.peak_tokens)

    def _step(self, step: int, begun_s: float, rounds: dict[int, Round]) -> float:
        """Run a step's stages in turn, from 0 so that every step is rounded alike; its seconds."""
        turns = Turns(self._layout.tasks)
        free = {pool.name: 0.0 for pool in self._layout.plan.pools}
        events: list[tuple[float, int]] = []
        starts = turns.begin(0, 0.0, {})
        end = 0.0
        while starts or events:
            for start in starts:
                stage = start.task.stage
                end_s = start.start_s + (rounds[stage].seconds if stage in rounds else start.task.seconds)
                self._write(step, begun_s, start, end_s, free, rounds.get(stage))
                heapq.heappush(events, (end_s, stage))
            now, stage = heapq.heappop(events)
            end = max(end, now)
            starts = turns.ended(0, stage, now)
        overhead = self._layout.problem.overhead_s
        self._rest(step, begun_s, free, end, overhead)
        return end + overhead

    def _write(
        self, step: int, begun_s: float, start: Start, end_s: float, free: dict[str, float], one: Round | None
    ) -> None:
        """Write a stage down, and what its pool waited for."""
        task, from_s, to_s = start.task, begun_s + start.start_s, begun_s + end_s
        if task.pool != BESIDE:
            self._book.idle(task.pool, WHOLE, Cause.DATA, step, begun_s + free[task.pool], from_s)
            free[task.pool] = end_s
        if one is None:
            self._book.work(task.pool, WHOLE, task.name, step, from_s, to_s)
            return
        lanes = self._layout.lanes[task.pool]
        for lane in range(1, lanes + 1):
            done_s = min(from_s + one.lanes[lane - 1], to_s) if lane <= len(one.lanes) else from_s
            self._book.work(task.pool, lane, task.name, step, from_s, done_s)
            self._book.idle(task.pool, lane, Cause.TAIL, step, done_s, to_s)

    def _rest(self, step: int, begun_s: float, free: dict[str, float], end: float, overhead: float) -> None:
        """Write down what pools do that have done their part."""
        samplers = {self._layout.pool_of(stage) for stage in self._layout.generating}
        trainers = {task.pool for task in self._layout.tasks if task.stage not in self._layout.generating}
        for pool, free_s in free.items():
            cause = Cause.WEIGHTS if pool in samplers - trainers else Cause.NOTHING
            self._book.idle(pool, WHOLE, cause, step, begun_s + free_s, begun_s + end)
            self._book.idle(pool, WHOLE, Cause.OVERHEAD, step, begun_s + end, begun_s + end + overhead)
