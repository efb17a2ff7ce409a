"""Reasons: what a placement is behind the best by; what is missing where no plan fits.

a ranked plan ─┬─ as good ────────────────────────────────────────────────> tie
               ├─ as fast, on more devices ───────────────────────────────> devices
               ├─ half of what is lost is on the way between pools ───────> transfer
               ├─ its devices wait for 5 points more of the step ─────────> idle
               ├─ its stages take longer, by half of it ──────────────────> slower stages
               ├─ they do not, but wait for each other ───────────────────> turns
               └─ it is faster by formulas, and not when simulated ───────> simulated
no plan ─ what is missing on which role, and the least cluster
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from rillflow.errors import PlanError
from rillflow.planner.cost_model.costs import CostModel, CostsOf
from rillflow.planner.hardware import Fleet
from rillflow.planner.plan import Plan
from rillflow.planner.problem import Problem, Unit
from rillflow.planner.ranking import Cause, Objective, Ranked, Ranking
from rillflow.planner.seating import bytes_text, least_devices, smallest_option
from rillflow.planner.variant import partitions

MOST_UNITS_FOR_EVERY_SET = 4
"""Of more units, only all together and each apart are tried for the least cluster that would do."""


def explained(found: Ranked, winner: Ranked) -> Ranked:
    """The best plan of a placement, with why it is no better than the best of all."""
    mine, best = found.evaluation, winner.evaluation
    late = mine.step_s - best.step_s
    said = f"{mine.step_s:.4g} s, {late:.3g} s more: "
    moved = sum(mine.transfers_s) + mine.crossing_s
    if late <= 1e-9 * best.step_s:
        cause, why = Cause.TIE, f"as good; {_preferred(found.plan, winner.plan)}"
        if (found.value, mine.devices) != (winner.value, best.devices):
            took = f"the best takes {best.step_s:.4g} s on {best.devices}"
            cause, why = Cause.DEVICES, f"{mine.step_s:.4g} s on {mine.devices} devices; {took}"
    elif moved >= late / 2:
        cause, why = Cause.TRANSFER, f"{said}{moved:.3g} s on the way between pools"
    elif mine.idle_share - best.idle_share >= 0.05:
        pools = zip(found.plan.pools, mine.pools, strict=True)
        pool, use = max(pools, key=lambda one: one[0].devices * one[1].idle_share)
        idle = f"the {pool.devices} devices of pool {pool.name} idle {use.idle_share:.0%} of a step"
        cause, why = Cause.IDLE, said + idle
    else:
        more = {index: spent - best.seconds[index] for index, spent in mine.seconds.items()}
        index = max(more, key=lambda one: more[one])
        spent, less = mine.seconds[index], best.seconds[index]
        cause = Cause.SLOWER
        why = f"{said}{mine.names[index]} takes {spent:.3g} s, in the best plan {less:.3g} s"
        if sum(max(0.0, one) for one in more.values()) < late / 2:
            work, least = sum(mine.seconds.values()), sum(best.seconds.values())
            cause = Cause.TURNS
            why = f"{said}its stages take {work:.3g} s in sum, in the best plan {least:.3g} s side by side"
    return replace(found, cause=cause, why=why)


def order_as_shown(ranking: Ranking, shown_s: Sequence[float]) -> tuple[Ranking, list[int]]:
    """The ranking with its first plans in the order of what a step of each is shown to take.

    Args:
        ranking: by formulas.
        shown_s: seconds of a step of the first plans: in step as computed, ahead as simulated.

    Returns:
        The ranking, and where in the old one its first plans were.
    """
    order = sorted(range(len(shown_s)), key=lambda place: (shown_s[place], place))
    best = [*(ranking.best[place] for place in order), *ranking.best[len(order) :]]
    first = replace(best[0], cause=None, why="")
    behind = [explained(one, first) for one in best[1:]]
    for place, shown in enumerate(sorted(shown_s)[1:]):
        if behind[place].evaluation.step_s < first.evaluation.step_s:
            why = f"{shown:.4g} s a step when simulated"
            behind[place] = replace(behind[place], cause=Cause.SIMULATED, why=why)
    return replace(ranking, best=(first, *behind)), order


def no_plan_fits(
    problem: Problem, costs: CostsOf, objective: Objective, variants: Sequence[Problem]
) -> PlanError:
    """What to say where there is no plan: what is missing on which role, and the least cluster to do."""
    name, cluster = problem.graph.name, problem.hardware.name
    tables = [(one, costs(one)) for one in variants]
    if math.isfinite(objective.deadline_s) and any(
        all(_fits(one, own, unit) for unit in one.units) for one, own in tables
    ):
        return PlanError(
            f"no plan of {name} keeps the deadline of {objective.deadline_s:g} s",
            why=f"on {cluster} none is so fast",
            fix="allow more seconds, more devices, or a freshness bound; goal step shows the fastest",
        )
    step, own = min(tables, key=lambda one: len(one[0].units))
    alone = [[unit] for unit in step.units if not _fits(step, own, unit)]
    return PlanError(
        f"no plan of {name} fits into {cluster}",
        why=_missing(step, own, alone[0] if alone else step.units),
        fix=_least_cluster(step, own),
    )


def _preferred(plan: Plan, winner: Plan) -> str:
    """Which of two equal plans comes first, and why: the order of ``search``."""
    if len(winner.pools) < len(plan.pools):
        return "the best has fewer pools"
    if winner.freshness < plan.freshness:
        return "the best trains on fresher tokens"
    return "the best comes first by its names"


def _fits(problem: Problem, costs: CostModel, unit: Unit) -> bool:
    """Whether a unit fits alone on some number of devices of the cluster."""
    fleets = problem.hardware.fleets
    return any((least_devices(costs, [unit], one) or math.inf) <= one.devices for one in fleets)


def _missing(problem: Problem, costs: CostModel, units: Sequence[Unit]) -> str:
    """By how many bytes units are too large for the place where least is missing, and which takes most."""
    found: list[tuple[float, str]] = []
    for fleet in problem.hardware.fleets:
        for devices in fleet.sizes:
            smallest = {
                unit.name: smallest_option(costs.options(unit, fleet.name, devices)) for unit in units
            }
            options = {name: option for name, option in smallest.items() if option is not None}
            for unit in units:
                if unit.name not in options:
                    short = costs.shortfall_bytes(unit, fleet.name, devices)
                    found.append((short, f"{unit.name} on {devices} of {fleet.name}"))
            if len(options) == len(units):
                room = costs.room_bytes(fleet.name, options)
                largest = max(options, key=lambda one: options[one].bytes)
                text = f"{' + '.join(options)} on {devices} of {fleet.name}, {largest} the largest"
                found.append((max(-room, 0.0), text))
    short, where = min(found)
    if not math.isfinite(short):
        return f"no grid cuts {where} evenly"
    if short == 0.0:
        return f"no room is left to generate a single row: {where}"
    return f"{bytes_text(short)} are missing on every device: {where}"


def _least_cluster(problem: Problem, costs: CostModel) -> str:
    """The least devices of each fleet's kind that would hold a plan."""
    least = {fleet.name: _least_devices(problem, costs, fleet) for fleet in problem.hardware.fleets}
    told = [
        f"{least[fleet.name]} {fleet.device.name} like those of {fleet.name}, here are {fleet.devices}"
        for fleet in problem.hardware.fleets
        if least[fleet.name]
    ]
    if not told:
        return "smaller models, shorter rows or devices with more memory: no number of these would do"
    return f"the least cluster that would do has {' or '.join(told)}"


def _least_devices(problem: Problem, costs: CostModel, fleet: Fleet) -> int | None:
    """The least devices that hold all units in pools; none where no number does."""
    needed = cache(lambda pool: least_devices(costs, [problem.units[unit] for unit in pool], fleet) or 0)
    names = [unit.name for unit in problem.units]
    tried = partitions(names)
    if len(names) > MOST_UNITS_FOR_EVERY_SET:
        tried = (one for one in tried if len(one) in (1, len(names)))
    return min((sum(map(needed, one)) for one in tried if all(map(needed, one))), default=None)
