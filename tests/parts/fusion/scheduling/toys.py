"""Problems of equal stages or another cap, and the front of schedules, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import replace

from rillflow.placement.pipeline import Pipeline
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule
from rillflow_parts.fusion.scheduling.solve import BUDGET, schedule


def even(
    name: str,
    *,
    stages: int,
    micro_batches: int,
    forward_s: float,
    activation_bytes: float,
    backward_s: float | None = None,
    send_s: float = 0.0,
) -> Pipeline:
    """Return a pipeline of equal stages; a backward pass takes two forward passes unless given."""
    back = 2 * forward_s if backward_s is None else backward_s
    return Pipeline(
        name=name,
        micro_batches=micro_batches,
        forward_s=(forward_s,) * stages,
        backward_s=(back,) * stages,
        activation_bytes=activation_bytes,
        send_s=send_s,
    )


def within(problem: FusedProblem, memory_bytes: float) -> FusedProblem:
    """Return the problem with another memory cap."""
    return replace(problem, memory_bytes=memory_bytes)


def front(
    problem: FusedProblem,
    *,
    points: int = 16,
    budget: int = BUDGET,
    seed: int = 0,
    begin: FusedSchedule | None = None,
) -> list[FusedSchedule]:
    """Return the Pareto front of schedules by latency and peak memory.

    The first has the least latency. Each search has a lower memory cap than the peak found before it.

    Args:
        problem: two pipelines, with the largest cap of interest.
        points: searches, with caps equally spaced down to one micro-batch.
        budget: schedules to time in each search.
        seed: of the random draws.
        begin: a known schedule, for the first search.
    """
    least = max(each.activation_bytes for each in problem.pipelines)
    found = [schedule(problem, budget=budget, seed=seed, begin=begin)]
    apart = (max(found[0].peak_bytes) - least) / points
    while apart and max(found[-1].peak_bytes) - apart >= least * (1 - 1e-9):
        capped = within(problem, max(max(found[-1].peak_bytes) - apart, least))
        found.append(schedule(capped, budget=budget, seed=seed, begin=found[-1]))
    kept: list[FusedSchedule] = []
    for each in sorted(found, key=lambda each: (each.latency_s, max(each.peak_bytes))):
        if not kept or max(each.peak_bytes) < max(kept[-1].peak_bytes):
            kept.append(each)
    return kept
