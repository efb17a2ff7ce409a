"""Reasons: why a placement loses against the best one, in words and numbers.

its best plan, the best of all ─┬─ it is as good ────────────────────────> tie
                                ├─ without transfers it would catch up ──> transfer
                                ├─ its replicas run dry for longer ──────> tail
                                ├─ its devices wait more ────────────────> idle
                                ├─ its stages take longer ───────────────> slower stages
                                ├─ they do not, but wait for each other ─> turns
                                └─ it is as fast, on more devices ───────> devices
no plan ─ what is missing on which role, and the least cluster ──────────> memory
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from rillflow.errors import PlanError
from rillflow.planner.evaluate import Evaluation, latency_s
from rillflow.planner.mapping.partitions import Partition, Pool, partitions
from rillflow.planner.mapping.ranking import Cause, Ranked
from rillflow.planner.mapping.tables import Tables, choices
from rillflow.planner.objective import Objective
from rillflow.planner.plan import Plan
from rillflow.planner.problem import SAMPLER
from rillflow.planner.schedule import period_s, schedule
from rillflow.planner.seating import bytes_text, least_devices, smallest_option
from rillflow.planner.work import Work

MOST_UNITS_FOR_EVERY_SET = 4
"""Of more units, only all together and each apart are tried for the least cluster that would do."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a placement loses."""

    cause: Cause
    """What it loses by."""
    why: str
    """The same in words and numbers."""


def why_it_loses(tables: Tables, found: Ranked, winner: Ranked) -> Reason:
    """Why the best plan of a placement is no better than the best of all."""
    mine, best = found.evaluation, winner.evaluation
    late = mine.step_s - best.step_s
    if late <= 1e-9 * best.step_s:
        if (found.value, mine.devices) == (winner.value, best.devices):
            return Reason(cause=Cause.TIE, why=f"as good; {_preferred(found.plan, winner.plan)}")
        return Reason(
            cause=Cause.DEVICES,
            why=f"{mine.step_s:.4g} s on {mine.devices} devices; the best takes {best.step_s:.4g} s on "
            f"{best.devices}",
        )
    said = f"{mine.step_s:.4g} s, {late:.3g} s more: "
    moved = mine.step_s - _without_transfers_s(tables, found)
    if moved >= late / 2:
        return Reason(cause=Cause.TRANSFER, why=f"{said}{moved:.3g} s of it on the way between pools")
    dry, least = _dry_s(tables, found), _dry_s(tables, winner)
    if dry - least >= late / 2:
        return Reason(
            cause=Cause.TAIL,
            why=f"{said}replicas run dry for {dry:.3g} s, in the best plan for {least:.3g} s",
        )
    if _idle_share(found.plan, mine) - _idle_share(winner.plan, best) >= 0.05:
        return Reason(cause=Cause.IDLE, why=said + _idle_most(found))
    return _slower(tables, mine, best, said)


def why_it_fits_nowhere(tables: Tables, partition: Partition) -> str:
    """What keeps a placement out of memory on every allocation."""
    for pool in partition:
        found = choices(tables, pool)
        if not found.places:
            return f"{_names(tables, pool)} fit on no pool together: {_missing(tables, pool)}"
    least = [(int(choices(tables, pool).devices.min()), _names(tables, pool)) for pool in partition]
    if sum(devices for devices, _ in least) <= sum(fleet.devices for fleet in tables.fleets):
        return "no grids of its units fit together on any allocation"
    text = ", ".join(f"{name} at least {devices}" for devices, name in least)
    total = sum(fleet.devices for fleet in tables.fleets)
    return f"its pools do not fit side by side: {text} devices, here are {total}"


def no_plan_fits(variants: Sequence[Tables], objective: Objective) -> PlanError:
    """What to say where there is no plan: what is missing on which role, and the least cluster to do."""
    fitting = [
        tables
        for tables in variants
        if all(choices(tables, (unit,)).places for unit in range(len(tables.units)))
    ]
    name = variants[0].problem.graph.name
    if fitting and math.isfinite(objective.deadline_s):
        return PlanError(
            f"no plan of {name} keeps the deadline of {objective.deadline_s:g} s",
            why=f"on {variants[0].problem.hardware.name} none is so fast",
            fix="allow more seconds, more devices, or a freshness bound; goal step shows the fastest",
        )
    tables = min(variants, key=lambda one: len(one.units))
    every = tuple(range(len(tables.units)))
    alone = [(unit,) for unit in every if not choices(tables, (unit,)).places]
    return PlanError(
        f"no plan of {name} fits into {tables.problem.hardware.name}",
        why=_missing(tables, alone[0] if alone else every),
        fix=_least_cluster(tables),
    )


def _preferred(plan: Plan, winner: Plan) -> str:
    """Which of two equal plans comes first, and why: the order of ``search``."""
    if len(winner.pools) < len(plan.pools):
        return "the best has fewer pools"
    if winner.freshness < plan.freshness:
        return "the best trains on fresher tokens"
    return "the best comes first by its names"


def _without_transfers_s(tables: Tables, found: Ranked) -> float:
    """Seconds of its step if rows and weights took none between pools."""
    problem, mine = tables.problem, found.evaluation
    seconds = {index: 0.0 if index in tables.crossing else spent for index, spent in mine.seconds.items()}
    times = schedule(
        problem.graph,
        seconds=[seconds[stage.index] for stage in problem.graph.stages],
        pools=[timing.pool for timing in mine.schedule.timings],
        transfers=[0.0] * len(problem.graph.edges),
    )
    overhead = problem.overhead_s
    if not problem.freshness:
        return times.step_s + overhead
    crossing = sum(mine.seconds[index] for index in tables.crossing)
    touched = {
        unit.seat.pool for name, unit in mine.units.items() if name == SAMPLER or _publishes(tables, name)
    }
    loads = [pool.busy_s - crossing * (pool.name in touched) for pool in mine.pools]
    latency = latency_s(problem, times)
    return period_s(loads, latency_s=latency, freshness=problem.freshness) + overhead


def _publishes(tables: Tables, name: str) -> bool:
    unit = next(unit for unit in tables.units if unit.name == name)
    return any(index in tables.crossing for index in unit.stages)


def _dry_s(tables: Tables, found: Ranked) -> float:
    """Seconds in which some replicas have nothing left to generate; none where it streams."""
    problem, spent = tables.problem, found.evaluation
    if found.plan.freshness:
        return 0.0
    return sum(
        max(0.0, spent.seconds[stage.index] - tables.costs.steady_s(stage, decoder))
        for unit in spent.units.values()
        if (decoder := unit.decoder) is not None
        for stage in problem.graph.stages
        if stage.index in unit.unit.stages and problem.work(stage) is Work.GENERATE
    )


def _idle_most(found: Ranked) -> str:
    """The pool with the most device-seconds of which nothing is made."""
    pools = zip(found.plan.pools, found.evaluation.pools, strict=True)
    pool, use = max(pools, key=lambda one: one[0].devices * one[1].idle_share)
    return f"the {pool.devices} devices of pool {pool.name} idle {use.idle_share:.0%} of a step"


def _idle_share(plan: Plan, found: Evaluation) -> float:
    """The share of device-seconds in which nothing is computed."""
    idle = sum(pool.devices * use.idle_share for pool, use in zip(plan.pools, found.pools, strict=True))
    return idle / found.devices


def _slower(tables: Tables, mine: Evaluation, best: Evaluation, said: str) -> Reason:
    """The stage that takes most seconds more than in the best plan, where such stages make up half of it."""
    more = {index: spent - best.seconds[index] for index, spent in mine.seconds.items()}
    if sum(max(0.0, one) for one in more.values()) < (mine.step_s - best.step_s) / 2:
        work, least = sum(mine.seconds.values()), sum(best.seconds.values())
        return Reason(
            cause=Cause.TURNS,
            why=f"{said}its stages take {work:.3g} s in sum, in the best plan {least:.3g} s side by side",
        )
    stage = max(tables.problem.graph.stages, key=lambda stage: more[stage.index])
    spent, less = mine.seconds[stage.index], best.seconds[stage.index]
    return Reason(
        cause=Cause.SLOWER, why=f"{said}{stage.name} takes {spent:.3g} s, in the best plan {less:.3g} s"
    )


def _names(tables: Tables, pool: Iterable[int]) -> str:
    return " + ".join(tables.units[unit].name for unit in pool)


def _missing(tables: Tables, pool: Pool) -> str:
    """By how many bytes units are too large for the place where least is missing, and which takes most."""
    found: list[tuple[float, str]] = []
    for place in tables.places:
        options = {}
        for unit in pool:
            named = tables.units[unit]
            smallest = smallest_option(tables.costs.options(named, place.fleet, place.devices))
            if smallest is None:
                short = tables.costs.shortfall_bytes(named, place.fleet, place.devices)
                found.append((short, f"{named.name} on {place.devices} of {place.fleet}"))
            else:
                options[named.name] = smallest
        if len(options) == len(pool):
            room = tables.costs.room_bytes(place.fleet, options)
            largest = max(
                options, key=lambda name: options[name].resident_bytes + options[name].working_bytes
            )
            text = f"{' + '.join(options)} on {place.devices} of {place.fleet}, {largest} the largest"
            found.append((max(-room, 0.0), text))
    short, where = min(found)
    if not math.isfinite(short):
        return f"no grid cuts {where} evenly"
    if short == 0.0:
        return f"no room is left to generate a single row: {where}"
    return f"{bytes_text(short)} are missing on every device: {where}"


def _least_cluster(tables: Tables) -> str:
    """The least devices of each fleet's kind that would hold a plan."""
    count = len(tables.units)
    sets: list[Pool] = [tuple(range(count))]
    if count <= MOST_UNITS_FOR_EVERY_SET:
        sets = [found for size in range(1, count + 1) for found in combinations(range(count), size)]
    sets += [(unit,) for unit in range(count)]
    told = []
    for fleet in tables.fleets:
        least = {
            one: least_devices(tables.costs, [tables.units[unit] for unit in one], fleet) for one in sets
        }
        names = [unit.name for unit in tables.units]
        alone = SAMPLER if SAMPLER in names else ""
        totals = [
            sum(least[pool] or 0 for pool in partition)
            for partition in partitions(names, fixed=tables.problem.fixed, alone=alone)
            if all(least.get(pool) for pool in partition)
        ]
        if totals:
            told.append(
                f"{min(totals)} {fleet.device.name} like those of {fleet.name}, here are {fleet.devices}"
            )
    if not told:
        return "smaller models, shorter rows or devices with more memory: no number of these would do"
    return f"the least cluster that would do has {' or '.join(told)}"
