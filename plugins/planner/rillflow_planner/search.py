"""Search: find the best plan for every way to share a cluster, and explain why the others are slower.

units ─> placements: set partitions, with each freshness bound ─ lowest bound first ─────────────────────────┐
  ┌──────────────────────────────────────────────────────────────────────────────────────────────────────────┘
  ├─> ways: grids for the units of a pool on a machine type and size, changed one by one until none is faster
  └─> allocations of sizes to pools, those with the lowest bounds kept ─ evaluate the best few ─> Ranked

The search is a heuristic: it chooses grids pool by pool by the pool's busy seconds, and evaluates few
allocations. docs/log.md compares it with an exact search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostsOf
from rillflow_planner.evaluate import evaluate, predicted
from rillflow_planner.hardware import Hardware
from rillflow_planner.misfit import no_plan_fits
from rillflow_planner.problem import Problem
from rillflow_planner.ranking import ClusterSize, Goal, Ranked, Ranking, SearchObjective, explained
from rillflow_planner.variant import Variant, preference
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

KEPT = 8
"""Number of ranked placements."""


def search(
    problem: Problem,
    costs: CostsOf,
    *,
    objective: SearchObjective | None = None,
    freshness: Sequence[float] = (0,),
    separate_in_step: bool = False,
    kept: int = KEPT,
    times: Sequence[Fraction | int] = (),
) -> Ranking:
    """Return the best plans of a problem, one per placement, and the best plan for other cluster sizes.

    Args:
        problem: the step; the search sets its sampler and freshness.
        costs: creates the cost model of a problem.
        objective: quantity to minimise; by default the seconds of a step.
        freshness: bounds to try; 0 generates on the policy's training devices, others on a separate sampler.
        separate_in_step: whether to also try bound 0 with a separate sampler, which waits during training.
        kept: number of ranked placements.
        times: factors for the machines of other cluster sizes; those that split a machine are ignored.

    Raises:
        PlanError: no plan fits, or none meets the deadline.
    """
    objective = objective or SearchObjective()
    _require_prices(problem, objective)
    other = [scaled(problem.hardware, Fraction(factor)) for factor in sorted(times)]
    clusters = [hardware for hardware in other if hardware is not None]
    largest = max([problem.hardware, *clusters], key=lambda hardware: hardware.devices)
    steps = [replace(problem, hardware=largest, samples_apart=False, freshness=0)] if 0 in freshness else []
    bounds = sorted(bound for bound in set(freshness) if bound or separate_in_step)
    steps += [replace(problem, hardware=largest).apart(bound) for bound in bounds]
    made = [Variant(one, costs(one), objective) for one in steps]
    ranking = _search(made, _room(problem.hardware), kept)
    if not ranking.best:
        if math.isfinite(objective.deadline_s):
            slow = search(problem, costs, freshness=freshness, separate_in_step=separate_in_step)
            what = f"no plan of {problem.graph.name} meets the deadline of {objective.deadline_s:g} s"
            raise PlanError(
                what,
                why=f"the fastest step takes {slow.best[0].value:.4g} s",
                fix="allow more seconds, more devices, or a freshness bound",
            )
        step = replace(made[0].problem, hardware=problem.hardware)
        raise no_plan_fits(step, costs)
    sizes: list[ClusterSize] = []
    for hardware in clusters:
        is_own = hardware.devices == problem.hardware.devices
        found = ranking if is_own else _search(made, _room(hardware), 1)
        sizes.append(_sized(problem, hardware, next(iter(found.best), None), sizes))
    return replace(ranking, sizes=tuple(sizes))


def ranked_as_placed(
    problem: Problem, costs: CostsOf, plan: Plan, times: Sequence[Fraction | int] = ()
) -> Ranking:
    """Return a given plan as a ranking, and the same layout with other numbers of data-parallel ranks.

    Raises:
        PlanError: the plan does not fit.
    """

    def ranked(hardware: Hardware, factor: Fraction) -> Ranked:
        pools = tuple(replace(pool, devices=int(pool.devices * factor)) for pool in plan.pools)
        units = {
            name: replace(unit, grid=replace(unit.grid, dp=int(unit.grid.dp * factor)))
            for name, unit in plan.units.items()
        }
        step = replace(problem.of_plan(plan), hardware=hardware)
        found, evaluation = predicted(step, costs(step), replace(plan, pools=pools, units=units))
        return Ranked(plan=found, evaluation=evaluation, value=evaluation.step_s)

    sizes: list[ClusterSize] = []
    for factor in sorted(map(Fraction, times)):
        hardware = scaled(problem.hardware, factor)
        if hardware is not None:
            try:
                best = ranked(hardware, factor)
            except PlanError:
                best = None
            sizes.append(_sized(problem, hardware, best, sizes))
    own = ranked(problem.hardware, Fraction(1))
    return Ranking(best=(own,), placements=1, nowhere=0, sizes=tuple(sizes))


def _sized(
    problem: Problem, hardware: Hardware, best: Ranked | None, before: Sequence[ClusterSize]
) -> ClusterSize:
    """Return the best plan of a cluster size with its gain over the size before it."""
    rows = problem.workload.rows / best.evaluation.step_s if best else 0.0
    last = before[-1].rows_per_s if before else 0.0
    gain = rows / last - 1 if last and best else None
    return ClusterSize(devices=hardware.devices, best=best, rows_per_s=rows, gain=gain)


def _room(hardware: Hardware) -> NDArray[np.int64]:
    return np.array([fleet.devices for fleet in hardware.fleets])


def _search(variants: Sequence[Variant], room: NDArray[np.int64], kept: int) -> Ranking:
    """Return the best plans within the given devices of each machine type."""
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
    """Return the cluster with ``factor`` times the machines.

    None if a machine type would not have whole machines.
    """
    fleets = []
    for fleet in hardware.fleets:
        machines = Fraction(fleet.devices, fleet.per_machine) * factor
        if machines.denominator != 1 or machines < 1:
            return None
        fleets.append(replace(fleet, devices=int(machines) * fleet.per_machine))
    return replace(hardware, fleets=tuple(fleets))


def _require_prices(problem: Problem, objective: SearchObjective) -> None:
    free = [fleet.name for fleet in problem.hardware.fleets if not fleet.price_per_hour]
    if objective.goal is Goal.COST and free:
        raise PlanError(
            f"the objective is cost, and machine type {free[0]} has no price",
            why="plans on machines without a price would always win",
            fix='set --price "2.5 $/h", or in every [[machine_type]] a price such as price = "2.5 $/h"',
        )


HEAVIER = 1.5
"""Factor on sigma for a heavier tail with the same mean."""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Prediction for a step with other lengths."""

    what: str
    """Description of the change."""
    step_s: float
    """Seconds of a step of the originally best plan; infinite if it no longer fits."""
    best: int
    """Index of the ranked plan that is then the best, from 0."""
    gain: float | None
    """Relative gain of the next cluster size; None if it was not computed."""


def variations(
    problem: Problem, costs: CostsOf, plans: Sequence[Plan], sizes: Sequence[ClusterSize]
) -> list[Variation]:
    """Evaluate plans and the next size for answers half and twice as long, and for a heavier tail."""
    found = []
    for what, response in _changed(problem.workload.response):
        workload = replace(problem.workload, response=response)
        steps = [step_s(problem, costs, plan, workload) for plan in plans]
        best = min(range(len(steps)), key=lambda place: steps[place])
        gain = gain_of(problem, costs, sizes, workload)
        found.append(Variation(what=what, step_s=steps[0], best=best, gain=gain))
    return found


def gain_of(
    problem: Problem, costs: CostsOf, sizes: Sequence[ClusterSize], workload: Workload
) -> float | None:
    """Return the gain of the next larger cluster for a workload, keeping the best plan of each size."""
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
    """Return the seconds of a plan's step for a workload; infinite if it does not fit."""
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
    """Scale lengths by a factor; a limit above all lengths stays unchanged."""
    if response.kind == "lognormal":
        return replace(response, median=times * response.median)
    values = tuple(max(1, round(times * value)) for value in response.known)
    limit = values[-1] if response.kind == "fixed" else max(response.limit, values[-1])
    return replace(response, values=values if response.values else (), limit=limit)
