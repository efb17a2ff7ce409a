"""Search: find the best plan for every way to share a cluster, and explain why the others are slower.

units ─> placements: set partitions, with each freshness bound ─ lowest bound first ─────────────────────────┐
  ┌──────────────────────────────────────────────────────────────────────────────────────────────────────────┘
  ├─> ways: grids for the units of a pool on a machine type and size, changed one by one until none is faster
  └─> allocations of sizes to pools, those with the lowest bounds kept ─ evaluate the best few ─> Ranked

The search is a heuristic: it chooses grids pool by pool by the pool's busy seconds, and evaluates few
allocations. benchmarks/log.md compares it with an exact search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from rillflow.errors import PlanError
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostsOf
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import Hardware
from rillflow_planner.misfit import no_plan_fits
from rillflow_planner.problem import Problem
from rillflow_planner.ranking import ClusterSize, Goal, Ranked, Ranking, SearchObjective, explained, rank
from rillflow_planner.variant import Variant, preference
from rillflow_planner.workload import Lengths, lengths_of_mean

KEPT = 8
"""Number of ranked placements."""


def search(
    problem: Problem,
    costs: CostsOf,
    *,
    objective: SearchObjective | None = None,
    freshness: Sequence[float] = (0,),
    separate_in_step: bool = False,
    recomputes: Sequence[bool] = (),
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
        recomputes: whether activations may be kept, recomputed, or either; by default as the problem says.
        kept: number of ranked placements.
        times: factors for the machines of other cluster sizes; those that split a machine are ignored.

    Raises:
        PlanError: no plan fits, or none meets the deadline.
    """
    objective, choices = objective or SearchObjective(), recomputes or (problem.recomputes,)
    _require_prices(problem, objective)
    other = [scaled(problem.hardware, Fraction(factor)) for factor in sorted(times)]
    clusters = [hardware for hardware in other if hardware is not None]
    largest = max([problem.hardware, *clusters], key=lambda hardware: hardware.devices)
    whole = replace(problem, hardware=largest)
    steps = [replace(whole, samples_apart=False, freshness=0)] if 0 in freshness else []
    steps += [whole.apart(bound) for bound in sorted(set(freshness)) if bound or separate_in_step]
    made = []
    for step in steps:
        ways = [replace(step, recomputes=one) for one in choices]
        made.append([Variant(one, costs(one), objective) for one in ways])
    ranking = _search(made, problem.hardware, kept)
    if not ranking.best:
        if math.isfinite(objective.deadline_s):
            again: Any = {"separate_in_step": separate_in_step, "recomputes": choices}
            slow = search(problem, costs, freshness=freshness, **again)
            what = f"no plan of {problem.graph.name} meets the deadline of {objective.deadline_s:g} s"
            raise PlanError(
                what,
                why=f"the fastest step takes {slow.best[0].value:.4g} s",
                fix="allow more seconds, more devices, or a freshness bound",
            )
        raise no_plan_fits(replace(made[0][-1].problem, hardware=problem.hardware), costs)
    sizes: list[ClusterSize] = []
    for hardware in clusters:
        is_own = hardware.devices == problem.hardware.devices
        found = ranking if is_own else _search(made, hardware, 1)
        sizes.append(_sized(problem, hardware, next(iter(found.best), None), sizes))
    return replace(ranking, sizes=tuple(sizes))


def ranked_as_placed(
    problem: Problem,
    costs: CostsOf,
    plan: Plan,
    recomputes: Sequence[bool] = (),
    times: Sequence[Fraction | int] = (),
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
        larger, found = replace(plan, pools=pools, units=units), []
        for one in recomputes or (problem.recomputes,):
            step = replace(problem.of_plan(plan), hardware=hardware, recomputes=one)
            try:
                found.append(rank(step, costs(step), larger, SearchObjective()))
            except PlanError as error:
                misfit = error
        if not found:
            raise misfit
        return min(found, key=lambda one: one.value)

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


def _search(made: Sequence[Sequence[Variant]], hardware: Hardware, kept: int) -> Ranking:
    """Return the best plans within a cluster; variants of one bound share their placements."""
    room = np.array([fleet.devices for fleet in hardware.fleets])
    every = [(alike, partition) for alike in made for partition in alike[0].partitions]
    bounds = [min(one.bound(partition, room) for one in alike) for alike, partition in every]
    found: list[Ranked] = []
    nowhere = 0
    for place in np.argsort(bounds, kind="stable"):
        alike, partition = every[place]
        if len(found) >= kept and bounds[place] > found[kept - 1].value:
            break
        ranked = [one.best(partition, room) for one in alike if np.isfinite(bounds[place])]
        best = min((one for one in ranked if one is not None), key=preference, default=None)
        nowhere += best is None
        found = sorted([*found, *([] if best is None else [best])], key=preference)
    own = [replace(one, problem=replace(one.problem, hardware=hardware)) for one in found[:kept]]
    ranked = [*own[:1], *(explained(one, own[0]) for one in own[1:])]
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
            fix='set in every [[machine_type]] a price such as price = "2.5 $/h"',
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


def variations(costs: CostsOf, best: Sequence[Ranked]) -> list[Variation]:
    """Evaluate the best plans for answers half and twice as long, and for a heavier tail."""
    found = []
    for what, response in _changed(best[0].problem.workload.response):
        steps = [step_s(one, costs, response) for one in best]
        first = min(range(len(steps)), key=lambda place: steps[place])
        found.append(Variation(what=what, step_s=steps[0], best=first))
    return found


def step_s(one: Ranked, costs: CostsOf, response: Lengths) -> float:
    """Return the seconds of a plan's step for other lengths of answers; infinite if it does not fit."""
    step = replace(one.problem, workload=replace(one.problem.workload, response=response))
    try:
        return evaluate(step, costs(step), one.plan).step_s
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
