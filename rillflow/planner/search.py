"""Search: the best plan of every way to share a cluster, and why each is behind the best.

units ─> placements: set partitions, in step or with a freshness bound ─ least bound first ──────────────────┐
  ┌──────────────────────────────────────────────────────────────────────────────────────────────────────────┘
  ├─> ways: the units of a pool at a fleet and size, grid by grid until no change of one is faster
  └─> allocations of sizes to pools, those with the least bounds kept ─ evaluate the best few ─> Ranked

A heuristic: grids are chosen pool by pool, by the seconds that the pool is busy, and few allocations are
evaluated. What that loses against an exact search: docs/log.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.planner.cost_model.costs import CostsOf
from rillflow.planner.evaluate import evaluate, no_plan_fits
from rillflow.planner.hardware import Hardware
from rillflow.planner.plan import Plan
from rillflow.planner.problem import Problem
from rillflow.planner.ranking import LITTLE, ClusterSize, Goal, Objective, Ranked, Ranking, explained
from rillflow.planner.variant import Variant, preference
from rillflow.planner.workload import Lengths, Workload, lengths_of_mean

KEPT = 8
"""Placements that are ranked."""


def search(
    problem: Problem,
    costs: CostsOf,
    *,
    objective: Objective | None = None,
    freshness: Sequence[int] = (0,),
    apart_in_step: bool = False,
    kept: int = KEPT,
    times: Sequence[Fraction | int] = (),
) -> Ranking:
    """The best plans of a problem, one of each placement, and the best on other sizes of the cluster.

    Args:
        problem: the step; whether it samples apart is decided here.
        costs: makes the cost model of a problem.
        objective: what is to be least; the step's seconds if nothing is said.
        freshness: bounds to try; 0 is in step, with generation where the policy is trained, more is a sampler
            apart.
        apart_in_step: whether bound 0 is tried with a sampler apart too, which waits while the policy trains.
        kept: placements that are ranked.
        times: how many times the machines other sizes have; those that would cut a machine are left out.

    Raises:
        PlanError: no plan fits, or none keeps the deadline.
    """
    objective = objective or Objective()
    _require_prices(problem, objective)
    other = [scaled(problem.hardware, Fraction(factor)) for factor in sorted(times)]
    clusters = [hardware for hardware in other if hardware is not None]
    largest = max([problem.hardware, *clusters], key=lambda hardware: hardware.devices)
    steps = [replace(problem, hardware=largest, samples_apart=False, freshness=0)] if 0 in freshness else []
    bounds = sorted(bound for bound in set(freshness) if bound or apart_in_step)
    steps += [replace(problem, hardware=largest).apart(bound) for bound in bounds]
    made = [Variant(one, costs(one), objective) for one in steps]
    ranking = _search(made, _room(problem.hardware), kept)
    if not ranking.best:
        if math.isfinite(objective.deadline_s):
            fastest = search(problem, costs, freshness=freshness, apart_in_step=apart_in_step).best[0].value
            what = f"no plan of {problem.graph.name} keeps the deadline of {objective.deadline_s:g} s"
            raise PlanError(
                what,
                why=f"the fastest step takes {fastest:.4g} s",
                fix="allow more seconds, more devices, or a freshness bound",
            )
        step = replace(made[0].problem, hardware=problem.hardware)
        raise no_plan_fits(step, costs(step))
    sizes: list[ClusterSize] = []
    for hardware in clusters:
        is_own = hardware.devices == problem.hardware.devices
        found = ranking if is_own else _search(made, _room(hardware), 1)
        best = next(iter(found.best), None)
        rows = problem.workload.rows / best.evaluation.step_s if best else 0.0
        before = sizes[-1].rows_per_s if sizes else 0.0
        gain = rows / before - 1 if before and best else None
        sizes.append(ClusterSize(devices=hardware.devices, best=best, rows_per_s=rows, gain=gain))
    return replace(ranking, sizes=tuple(sizes))


def _room(hardware: Hardware) -> NDArray[np.int64]:
    return np.array([fleet.devices for fleet in hardware.fleets])


def _search(variants: Sequence[Variant], room: NDArray[np.int64], kept: int) -> Ranking:
    """The best plans on so many devices of each fleet."""
    every = [(variant, partition) for variant in variants for partition in variant.partitions]
    bounds = [variant.bound(partition, room) for variant, partition in every]
    found: list[Ranked] = []
    nowhere = 0
    for place in np.argsort(bounds, kind="stable"):
        variant, partition = every[place]
        if len(found) >= kept and bounds[place] > found[kept - 1].value:
            break
        best = variant.best(partition, room) if np.isfinite(bounds[place]) else None
        nowhere += best is None
        found = sorted([*found, *([] if best is None else [best])], key=preference)
    ranked = [*found[:1], *(explained(one, found[0]) for one in found[1:kept])]
    return Ranking(best=tuple(ranked), placements=len(every), nowhere=nowhere)


def scaled(hardware: Hardware, factor: Fraction) -> Hardware | None:
    """So many times the machines; none where that is no whole number of each kind."""
    fleets = []
    for fleet in hardware.fleets:
        machines = Fraction(fleet.devices, fleet.per_machine) * factor
        if machines.denominator != 1 or machines < 1:
            return None
        fleets.append(replace(fleet, devices=int(machines) * fleet.per_machine))
    return replace(hardware, fleets=tuple(fleets))


def _require_prices(problem: Problem, objective: Objective) -> None:
    free = [fleet.name for fleet in problem.hardware.fleets if not fleet.price_per_hour]
    if objective.goal is Goal.COST and free:
        raise PlanError(
            f"the least cost is asked for, and fleet {free[0]} has no price",
            why="what costs nothing would always win",
            fix='give every fleet a price, as in price = "2.5 $/h"',
        )


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
