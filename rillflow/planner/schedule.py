"""Schedule: when every stage of a step runs, if pools take their stages in turn and run beside one another.

graph, seconds of stages and edges, pools ─> tasks ─ in_turn ─> when every stage runs ─┬─> seconds of a step
                                                             latency, loads of pools ─┴─> period with a bound

A stage begins when what it reads has arrived and its pool is free, in the order of the program. So every end
is a maximum of sums of the durations: no duration that grows makes anything earlier. The simulator takes the
same rule from one batch to the next: a pool is free where the batch before has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rillflow.graph.graph import Graph
from rillflow.planner.grid import Numbers

BESIDE = ""
"""The pool of what runs beside the devices: formulas, functions; it is always free."""
_SETTLED, _COUNTED = 64, 256
"""Steps of a period's mean: those before it, and those it is made of."""


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """A stage as pools take it; its numbers may be those of many plans at once."""

    stage: int
    """Its index in the graph."""
    name: str
    """Its name in the graph."""
    pool: str
    """Whose devices it holds; empty for what runs beside them."""
    seconds: Any
    """What it takes."""
    inputs: Mapping[int, float]
    """Seconds on its way of what it reads, by the stage it comes from; what none makes is there already."""


@dataclass(frozen=True, kw_only=True)
class Timing(StageTask):
    """A stage, and when it runs, from the beginning of its step."""

    start_s: Any
    """When what it reads has arrived and its pool is free."""
    end_s: Any
    """When its result is there."""


def tasks_of(
    graph: Graph, *, seconds: Sequence[Numbers], pools: Sequence[str], transfers: Sequence[float]
) -> tuple[StageTask, ...]:
    """A step's stages, in the order of the program.

    Args:
        graph: the step.
        seconds: of every stage, in the order of ``graph.stages``.
        pools: whose devices every stage holds; ``BESIDE`` for none.
        transfers: seconds of every edge, in the order of ``graph.edges``.
    """
    inputs: list[dict[int, float]] = [{} for _ in graph.stages]
    for edge, spent in zip(graph.edges, transfers, strict=True):
        known = inputs[edge.destination]
        known[edge.source] = max(spent, known.get(edge.source, 0.0))
    return tuple(
        StageTask(stage=stage.index, name=stage.name, pool=pool, seconds=spent, inputs=known)
        for stage, pool, spent, known in zip(graph.stages, pools, seconds, inputs, strict=True)
    )


def in_turn(
    tasks: Iterable[StageTask],
    *,
    begin_s: float = 0.0,
    free_s: dict[str, Any] | None = None,
    latest: Callable[[Any, Any], Any] = max,
) -> tuple[Timing, ...]:
    """When tasks run that all may begin at one time.

    Args:
        tasks: in the order of the program.
        begin_s: when they may begin.
        free_s: by pool, when it is free; brought up to date.
        latest: ``np.maximum`` for many plans at once whose stages lie on the same pools.
    """
    free_s = {} if free_s is None else free_s
    ends: dict[int, Any] = {}
    found = []
    for task in tasks:
        start = latest(begin_s, free_s.get(task.pool, begin_s))
        for source, spent in task.inputs.items():
            start = latest(start, ends.get(source, begin_s) + spent)
        ends[task.stage] = start + task.seconds
        if task.pool != BESIDE:
            free_s[task.pool] = ends[task.stage]
        found.append(Timing(**vars(task), start_s=start, end_s=ends[task.stage]))
    return tuple(found)


def last_s(timings: Iterable[Timing]) -> float:
    """When the last of them has ended."""
    return max((timing.end_s for timing in timings), default=0.0)


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
    """
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
