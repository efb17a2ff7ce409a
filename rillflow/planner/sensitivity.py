"""Sensitivity: what other lengths do to a decision, and what would have to be true for more devices to pay.

plans of a ranking, best plans by size ─ evaluated with other lengths, more prompts ─> Variation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rillflow.errors import PlanError
from rillflow.planner.cost_model.costs import CostsOf
from rillflow.planner.evaluate import evaluate
from rillflow.planner.plan import Plan
from rillflow.planner.problem import Problem
from rillflow.planner.ranking import LITTLE, ClusterSize
from rillflow.planner.search import scaled
from rillflow.planner.workload import Lengths, Workload, lengths_of_mean

HEAVIER = 1.5
"""How much larger sigma is in a heavier tail of the same mean."""
BATCHES = (2, 4, 8)
"""How many times the prompts are tried."""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A step with other lengths."""

    what: str
    """What differs."""
    step_s: float
    """Seconds of the plan that is best as said; infinite where it no longer fits."""
    best: int
    """The place of the ranked plan that is best then, from 0."""
    gain: float | None
    """What the next size brings then, as a share; none where it was not looked at."""


def variations(
    problem: Problem, costs: CostsOf, plans: Sequence[Plan], sizes: Sequence[ClusterSize]
) -> list[Variation]:
    """Plans and the next size with answers half and twice as long, and with a heavier tail."""
    found = []
    for what, response in _changed(problem.workload.response):
        workload = replace(problem.workload, response=response)
        steps = [step_s(problem, costs, plan, workload) for plan in plans]
        best = min(range(len(steps)), key=lambda place: steps[place])
        gain = gain_of(problem, costs, sizes, workload)
        found.append(Variation(what=what, step_s=steps[0], best=best, gain=gain))
    return found


def prompts_that_pay(problem: Problem, costs: CostsOf, sizes: Sequence[ClusterSize]) -> int | None:
    """The least prompts of a step, of those tried, with which the next size gains ``LITTLE`` or more."""
    for times in BATCHES:
        workload = replace(problem.workload, prompts=times * problem.workload.prompts)
        gain = gain_of(problem, costs, sizes, workload)
        if gain is not None and gain >= LITTLE:
            return workload.prompts
    return None


def gain_of(
    problem: Problem, costs: CostsOf, sizes: Sequence[ClusterSize], workload: Workload
) -> float | None:
    """What the size after the cluster's own brings with such rows, each on its best plan for those said."""
    devices = problem.hardware.devices
    own = next((size.best for size in sizes if size.devices == devices), None)
    more = next((size for size in sizes if size.devices > devices), None)
    if own is None or more is None or more.best is None:
        return None
    hardware = scaled(problem.hardware, Fraction(more.devices, devices))
    assert hardware is not None, "a larger cluster has whole machines"
    larger = replace(problem, hardware=hardware)
    now, then = step_s(problem, costs, own.plan, workload), step_s(larger, costs, more.best.plan, workload)
    return now / then - 1 if max(now, then) < float("inf") else None


def step_s(problem: Problem, costs: CostsOf, plan: Plan, workload: Workload) -> float:
    """Seconds of a plan's step with such rows; infinite where they do not fit."""
    step = replace(problem.of_plan(plan), workload=workload)
    try:
        return evaluate(step, costs(step), plan).step_s
    except PlanError:
        return float("inf")


def _changed(response: Lengths) -> Iterator[tuple[str, Lengths]]:
    for what, times in (("answers half as long", 0.5), ("answers twice as long", 2.0)):
        yield what, _scaled(response, times)
    if response.kind == "lognormal" and response.mean < response.limit:
        heavy = lengths_of_mean(response.mean, response.limit, HEAVIER * response.sigma)
        yield f"a heavier tail (sigma {heavy.sigma:.2g}, the same mean)", heavy


def _scaled(response: Lengths, times: float) -> Lengths:
    """Lengths so many times as long, the limit as it is where there is one beyond the lengths."""
    if response.kind == "lognormal":
        return replace(response, median=times * response.median)
    values = tuple(max(1, round(times * value)) for value in response.known)
    limit = values[-1] if response.kind == "fixed" else max(response.limit, values[-1])
    return replace(response, values=values if response.values else (), limit=limit)
