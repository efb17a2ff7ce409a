"""Schedule: when every stage of a step runs. A pool runs one stage after the other; pools run in parallel.

graph, seconds of stages and edges, pools ─> tasks ─ in_turn ─> when every stage runs ─┬─> seconds of a step
                                                             latency, loads of pools ─┴─> period with a bound

A stage begins when its inputs have arrived and its pool is free, in program order. Every end time is thus a
maximum over sums of durations, so a longer duration never makes anything earlier. The simulator uses the same
rule from one batch to the next: a pool is free when the previous batch has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.graph.graph import Graph
from rillflow.placement.grid import Numbers

BESIDE = ""
"""Pool name of formulas and functions, which use no devices and never wait for a pool."""
_SETTLED, _COUNTED = 64, 256
"""Steps before the averaged period, and steps in its average."""


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """A stage for scheduling; numbers may be arrays over many plans."""

    stage: int
    """Index of the stage in the graph."""
    name: str
    """Name of the stage in the graph."""
    pool: str
    """Pool that the stage occupies; empty for stages without devices."""
    seconds: Any
    """Seconds of the stage."""
    inputs: Mapping[int, float]
    """Transfer seconds of its inputs by producing stage; inputs of the step are already available."""


@dataclass(frozen=True, kw_only=True)
class Timing(StageTask):
    """A stage with its times, relative to the start of its step."""

    start_s: Any
    """Time when its inputs have arrived and its pool is free."""
    end_s: Any
    """Time when its result is available."""


def tasks_of(
    graph: Graph, *, seconds: Sequence[Numbers], pools: Sequence[str], transfers: Sequence[float]
) -> tuple[StageTask, ...]:
    """Return a step's stages as tasks, in program order.

    Args:
        graph: the step.
        seconds: duration of every stage, in the order of ``graph.stages``.
        pools: pool that every stage occupies; ``BESIDE`` for none.
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
    """Return the times of tasks that may all begin at the same time.

    Args:
        tasks: tasks in program order.
        begin_s: earliest start.
        free_s: time when each pool is free; updated in place.
        latest: ``np.maximum`` for arrays over many plans whose stages use the same pools.
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
    """Return the end of the last timing."""
    return max((timing.end_s for timing in timings), default=0.0)


def period_s(loads: Iterable[float], *, latencies_s: Sequence[float], freshness: float) -> float:
    """Return the average seconds between two updates when generation runs ahead of training.

    Step b begins when step b - (k + 1) has ended, and steps end in order:

        end(b) = max(end(b - 1) + busiest pool, end(b - k - 1) + latency(b))

    With one latency, the result is ``max(loads, latency / (k + 1))``. With several latencies it is larger: a
    slow step delays the next ones, which then begin together.

    Args:
        loads: seconds of a step in which each pool computes.
        latencies_s: equally likely seconds from a step's first generation to the publish of its weights.
        freshness: k, the largest age of a trained token in policy versions.
    """
    load, ahead = max(loads, default=0.0), int(freshness) + 1
    if max(latencies_s) <= ahead * load:
        return load
    generator = np.random.Generator(np.random.Philox(key=np.array([0, 0], dtype=np.uint64)))
    settled, counted = -(-_SETTLED // ahead) * ahead, -(-_COUNTED // ahead) * ahead
    order = generator.permutation(np.resize(np.asarray(latencies_s), settled + counted))
    ends = [0.0] * ahead
    for latency in order.tolist():
        ends.append(max(ends[-1] + load, ends[-ahead] + latency))
    return (ends[-1] - ends[-1 - counted]) / counted


def counted_s(ends_s: NDArray[np.float64], *, made_s: float = 0.0, busy_s: float, freshness: float) -> float:
    """Return the seconds of a step when admission counts rows, as in verl and AReaL.

    A row begins when weights arrive. The next batch is formed w seconds later, of the rows that end first,
    and new weights arrive after ``busy_s``, so a step takes T = w + busy. A row of d seconds is passed over
    by ``ceil((d - w) / T)`` batches. w is the smallest wait with which that mean is at most k:
    then k steps' rows are left when a batch is formed. With k = 0 a batch waits for the longest row. Below
    k = 1, 1 - k of a step's rows begin after its weights have arrived: w is at least the time to make them.

    Args:
        ends_s: equally likely seconds from the start of a row to its end.
        made_s: seconds to make a step's rows if replicas never run out of rows.
        busy_s: seconds from the last batch of a step until its weights have arrived.
        freshness: k, the steps' rows that may have begun in advance; may be a fraction.
    """
    low = max(1.0 - freshness, 0.0) * made_s
    high = max(low, float(ends_s.max()))
    for _ in range(40):
        wait = (low + high) / 2
        passed = float(np.mean(np.ceil((ends_s - wait).clip(0.0) / max(wait + busy_s, 1e-9))))
        low, high = (wait, high) if passed > freshness else (low, wait)
    return high + busy_s
