"""Seating: the units of a plan on its pools, with the memory they take there and what generates in the rest.

Plan ─> option of every unit ─> room a pool has left ─┬─ too little ──> PlanError: bytes, role, least devices
                                                      └─ decoders ────> Seated units
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rillflow.errors import PlanError, nearest
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.cost_model.generation import Decoder
from rillflow.planner.grid import Option, Seat
from rillflow.planner.hardware import Fleet
from rillflow.planner.plan import Plan, PlannedPool, require_possible
from rillflow.planner.problem import Problem, Unit

MOST_MACHINES = 4096
"""Beyond so many machines nobody is told that a larger cluster would do."""


@dataclass(frozen=True, kw_only=True)
class Seated:
    """A unit on its pool."""

    unit: Unit
    """The model and its stages."""
    seat: Seat
    """Where it lies."""
    option: Option
    """How, and what it costs there."""
    room_bytes: float
    """What a device of its pool has left for a cache."""
    decoder: Decoder | None
    """A replica of it; none of a unit that does not generate."""


def seated(problem: Problem, costs: CostModel, plan: Plan) -> Mapping[str, Seated]:
    """The units of a plan by name, in the order of the problem's.

    Raises:
        PlanError: the plan places other units than the problem has, more devices than there are, or more than
            fits into their memory.
    """
    require_possible(plan)
    _require_fitting(problem, plan)
    found = {}
    for pool in plan.pools:
        units = [unit for unit in problem.units if plan.units[unit.name].pool == pool.name]
        found.update(_seated_on(problem, costs, plan, pool, units))
    return {unit.name: found[unit.name] for unit in problem.units}


def least_devices(costs: CostModel, units: Iterable[Unit], fleet: Fleet) -> int | None:
    """The least devices of a fleet, or of one with more machines of the kind, on which units fit together.

    None where more than ``MOST_MACHINES`` machines would not do. Each unit is tried on its smallest option.
    """
    units = tuple(units)
    within = [size for size in fleet.sizes if size < fleet.per_machine]
    machines = [1]
    while machines[-1] < MOST_MACHINES:
        machines.append(machines[-1] + max(1, machines[-1] // 8))
    for size in (*within, *(count * fleet.per_machine for count in machines)):
        smallest = {unit.name: smallest_option(costs.options(unit, fleet.name, size)) for unit in units}
        options = {name: option for name, option in smallest.items() if option is not None}
        if len(options) == len(units) and costs.room_bytes(fleet.name, options) >= 0:
            return size
    return None


def smallest_option(options: Sequence[Option]) -> Option | None:
    """The option with the least bytes in sum, or none of none."""
    return min(options, key=lambda option: (option.bytes, option.grid, option.generate_tp), default=None)


def does_not_fit(
    costs: CostModel, units: Sequence[Unit], fleet: Fleet, devices: int, *, missing_bytes: float, largest: str
) -> PlanError:
    """What to say of units that are too large for a pool."""
    least = least_devices(costs, units, fleet)
    kind = f"{fleet.device.name} of {fleet.name}"
    if least is None:
        fix = f"a smaller model or batch, or another device: {MOST_MACHINES} machines of {kind} would not do"
    elif least > fleet.devices:
        fix = f"the least cluster that would do has {least} {kind}; here are {fleet.devices}"
    else:
        fix = f"give the pool {least} devices, or move {largest} to another"
    names = " + ".join(unit.name for unit in units)
    return PlanError(
        f"{names} on {devices} {kind} need {bytes_text(missing_bytes)} more memory on every device",
        why=f"a device has {bytes_text(fleet.device.memory_bytes)}, and {largest} takes most of it",
        fix=fix,
    )


def bytes_text(count: float) -> str:
    """So many bytes as people say them: ``13.5 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} bytes"


def _seated_on(
    problem: Problem, costs: CostModel, plan: Plan, pool: PlannedPool, units: Sequence[Unit]
) -> dict[str, Seated]:
    options = {}
    for unit in units:
        planned = plan.units[unit.name]
        options[unit.name] = costs.option(unit, pool.fleet, pool.devices, planned.grid, planned.generate_tp)
    room = costs.room_bytes(pool.fleet, options)
    largest = max(options, key=lambda name: options[name].bytes)
    fleet = problem.hardware.fleet(pool.fleet)
    if room < 0:
        raise does_not_fit(costs, units, fleet, pool.devices, missing_bytes=-room, largest=largest)
    found = {}
    for unit in units:
        option, decoder = options[unit.name], None
        if problem.generates(unit):
            decoder = costs.decoder(unit, option, pool.fleet, pool.devices, room)
            if decoder is None:
                raise PlanError(
                    f"{unit.name} on pool {pool.name} has no room to generate one row",
                    why=f"{bytes_text(room)} of a device are left for the cache beside {', '.join(options)}",
                    fix="give the pool more devices, move a unit to another, or raise generate_tp",
                )
        seat = Seat(pool=pool.name, fleet=pool.fleet, devices=pool.devices, grid=option.grid)
        found[unit.name] = Seated(unit=unit, seat=seat, option=option, room_bytes=room, decoder=decoder)
    return found


def _require_fitting(problem: Problem, plan: Plan) -> None:
    """Refuse a plan of other units, or with machines that are not there."""
    names = {unit.name for unit in problem.units}
    for name in sorted(names - set(plan.units)):
        raise PlanError(f"the plan does not place {name}", why=f"{problem.graph.name} has it", fix="place it")
    for name in sorted(set(plan.units) - names):
        raise PlanError(
            f"the plan places {name!r}", why="the step has no such unit", fix=nearest(name, names)
        )
    if plan.freshness != problem.freshness:
        raise PlanError(
            f"the plan's freshness is {plan.freshness}",
            why=f"the problem's is {problem.freshness}",
            fix="problem.apart(freshness) is the problem of such a plan",
        )
    known = [fleet.name for fleet in problem.hardware.fleets]
    for pool in plan.pools:
        if pool.fleet not in known:
            raise PlanError(
                f"pool {pool.name} lies in fleet {pool.fleet!r}",
                why=f"the cluster is {problem.hardware.name}",
                fix=nearest(pool.fleet, known),
            )
    for fleet in problem.hardware.fleets:
        sizes = [pool.devices for pool in plan.pools if pool.fleet == fleet.name]
        if fleet.machines_needed(sizes) > fleet.machines:
            raise PlanError(
                f"pools of {', '.join(map(str, sizes))} devices in fleet {fleet.name}",
                why=f"it has {fleet.machines} machines of {fleet.per_machine} devices",
                fix="make a pool smaller, or let units share one",
            )
