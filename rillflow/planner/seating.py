"""Seating: the units of a plan on its pools, and what is missing where they do not fit.

Plan ─> option of every unit ─> room a pool has left ─┬─ too little ──> PlanError: bytes, role, least devices
                                                      └─ decoders ────> Seat of each unit
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rillflow.errors import PlanError, nearest
from rillflow.observe.wording import size
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.cost_model.transfers import Seat
from rillflow.planner.hardware import Fleet
from rillflow.planner.plan import Plan, require_possible
from rillflow.planner.problem import Problem, Unit

MOST_MACHINES = 4096
"""Beyond so many machines nobody is told that a larger cluster would do."""


def seated(problem: Problem, costs: CostModel, plan: Plan) -> Mapping[str, Seat]:
    """The units of a plan by name, in the order of the problem's.

    Raises:
        PlanError: the plan places other units than the problem has, more devices than there are, or more than
            fits into their memory.
    """
    require_possible(plan)
    for what, why in _unfit(problem, plan):
        raise PlanError(what, why=why)
    found = {}
    for pool in plan.pools:
        units = [unit for unit in problem.units if plan.units[unit.name].pool == pool.name]
        planned = {unit.name: plan.units[unit.name] for unit in units}
        options = {
            unit.name: costs.option(unit, pool.fleet, pool.devices, one.grid, one.generate_tp)
            for unit, one in zip(units, planned.values(), strict=True)
        }
        room = costs.room_bytes(pool.fleet, options)
        if room < 0:
            fleet = problem.hardware.fleet(pool.fleet)
            largest = max(options, key=lambda name: options[name].bytes)
            raise PlanError(
                f"{' + '.join(options)} on {pool.devices} {fleet.device.name} of {fleet.name} need "
                f"{size(-room)} more memory on every device",
                why=f"a device has {size(fleet.device.memory_bytes)}, and {largest} takes most of it",
                fix=_least_text(least_devices(costs, units, fleet), fleet),
            )
        for unit in units:
            option, decoder = options[unit.name], None
            if problem.generating.intersection(unit.stages):
                decoder = costs.decoder(unit, option, pool.fleet, pool.devices, room)
                if decoder is None:
                    raise PlanError(
                        f"{unit.name} on pool {pool.name} has no room to generate one row",
                        why=f"{size(room)} of a device are left for it beside {', '.join(options)}",
                        fix="give the pool more devices, move a unit to another, or raise generate_tp",
                    )
            found[unit.name] = Seat(unit=unit, pool=pool, option=option, decoder=decoder)
    return {unit.name: found[unit.name] for unit in problem.units}


def no_plan_fits(problem: Problem, costs: CostModel) -> PlanError:
    """What to say where there is no plan: what is missing on which role, and the least cluster to do."""

    def least_missing(units: Sequence[Unit]) -> tuple[float, str]:
        names = " + ".join(unit.name for unit in units)
        return min(
            (missing_bytes(costs, units, fleet, devices), f"{names} on {devices} of {fleet.name}")
            for fleet in problem.hardware.fleets
            for devices in fleet.sizes
        )

    every = [least_missing(units) for units in (*([unit] for unit in problem.units), problem.units)]
    missing, where = next((one for one in every if one[0]), every[-1])
    why = f"{size(missing)} are missing on every device: {where}"
    if not math.isfinite(missing):
        why = f"no grid cuts {where} evenly"
    elif not missing:
        why = f"no room is left to generate a single row: {where}"
    fixes = []
    for fleet in problem.hardware.fleets:
        apart = [least_devices(costs, [unit], fleet) or math.inf for unit in problem.units]
        least = min(least_devices(costs, problem.units, fleet) or math.inf, sum(apart))
        fixes.append(_least_text(int(least) if math.isfinite(least) else None, fleet))
    return PlanError(
        f"no plan of {problem.graph.name} fits into {problem.hardware.name}", why=why, fix="; or ".join(fixes)
    )


def missing_bytes(costs: CostModel, units: Sequence[Unit], fleet: Fleet, devices: int) -> float:
    """What every device lacks for units on their smallest options; infinite where nothing cuts one evenly."""
    smallest = {}
    for unit in units:
        options = costs.options(unit, fleet.name, devices)
        if not options:
            return costs.shortfall_bytes(unit, fleet.name, devices)
        smallest[unit.name] = min(options, key=lambda one: (one.bytes, one.grid, one.generate_tp))
    return max(-costs.room_bytes(fleet.name, smallest), 0.0)


def least_devices(costs: CostModel, units: Sequence[Unit], fleet: Fleet) -> int | None:
    """The least devices of a fleet, or of one with more machines of the kind, on which units fit together.

    None where more than ``MOST_MACHINES`` machines would not do. Each unit is tried on its smallest option.
    """
    sizes, machines = [size for size in fleet.sizes if size < fleet.per_machine], 1
    while machines < MOST_MACHINES:
        sizes.append(machines * fleet.per_machine)
        machines += max(1, machines // 8)
    return next((size for size in sizes if not missing_bytes(costs, units, fleet, size)), None)


def _least_text(least: int | None, fleet: Fleet) -> str:
    kind = f"{fleet.device.name} like those of {fleet.name}"
    if least is None:
        return f"smaller models, shorter rows, another device: {MOST_MACHINES} machines of {kind} will not do"
    return f"the least that would do is {least} {kind}, here are {fleet.devices}; or other devices for a unit"


def _unfit(problem: Problem, plan: Plan) -> Iterator[tuple[str, str]]:
    """What of a plan is not the problem's: other units, or machines that are not there; and why."""
    names = {unit.name for unit in problem.units}
    for name in sorted(names ^ set(plan.units)):
        does = "does not place" if name in names else "places"
        yield f"the plan {does} {name!r}", f"the units of {problem.graph.name} are {', '.join(sorted(names))}"
    if plan.freshness != problem.freshness:
        why = f"the problem's is {problem.freshness}; problem.of_plan(plan) is the problem of a plan"
        yield f"the plan's freshness is {plan.freshness}", why
    fleets = {fleet.name: fleet for fleet in problem.hardware.fleets}
    for name in dict.fromkeys(pool.fleet for pool in plan.pools):
        if name not in fleets:
            yield f"a pool lies in fleet {name!r}", f"the cluster has none; {nearest(name, fleets)}"
        sizes = [pool.devices for pool in plan.pools if pool.fleet == name]
        if fleets[name].machines_needed(sizes) > fleets[name].machines:
            what = f"pools of {', '.join(map(str, sizes))} devices in fleet {name}"
            yield what, f"it has {fleets[name].machines} machines of {fleets[name].per_machine} devices"
