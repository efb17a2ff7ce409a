"""Tail of generation: when to gather the last rows on few replicas, so that the others begin to score.

    t = 0                         t(R)          + move                            end of the tail
    all N replicas generate ──────┬─ m replicas: R unfinished rows ───────────────┬─ score too ─┐
                                  └─ N - m replicas: score the rows that have ended ────────────┴─> T(R, m)

``T(R, m) = t(R) + max(move + tail(R, m), score(all rows, on N - m replicas from t(R)))``, where the m
replicas join the scoring when their rows have ended (RLHFuse, arXiv 2409.13221, section 4). R = 0 is the step
without overlap: all rows end, then all replicas score. The rows and their scores do not depend on R.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model.compute import Setting
from rillflow_planner.cost_model.generation import Decoder, cached_bytes, running_rows
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.evaluate import StepEvaluation
from rillflow_planner.problem import Problem, Work
from rillflow_planner.ranking import PAYS
from rillflow_planner.workload import require_within

Floats = NDArray[np.float64]
LATE = 0.8
"""Share of the rows that are shorter than the one whose move is priced."""
MOST_ROWS = 4096
"""Most rows whose tail is simulated as a whole."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """A batch whose rows are generated and then scored on the same replicas.

    Raises:
        PlanError: no lengths are known, or a number is impossible.
    """

    lengths: tuple[int, ...]
    """Tokens of every row's completion, as seen in earlier steps or drawn from their distribution."""
    replicas: int
    """Replicas that generate, N."""
    token_s: Callable[[int], float]
    """Seconds of one decoding step with this number of running rows."""
    most_rows: int
    """Rows that a replica runs after gathering: without slower steps, and with room for their KV caches."""
    score_row_s: float
    """Seconds to score a row on one replica, summed over all scoring models."""
    send_row_s: float
    """Seconds to send the KV cache of a row to another replica."""
    reread_row_s: float
    """Seconds to compute the KV cache of a row again there."""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise PlanError(
                "no lengths of rows are known",
                why="the moment to gather rows depends on the lengths of completions",
                fix="run a step first, or give a distribution of lengths",
            )
        require_within("the shortest completion", min(self.lengths), 1, math.inf)
        for name in ("replicas", "most_rows", "score_row_s", "send_row_s", "reread_row_s"):
            require_within(name, vars(self)[name], int(not name.endswith("_s")), sys.float_info.max)

    @cached_property
    def parts(self) -> list[tuple[Floats, Floats]]:
        """Ascending lengths of the rows of each replica, and when they end without gathering."""
        parts = [np.sort(self.lengths[one :: self.replicas]) for one in range(self.replicas)]
        return [(part, _ends_s(self, part)) for part in parts]

    @cached_property
    def ends_s(self) -> Floats:
        """When the rows end without gathering, in ascending order."""
        return np.sort(np.concatenate([ends for _, ends in self.parts]))

    @property
    def move_row_s(self) -> float:
        """Seconds to move a row by the faster way."""
        return min(self.send_row_s, self.reread_row_s)

    @property
    def rereads(self) -> bool:
        """Whether computing a cache again is faster than sending it."""
        return self.reread_row_s < self.send_row_s

    def least_replicas(self, rows: int) -> int:
        """Return the least number of replicas that can run these rows."""
        return math.ceil(rows / self.most_rows)


@dataclass(frozen=True, kw_only=True)
class GatheringGain:
    """A batch with a threshold and a number of replicas for its tail."""

    rows: int
    """R: unfinished rows at which they are gathered; 0 for never."""
    replicas: int
    """m: replicas that run them."""
    begin_s: float
    """t(R): when they are gathered."""
    move_s: float
    """Seconds in which the last of them arrives."""
    tail_end_s: float
    """When the last row has ended."""
    total_s: float
    """T(R, m): when the last row is scored."""


def gathered(tail: Tail, rows: int, replicas: int) -> GatheringGain:
    """Return the times of a batch that gathers its last ``rows`` rows on ``replicas`` replicas.

    Raises:
        PlanError: more rows than the batch has, or more than the replicas can run.
    """
    count = len(tail.lengths)
    require_within("the threshold of rows to gather", rows, 0, count)
    replicas = replicas if rows else 0
    what = f"the number of replicas for {rows} rows, {tail.most_rows} on each,"
    require_within(what, replicas, tail.least_replicas(rows), tail.replicas)
    begin_s = float(tail.ends_s[count - rows - 1]) if rows < count else 0.0
    left = sorted((_left_tokens(part, begin_s) for part in tail.parts), key=len, reverse=True)
    kept, moving = left[:replicas], [tokens for part in left[replicas:] for tokens in part]
    received = [0] * replicas
    for tokens in sorted(moving, reverse=True):
        place = min(range(replicas), key=lambda one: len(kept[one]))
        kept[place].append(tokens)
        received[place] += 1
    move_s = max(received, default=0) * tail.move_row_s
    tails = [begin_s + move_s + _ends_s(tail, part) for part in kept]
    done = [*tail.ends_s[tail.ends_s <= begin_s].tolist(), *np.sort(np.concatenate([[], *tails])).tolist()]
    free = [begin_s] * (tail.replicas - replicas) + [float(part.max(initial=begin_s)) for part in tails]
    return GatheringGain(
        rows=rows,
        replicas=replicas,
        begin_s=begin_s,
        move_s=move_s,
        tail_end_s=max(done),
        total_s=_scored_s(tail, done, free),
    )


def best_gathering(tail: Tail, *, step: float = 0.05, most: float = 0.5) -> GatheringGain:
    """Return the threshold and the number of replicas of the least ``total_s``; no gathering wins ties.

    Args:
        tail: the batch.
        step: distance of tried thresholds, as a share of the batch.
        most: largest tried threshold, as a share of the batch.
    """
    count = len(tail.lengths)
    tried = [gathered(tail, 0, 0)]
    for rows in sorted({round(share * step * count) for share in range(1, int(most / step) + 1)} - {0}):
        replicas = tail.least_replicas(rows)
        while replicas < tail.replicas:
            tried.append(gathered(tail, rows, replicas))
            replicas += max(1, replicas // 2)
    return min(tried, key=lambda each: (each.total_s, each.rows, each.replicas))


@dataclass(frozen=True, kw_only=True)
class GatherProposal:
    """When to gather the last rows of a planned step."""

    rows: int
    """Unfinished rows at which they are gathered."""
    replicas: int
    """Replicas that then run them."""
    by: Literal["cache", "tokens"]
    """Whether their KV caches are sent, or computed again from their tokens."""
    seconds: float
    """Seconds of generation and scoring."""
    without_s: float
    """The same without gathering."""
    is_assumed: bool
    """Whether the lengths of answers are assumed."""


def proposed(problem: Problem, placed: StepEvaluation) -> GatherProposal | None:
    """Return when to gather the last rows of a plan's step; None if that does not pay.

    A model scores while rows are generated if every generating device holds it whole.
    """
    workload = problem.workload
    sampler = next((seat for seat in placed.units.values() if seat.decoder is not None), None)
    if sampler is None or sampler.decoder is None or problem.freshness:
        return None
    beside = [
        (stage.index, seat.option.grid)
        for seat in placed.units.values()
        for stage in (problem.graph.stages[index] for index in seat.unit.stages)
        if seat.pool is sampler.pool and problem.work(stage) is Work.SCORE
    ]
    partial_s = sum(placed.seconds[index] for index, grid in beside if grid == Grid(dp=grid.devices))
    whole_s = sum(placed.seconds[index] for index, _ in beside) - partial_s
    if not partial_s:
        return None
    tail, times = _tail(problem, sampler, sampler.decoder, partial_s)
    best, without_s = best_gathering(tail), gathered(tail, 0, 0).total_s + whole_s
    if not best.rows or without_s < (1 + PAYS) * (best.total_s + whole_s):
        return None
    return GatherProposal(
        rows=best.rows * times,
        replicas=best.replicas * times,
        by="tokens" if tail.rereads else "cache",
        seconds=best.total_s + whole_s,
        without_s=without_s,
        is_assumed=workload.response.kind != "measured",
    )


def _tail(problem: Problem, sampler: Seat, decoder: Decoder, scoring_s: float) -> tuple[Tail, int]:
    """Return the tail of a step, or of one of its equal parts if it has many rows, and how many there are."""
    workload, fleet = problem.workload, problem.hardware.fleet(sampler.pool.machine_type)
    times = 1
    while workload.rows > MOST_ROWS * times and decoder.replicas % (2 * times) == 0:
        times *= 2
    lengths = workload.response.spread(math.ceil(workload.rows / times)).tolist()
    Random(0).shuffle(lengths)
    slots = running_rows(workload, decoder)

    @cache
    def token_s(rows: int) -> float:
        running = min(rows, slots)
        return float(decoder.token_s(running, running * workload.running_tokens) * rows / running)

    setting = Setting(problem=problem, shape=sampler.unit.shape, fleet=fleet)
    links, moved = setting.links, workload.prompt.mean + workload.response.quantile(LATE)
    near = sampler.pool.devices <= links.per_machine
    rate, latency_s = (links.inside, links.inside_s) if near else (links.between, links.between_s)
    tail = Tail(
        lengths=tuple(max(round(length), 1) for length in lengths),
        replicas=decoder.replicas // times,
        token_s=token_s,
        most_rows=max(min(int(decoder.capacity_tokens / workload.longest_tokens), decoder.most_rows), 1),
        score_row_s=scoring_s * decoder.replicas / workload.rows,
        send_row_s=moved * float(cached_bytes(setting, sampler.option.generate_tp)) / rate + latency_s,
        reread_row_s=decoder.prefill_s(moved),
    )
    return tail, times


def _ends_s(tail: Tail, tokens: Sequence[float] | Floats) -> Floats:
    """Return when rows with these remaining tokens end that begin together, in ascending order."""
    steps_s = [tail.token_s(rows) for rows in range(len(tokens), 0, -1)]
    return np.cumsum(np.diff(np.sort(tokens), prepend=0.0) * steps_s)


def _left_tokens(part: tuple[Floats, Floats], at_s: float) -> list[float]:
    """Return the remaining tokens of a replica's unfinished rows at a time."""
    ordered, ends = part
    reached = np.interp(at_s, [0.0, *ends], [0.0, *ordered])
    left: list[float] = (ordered[ends > at_s] - reached).tolist()
    return left


def _scored_s(tail: Tail, done: list[float], free: list[float]) -> float:
    """Return when all rows are scored: every row as soon as it has ended and a replica is free."""
    heapq.heapify(free)
    last = done[-1]
    for end in done:
        scored = max(free[0], end) + tail.score_row_s
        heapq.heapreplace(free, scored)
        last = max(last, scored)
    return last
