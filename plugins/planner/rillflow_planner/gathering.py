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
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random
from typing import Literal

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model.compute import Setting
from rillflow_planner.cost_model.generation import Decoder, cached_bytes, running_rows
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.evaluate import StepEvaluation
from rillflow_planner.problem import Problem, Work
from rillflow_planner.ranking import PAYS

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
        if not self.lengths or min(self.lengths) < 1:
            raise PlanError(
                f"{len(self.lengths)} rows, of which the shortest has {min(self.lengths, default=0)} tokens",
                why="the moment to gather rows depends on the lengths of completions",
                fix="run a step first, or give a distribution of lengths",
            )
        if min(self.replicas, self.most_rows) < 1:
            raise PlanError(
                f"{self.replicas} replicas with {self.most_rows} rows each",
                why="a tail needs at least one replica that runs at least one row",
                fix="correct the counts",
            )
        if not all(0 <= s < math.inf for s in (self.score_row_s, self.send_row_s, self.reread_row_s)):
            raise PlanError(
                f"scoring, sending, rereading a row: {self.score_row_s}, {self.send_row_s}, "
                f"{self.reread_row_s} seconds",
                why="seconds are finite and at least 0",
                fix="correct the seconds",
            )

    @cached_property
    def parts(self) -> list[tuple[tuple[int, ...], list[float]]]:
        """Ascending lengths of the rows of each replica, and when they end without gathering."""
        parts = [tuple(sorted(self.lengths[one :: self.replicas])) for one in range(self.replicas)]
        return [(part, _ends_s(self, part)) for part in parts]

    @cached_property
    def ends_s(self) -> list[float]:
        """When the rows end without gathering, in ascending order."""
        return sorted(end for _, ends in self.parts for end in ends)

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
class Gathered:
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


def gathered(tail: Tail, rows: int, replicas: int) -> Gathered:
    """Return the times of a batch that gathers its last ``rows`` rows on ``replicas`` replicas.

    Raises:
        PlanError: more rows than the batch has, or more than the replicas can run.
    """
    count = len(tail.lengths)
    if not 0 <= rows <= count:
        raise PlanError(
            f"the threshold is {rows} rows, the batch has {count}",
            why="only rows of the batch can be unfinished",
            fix=f"take 0 to {count}; about a fifth of the batch is a good start",
        )
    if rows and not tail.least_replicas(rows) <= replicas <= tail.replicas:
        raise PlanError(
            f"{rows} rows on {replicas} of {tail.replicas} replicas",
            why=f"a replica runs {tail.most_rows} rows after gathering",
            fix=f"take {tail.least_replicas(rows)} to {tail.replicas} replicas, or a lower threshold",
        )
    ordered = tail.ends_s
    begin_s = ordered[count - rows - 1] if rows < count else 0.0
    if not rows:
        return _scored(tail, ordered, [begin_s] * tail.replicas, begin_s, 0.0, (0, 0))
    left = [_left_tokens(tail, part, begin_s) for part in tail.parts]
    left.sort(key=len, reverse=True)
    kept, moving = left[:replicas], [tokens for part in left[replicas:] for tokens in part]
    received = [0] * replicas
    for tokens in sorted(moving, reverse=True):
        place = min(range(replicas), key=lambda one: len(kept[one]))
        kept[place].append(tokens)
        received[place] += 1
    move_s = max(received) * tail.move_row_s
    tails = [[begin_s + move_s + end for end in _ends_s(tail, part)] for part in kept]
    done = [end for end in ordered if end <= begin_s] if rows < count else []
    done += sorted(end for part in tails for end in part)
    free = [begin_s] * (tail.replicas - replicas) + [max(part, default=begin_s) for part in tails]
    return _scored(tail, done, free, begin_s, move_s, (rows, replicas))


def best_gathering(tail: Tail, *, step: float = 0.05, most: float = 0.5) -> Gathered:
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
        return decoder.token_s(running, running * workload.running_tokens) * rows / running

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


def _ends_s(tail: Tail, tokens: Sequence[float]) -> list[float]:
    """Return when rows with these remaining tokens end that begin together, in ascending order."""
    now, reached, found = 0.0, 0.0, []
    ordered = sorted(tokens)
    for place, length in enumerate(ordered):
        now += (length - reached) * tail.token_s(len(ordered) - place)
        reached = length
        found.append(now)
    return found


def _left_tokens(tail: Tail, part: tuple[tuple[int, ...], list[float]], at_s: float) -> list[float]:
    """Return the remaining tokens of a replica's unfinished rows at a time."""
    ordered, ends = part
    ended = bisect_right(ends, at_s)
    if ended == len(ordered):
        return []
    since_s, reached = (ends[ended - 1], ordered[ended - 1]) if ended else (0.0, 0)
    reached_now = reached + (at_s - since_s) / tail.token_s(len(ordered) - ended)
    return [length - reached_now for length in ordered[ended:]]


def _scored(
    tail: Tail, done: list[float], free: list[float], begin_s: float, move_s: float, chosen: tuple[int, int]
) -> Gathered:
    """Return the times of scoring: every row as soon as it has ended and a replica is free."""
    known = bisect_right(done, begin_s)
    free = _busy_until(free, known, tail.score_row_s)
    heapq.heapify(free)
    last = max(done[-1], max(free) if known else 0.0)
    for end in done[known:]:
        scored = max(heapq.heappop(free), end) + tail.score_row_s
        heapq.heappush(free, scored)
        last = max(last, scored)
    return Gathered(
        rows=chosen[0],
        replicas=chosen[1],
        begin_s=begin_s,
        move_s=move_s,
        tail_end_s=done[-1],
        total_s=last,
    )


def _busy_until(free: list[float], rows: int, row_s: float) -> list[float]:
    """Return when replicas are free again after these rows, which all wait; each takes the first free one.

    Whole rounds of rows up to a common time are counted, and only the last ones dealt one by one.
    """
    low, high = min(free), max(free) + rows * row_s

    def begun(until_s: float) -> list[int]:
        return [max(math.ceil((until_s - one) / row_s), 0) for one in free]

    for _ in range(40 if row_s > 0 else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(begun(middle)) <= rows else (low, middle)
    counts = begun(low) if row_s > 0 else [0] * len(free)
    busy = [one + count * row_s for one, count in zip(free, counts, strict=True)]
    heapq.heapify(busy)
    for _ in range(rows - sum(counts) if row_s > 0 else 0):
        heapq.heappush(busy, heapq.heappop(busy) + row_s)
    return busy
