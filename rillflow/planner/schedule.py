"""Schedule: when every stage of a step runs, if pools take their stages in turn and run beside one another.

stage seconds, pools ─┬─> start and end of every stage ──────────> seconds of a step in step
edge seconds ─────────┘               └─ latency, loads of pools ─> period with a freshness bound

A stage begins when what it reads has arrived and its pool is free, in the order of the program. So every end
is a maximum of sums of the durations: no duration that grows makes anything earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rillflow.errors import PlanError
from rillflow.graph.graph import Graph
from rillflow.planner.cost_model.numbers import Numbers

BESIDE = ""
"""The pool of what runs beside the devices: formulas, functions."""
_SETTLED, _COUNTED = 64, 256
"""Steps of a period's mean: those before it, and those it is made of."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a stage runs, from the beginning of its step."""

    stage: int
    """Its index in the graph."""
    pool: str
    """Whose devices it holds; empty for what runs beside them."""
    start_s: float
    """When what it reads has arrived and its pool is free."""
    end_s: float
    """When its result is there."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step's stages in time.

    Example:
        schedule(graph, seconds=seconds, pools=pools, transfers=transfers).step_s
    """

    timings: tuple[Timing, ...]
    """By stage, in the order of the program."""

    @property
    def step_s(self) -> float:
        """Seconds until the last stage has ended."""
        return max((timing.end_s for timing in self.timings), default=0.0)

    def busy_s(self, pool: str) -> float:
        """Seconds in which a pool computes."""
        return sum(timing.end_s - timing.start_s for timing in self.timings if timing.pool == pool)


@dataclass(frozen=True, kw_only=True)
class Times:
    """When stages begin and end: a number each, or one of every plan."""

    starts: Sequence[Numbers]
    """By stage."""
    ends: Sequence[Numbers]
    """By stage."""


def schedule(
    graph: Graph, *, seconds: Sequence[float], pools: Sequence[str], transfers: Sequence[float]
) -> Schedule:
    """When every stage runs.

    Args:
        graph: the step.
        seconds: of every stage, in the order of ``graph.stages``.
        pools: whose devices every stage holds; ``BESIDE`` for none.
        transfers: seconds of every edge, in the order of ``graph.edges``.
    """
    found = times(graph, seconds, pools, transfers)
    return Schedule(
        timings=tuple(
            Timing(stage=index, pool=pools[index], start_s=float(start), end_s=float(end))
            for index, (start, end) in enumerate(zip(found.starts, found.ends, strict=True))
        )
    )


def times(
    graph: Graph, seconds: Sequence[Numbers], pools: Sequence[str], transfers: Sequence[Numbers]
) -> Times:
    """The same of one plan, or of many at once whose stages lie on the same pools."""
    inward: list[list[int]] = [[] for _ in graph.stages]
    for number, edge in enumerate(graph.edges):
        inward[edge.destination].append(number)
    starts: list[Numbers] = []
    ends: list[Numbers] = []
    free: dict[str, Numbers] = {}
    for stage in graph.stages:
        pool = pools[stage.index]
        start: Numbers = free.get(pool, 0.0)
        for number in inward[stage.index]:
            source = graph.edges[number].source
            sent = ends[source] if source >= 0 else 0.0
            start = np.maximum(start, sent + transfers[number])
        starts.append(start)
        ends.append(start + seconds[stage.index])
        if pool != BESIDE:
            free[pool] = ends[-1]
    return Times(starts=starts, ends=ends)


def period_s(loads: Iterable[float], *, latencies_s: Sequence[float], freshness: int) -> float:
    """Seconds from one update to the next where generation runs ahead, on average over many steps.

    Step b begins when step b - (k + 1) has ended, and steps end in order:

        end(b) = max(end(b - 1) + busiest pool, end(b - k - 1) + latency(b))

    With one latency that is ``max(loads, latency / (k + 1))``. With several it is more: a step that takes
    long holds up the next ones, which then begin together.

    Args:
        loads: seconds of a step in which each pool computes.
        latencies_s: from the beginning of a step's generation to the weights made of it being published, by
            equal chances.
        freshness: k, how many policy versions old a trained token may be.

    Raises:
        PlanError: the bound is negative.
    """
    if freshness < 0:
        raise PlanError(
            f"freshness is {freshness}",
            why="tokens cannot be newer than the weights",
            fix="0 is in step; 1 trains on tokens of the version before",
        )
    load, ahead = max(loads, default=0.0), freshness + 1
    if max(latencies_s) <= ahead * load:
        return load
    generator = np.random.Generator(np.random.Philox(key=np.array([0, 0], dtype=np.uint64)))
    settled, counted = -(-_SETTLED // ahead) * ahead, -(-_COUNTED // ahead) * ahead
    order = generator.permutation(np.resize(np.asarray(latencies_s), settled + counted))
    ends = [0.0] * ahead
    for latency in order.tolist():
        ends.append(max(ends[-1] + load, ends[-ahead] + latency))
    return (ends[-1] - ends[-1 - counted]) / counted
