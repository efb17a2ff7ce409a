"""Misfit: say why no plan fits, and with which changes one would, the cheapest first.

no plan ─> missing bytes ─┬─ recomputation, micro-batches, separate generation ─> changes, until it fits
                          ├─ more machines ────────────────────────────────────> the fewest
                          └─ limits of the runtime, lifted ────────────────────> those that matter
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rillflow.errors import PlanError
from rillflow.runs.formatting import size
from rillflow_planner.cost_model.costs import CostModel, CostsOf
from rillflow_planner.cost_model.options import LIMITS
from rillflow_planner.hardware import Fleet
from rillflow_planner.problem import Problem, Unit

MACHINE = 8
"""Devices of a usual machine, for a cluster of less than one."""
MOST_MACHINES = 4096
"""Largest cluster, in machines, that an error suggests."""
NOTABLE = 0.9
"""Largest share of the missing memory that a change leaves missing, if it is named."""
RECOMPUTE = "recompute activations (policy.gradient_checkpointing = true)"


def no_plan_fits(problem: Problem, costs: CostsOf) -> PlanError:
    """Return the error when no plan fits: the missing memory, what limits it, and what would help."""
    own = costs(problem)
    missing, where = _missing(problem, own)
    why = f"every device lacks {size(missing)}: {where}"
    if not math.isfinite(missing):
        rows = " and the rows of an optimiser step" if problem.layouts.equal_rows else ""
        why = f"no grid splits the model{rows} evenly: {where}"
    elif not missing:
        why = f"no memory is left to generate a single row: {where}"
    fixes, fits = _changes(problem, costs, missing)
    for fleet in problem.hardware.fleets:
        together, alone = least_devices(own, problem.units, fleet), _separate_devices(problem, own, fleet)
        fixes.append(_least_text(min(together, alone), fleet))
        fits |= math.isfinite(min(together, alone))
    limits = [] if fits else _limits(problem, costs)
    if limits:
        why = f"{why}. In Rillflow's runtime {'; and '.join(limits)}"
        fixes.insert(0, "predict a published stack, which has other limits (--like nemo-rl)")
    return PlanError(
        f"no plan of {problem.graph.name} fits on {problem.hardware.name}", why=why, fix="; or ".join(fixes)
    )


def recomputation(problem: Problem) -> list[str]:
    """Return the advice to recompute activations, for a problem that keeps them."""
    return [] if problem.recomputes else [RECOMPUTE]


def _changes(problem: Problem, costs: CostsOf, missing: float) -> tuple[list[str], bool]:
    """Return changes that save memory, each on top of those before it, and whether the models then fit."""
    found: list[str] = []
    for text, changed in _changed(problem):
        own = costs(changed)
        left = _missing(changed, own)[0]
        if any(_separate_devices(changed, own, fleet) <= fleet.devices for fleet in problem.hardware.fleets):
            return [*found, f"{text}, and a plan fits"], True
        if text == RECOMPUTE or left < NOTABLE * missing:
            found.append(f"{text}, which leaves {size(left)} missing")
            missing = left
    return found, False


def _changed(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes with the changed problem, the cheapest first."""
    if not problem.recomputes:
        problem = replace(problem, recomputes=True)
        yield RECOMPUTE, problem
    workload = problem.workload
    longest = workload.prompt.limit + workload.response.limit
    if workload.tokens_per_micro_batch > longest:
        problem = replace(problem, workload=replace(workload, tokens_per_micro_batch=longest))
        yield f"compute one row at a time (policy.tokens_per_micro_batch = {longest})", problem
    if problem.generating and not problem.samples_apart:
        yield "generate on separate devices (--separate-in-step, or --freshness 1)", problem.apart()


def _limits(problem: Problem, costs: CostsOf) -> list[str]:
    """Return the limits of Rillflow's runtime that keep a model from fitting on all devices."""

    def fits(*lifted: str) -> bool:
        changes = {key: value for limit in lifted for key, value in LIMITS[limit].items()}
        changed = replace(problem, recomputes=True, layouts=replace(problem.layouts, **changes))
        model, fleets = costs(changed), problem.hardware.fleets
        return all(
            any(model.options(unit, fleet.name, fleet.devices) for fleet in fleets) for unit in problem.units
        )

    if not problem.layouts.is_own or fits() or not fits(*LIMITS):
        return []
    return [limit for limit in LIMITS if not fits(*(other for other in LIMITS if other != limit))]


def _missing(problem: Problem, costs: CostModel) -> tuple[float, str]:
    """Return the most bytes that every device lacks for a model alone, else for all together, and where."""

    def least_missing(units: Sequence[Unit]) -> tuple[float, str]:
        names = " + ".join(unit.name for unit in units)
        return min(
            (missing_bytes(costs, units, fleet, devices), f"{names} on {devices} devices of {fleet.name}")
            for fleet in problem.hardware.fleets
            for devices in fleet.sizes
        )

    worst = max((least_missing([unit]) for unit in problem.units), key=lambda one: one[0])
    return worst if worst[0] else least_missing(problem.units)


def missing_bytes(costs: CostModel, units: Sequence[Unit], fleet: Fleet, devices: int) -> float:
    """Return the memory that every device lacks for the units' smallest options.

    Infinite if no grid is even.
    """
    smallest = {}
    for unit in units:
        options = costs.options(unit, fleet.name, devices)
        if not options:
            return costs.shortfall_bytes(unit, fleet.name, devices)
        smallest[unit.name] = min(options, key=lambda one: (one.bytes, one.grid, one.generate_tp))
    return max(-costs.room_bytes(fleet.name, smallest), 0.0)


def least_devices(costs: CostModel, units: Sequence[Unit], fleet: Fleet) -> float:
    """Return the smallest number of devices on which the units fit together, for this machine type.

    The result can exceed the cluster. It is infinite if ``MOST_MACHINES`` machines are not enough. Each unit
    uses its smallest option.
    """
    return next((size for size in _sizes(fleet) if not missing_bytes(costs, units, fleet, size)), math.inf)


def _sizes(fleet: Fleet) -> Iterator[int]:
    """Yield sizes of clusters of this machine type: parts of a machine, then more and more machines."""
    whole, machines = max(fleet.per_machine, MACHINE), 1
    yield from (size for size in range(1, whole) if whole % size == 0)
    while machines < MOST_MACHINES:
        yield machines * whole
        machines += max(1, machines // 8)


def _separate_devices(problem: Problem, costs: CostModel, fleet: Fleet) -> float:
    """Return the smallest cluster on which the models fit, each on its own devices."""
    least = sum(least_devices(costs, [unit], fleet) for unit in problem.units)
    return next((size for size in _sizes(fleet) if size >= least), math.inf)


def least_text(costs: CostModel, units: Sequence[Unit], fleet: Fleet) -> str:
    """Return the advice to use the fewest devices on which the units fit together."""
    return _least_text(least_devices(costs, units, fleet), fleet)


def _least_text(least: float, fleet: Fleet) -> str:
    device, name = fleet.device.name, fleet.name
    kind = device if device.lower() == name else f"{device} of machine type {name}"
    if math.isinf(least):
        enough = f"{MOST_MACHINES} machines of {kind} are not enough"
        return f"use smaller models, shorter rows or another device; {enough}"
    if least <= fleet.devices:
        return f"choose a layout that cuts the model further; {least} {kind} would do"
    return f"use at least {least} {kind} instead of {fleet.devices}; or put a model on other devices"
