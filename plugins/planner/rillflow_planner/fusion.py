"""Fusion: the best plan with two updates as one fused stage, beside the best plan without fusion.

best plans without fusion ─> those with a pair of updates on one pool ─┐
   aligned pipelines of the pair ─ lower bounds, least first ──────────┴─> evaluate with the bound
                                          those that could win ─> evaluate with a schedule ─> Fusion
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from rillflow.errors import PlanError
from rillflow.placement.fused.problem import lower_bound
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit, unaligned
from rillflow.runs.formatting import seconds
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.fused import ROUNDS, UpdatePart, fused_problem
from rillflow_planner.cost_model.grids import Option
from rillflow_planner.evaluate import predicted
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.ranking import PAYS, Fusion, Ranked, Ranking, SearchObjective, explained, valued

LONGEST = 16
"""Most stages of a fused pipeline."""
BASES, BOUNDED, SCHEDULED = 2, 3, 3
"""Plans that a pair is fused in; fused plans of each with an evaluated bound; fused plans with a schedule."""


def with_fusion(
    problem: Problem, ranking: Ranking, objective: SearchObjective, plain: Ranked | None = None
) -> Ranking:
    """Return the ranking with the best fused plan beside its best plan; in front of it, if that pays.

    Args:
        problem: the step.
        ranking: the best plans without fusion.
        objective: the minimised quantity.
        plain: the best plan without fusion, if it is not in the ranking.
    """
    plain = plain or ranking.best[0]
    if not problem.of_plan(plain.plan).fusable:
        return ranking

    def rank(plan: Plan, rounds: int) -> Ranked | None:
        step = problem.of_plan(plan)
        try:
            found, evaluation = predicted(step, CostModel(step, rounds), plan)
        except PlanError:
            return None
        return Ranked(plan=found, evaluation=evaluation, value=valued(problem, objective, evaluation, plan))

    ranked = [rank(plan, 0) for plan in _bounded(problem, ranking)]
    bounds = sorted((one for one in ranked if one and one.value < math.inf), key=lambda one: one.value)
    if not bounds:
        why = "no two pipelines of equal tensor parallelism fit on its devices"
        return replace(ranking, fusion=Fusion(best=None, plain=plain, why=why))
    best, is_bound = bounds[0], True
    for one in bounds[:SCHEDULED]:
        if one.value * (1 + PAYS) > plain.value or (not is_bound and one.value >= best.value):
            break
        found = rank(one.plan, ROUNDS)
        if found is not None and (is_bound or found.value < best.value):
            best, is_bound = found, False
    gain = plain.value / best.value - 1
    why = "" if gain >= PAYS else _because(best, plain, is_bound)
    fusion = Fusion(best=best, plain=plain, is_bound=is_bound, why=why)
    if why:
        return replace(ranking, fusion=fusion)
    behind = [explained(one, best) for one in ranking.best]
    return replace(ranking, best=(best, *behind), fusion=fusion)


def _bounded(problem: Problem, ranking: Ranking) -> Iterator[Plan]:
    """Yield fused plans: of each pair and base, those whose stages take the least seconds by lower bounds."""
    plans = [one.plan for one in ranking.best]
    known: dict[float, CostModel] = {}
    tried: Counter[tuple[str, ...]] = Counter()
    for base in (*_merged(plans[0]), *plans):
        step = problem.of_plan(base)
        for pair in step.fusable:
            names = tuple(unit.name for unit in pair)
            if len({base.units[name].pool for name in names}) == 1 and tried[names] < BASES:
                tried[names] += 1
                costs = known.setdefault(step.freshness, CostModel(step))
                found = sorted(_candidates(step, costs, base, pair), key=lambda one: one[0])
                yield from (plan for _, plan in found[:BOUNDED])


def _merged(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with one pool for all units but the sampler, if it has several in one fleet."""
    apart = [unit.pool for name, unit in plan.units.items() if name == SAMPLER]
    pools = [pool for pool in plan.pools if pool.name not in apart]
    if len(pools) > 1 and len({pool.machine_type for pool in pools}) == 1:
        whole = replace(pools[0], devices=sum(pool.devices for pool in pools))
        units = {
            name: unit if name == SAMPLER else replace(unit, pool=whole.name, grid=Grid(dp=whole.devices))
            for name, unit in plan.units.items()
        }
        yield replace(plan, pools=(whole, *(pool for pool in plan.pools if pool not in pools)), units=units)


def _candidates(
    problem: Problem, costs: CostModel, base: Plan, pair: tuple[Unit, Unit]
) -> Iterator[tuple[float, Plan]]:
    """Yield plans with aligned pipelines for a pair, and the least seconds of the pair's stages."""
    pool = base.pool(base.units[pair[0].name].pool)
    beside = [unit for unit in problem.units if base.units[unit.name].pool == pool.name and unit not in pair]
    choices = {unit.name: costs.options(unit, pool.machine_type, pool.devices) for unit in beside}
    if not all(choices.values()):
        return
    others = {name: min(ways, key=lambda one: sum(one.seconds.values())) for name, ways in choices.items()}
    ways = [_ways(problem, costs, pool, others, unit) for unit in pair]
    for (one, part, spent), (two, its, more) in product(*ways):
        if any(unaligned(one.grid, two.grid)):
            continue
        options = {**others, pair[0].name: one, pair[1].name: two}
        room = costs.activations_room_bytes(pool.machine_type, options)
        try:
            fused = fused_problem(part, its, room_bytes=room)
        except PlanError:
            continue
        steps = problem.workload.epochs * problem.workload.minibatches
        fused_s = steps * (lower_bound(fused) + part.beside_s + its.beside_s)
        placed = {
            name: PlannedUnit(pool=pool.name, grid=option.grid, generate_tp=option.generate_tp)
            for name, option in options.items()
        }
        plan = replace(base, units={**base.units, **placed}, fused=tuple(unit.name for unit in pair))
        yield spent + more + fused_s, plan


def _ways(
    problem: Problem, costs: CostModel, pool: PlannedPool, others: Mapping[str, Option], unit: Unit
) -> list[tuple[Option, UpdatePart, float]]:
    """Return a unit's short pipelines: the option, its update, and the seconds of its other stages."""
    best: dict[Grid, tuple[float, Option]] = {}
    for option in costs.every_option(unit, pool.machine_type, pool.devices):
        if not 1 < option.grid.pp <= LONGEST or option.grid.is_sharded:
            continue
        spent = sum(option.seconds.values())
        room = costs.room_bytes(pool.machine_type, {**others, unit.name: option})
        for index in problem.generating.intersection(unit.stages):
            decoder = costs.decoder(unit, option, pool.machine_type, pool.devices, max(room, 0.0))
            stage = problem.graph.stages[index]
            spent += costs.generate_s(stage, decoder) if decoder else math.inf
        if spent < best.get(option.grid, (math.inf, option))[0]:
            best[option.grid] = spent, option
    parts = costs.parts(unit, pool.machine_type, [*best]) if best else []
    return [(one, part, s - part.alone_s) for (s, one), part in zip(best.values(), parts, strict=True)]


def _because(best: Ranked, plain: Ranked, is_bound: bool) -> str:
    """Return why the best fused plan gains too little over the best plan without fusion."""
    if best.value <= plain.value:
        most = "at most " * is_bound
        return f"it gains {most}{plain.value / best.value - 1:.1%}, less than {PAYS:.0%}"
    units = [plain.plan.units[name] for name in best.plan.fused]
    if units[0].pool != units[1].pool:
        sizes = " and ".join(str(plain.plan.pool(unit.pool).devices) for unit in units)
        return f"{' and '.join(best.plan.fused)} update side by side there, on {sizes} devices"
    updates = {f"{name}.update" for name in best.plan.fused}
    less = plain.evaluation.seconds
    fused_s, apart_s = (
        sum(
            one.evaluation.seconds[timing.stage]
            for timing in best.evaluation.timings
            if timing.name in updates
        )
        for one in (best, plain)
    )
    if fused_s < apart_s:
        others = [timing for timing in best.evaluation.timings if timing.name not in updates]
        slow = max(others, key=lambda timing: timing.seconds - less[timing.stage])
        return (
            f"fused updates take {seconds(fused_s)} instead of {seconds(apart_s)}, but on their grids "
            f"{slow.name} takes {seconds(slow.seconds)} instead of {seconds(less[slow.stage])}"
        )
    shape = "without pipelines" if max(unit.grid.pp for unit in units) == 1 else "one after the other"
    least = "at least " * is_bound
    return f"the updates take {seconds(apart_s)} {shape}, fused {least}{seconds(fused_s)}"
