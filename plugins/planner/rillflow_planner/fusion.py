"""Fusion: the best plan with two updates as one fused stage, beside the best plan without fusion.

best plans without fusion ─> those with a pair of updates on one pool ─┐
   aligned pipelines of the pair ─ lower bounds, least first ──────────┴─> evaluate with the bound
                                          those that could win ─> evaluate with a schedule ─> Fusion
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedUnit
from rillflow_parts.fusion.alignment import FUSED, unaligned
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.fused import ROUNDS
from rillflow_planner.cost_model.options import Option
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.ranking import PAYS, Fusion, Ranked, Ranking, SearchObjective, explained, rank

LONGEST = 16
"""Most stages of a fused pipeline."""
BASES, BOUNDED, SCHEDULED = 2, 3, 3
"""Plans that a pair is fused in; fused plans of each with an evaluated bound; fused plans with a schedule."""


def with_fusion(
    problem: Problem, ranking: Ranking, objective: SearchObjective, recomputes: Sequence[bool] = ()
) -> Ranking:
    """Return the ranking with the best fused plan beside its best plan; in front of it, if that pays.

    Args:
        problem: the step.
        ranking: the best plans without fusion.
        objective: the minimised quantity.
        recomputes: whether activations may be kept, recomputed, or either; by default as the problem says.
    """
    plain = ranking.best[0]
    if not plain.problem.fusable:
        return ranking

    def ranked(step: Problem, plan: Plan, rounds: int) -> Ranked | None:
        try:
            return rank(step, CostModel(step, rounds), plan, objective)
        except PlanError:
            return None

    steps = [replace(problem, recomputes=one) for one in recomputes or (problem.recomputes,)]
    fused = [ranked(step, plan, 0) for step, plan in _bounded(steps, ranking)]
    bounds = sorted((one for one in fused if one and one.value < math.inf), key=lambda one: one.value)
    if not bounds:
        why = "no two pipelines of equal tensor parallelism fit on its devices"
        return replace(ranking, fusion=Fusion(best=None, plain=plain, why=why))
    promising = []
    for step in steps:
        alike = [one for one in bounds if one.problem.recomputes == step.recomputes][:SCHEDULED]
        promising += [one for one in alike if one.value * (1 + PAYS) <= plain.value]
    scheduled = [one for one in (ranked(two.problem, two.plan, ROUNDS) for two in promising) if one]
    best, is_bound = min(scheduled or bounds, key=lambda one: one.value), not scheduled
    gain = plain.value / best.value - 1
    little = f"it gains {'at most ' * is_bound}{gain:.1%}, less than {PAYS:.0%}"
    why = "" if gain >= PAYS else little if gain >= 0 else explained(best, plain).why
    fusion = Fusion(best=best, plain=plain, is_bound=is_bound, why=why)
    if why:
        return replace(ranking, fusion=fusion)
    behind = [explained(one, best) for one in ranking.best]
    return replace(ranking, best=(best, *behind), fusion=fusion)


def _bounded(steps: Sequence[Problem], ranking: Ranking) -> Iterator[tuple[Problem, Plan]]:
    """Yield fused plans: of each pair and base, those whose stages take the least seconds by lower bounds."""
    plans = [one.plan for one in ranking.best]
    for problem in steps:
        known: dict[float, CostModel] = {}
        tried: Counter[tuple[str, ...]] = Counter()
        for base in (*_merged(problem, plans[0]), *plans):
            step = problem.of_plan(base)
            for pair in step.fusable:
                names = tuple(unit.name for unit in pair)
                if len({base.units[name].pool for name in names}) == 1 and tried[names] < BASES:
                    tried[names] += 1
                    costs = known.setdefault(step.freshness, CostModel(step, 0))
                    found = sorted(_candidates(step, costs, base, pair), key=lambda one: one[0])
                    yield from ((step, plan) for _, plan in found[:BOUNDED])


def _merged(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with one pool for all units but the sampler, on all other devices of their machines."""
    apart = [unit.pool for name, unit in plan.units.items() if name == SAMPLER]
    pools = [pool for pool in plan.pools if pool.name not in apart]
    if len(pools) > 1 and len({pool.machine_type for pool in pools}) == 1:
        beside = [pool for pool in plan.pools if pool.name in apart]
        kind = pools[0].machine_type
        taken = sum(pool.devices for pool in beside if pool.machine_type == kind)
        whole = replace(pools[0], devices=problem.hardware.fleet(kind).devices - taken)
        units = {
            name: unit if name == SAMPLER else replace(unit, pool=whole.name, grid=Grid(dp=whole.devices))
            for name, unit in plan.units.items()
        }
        yield replace(plan, pools=(whole, *beside), units=units)


def _candidates(
    problem: Problem, costs: CostModel, base: Plan, pair: tuple[Unit, Unit]
) -> Iterator[tuple[float, Plan]]:
    """Yield plans with aligned pipelines for a pair, and the least seconds of their pool's stages."""
    pool = base.pool(base.units[pair[0].name].pool)
    place, ways = (pool.machine_type, pool.devices), dict[str, Sequence[Option]]()
    for unit in (one for one in problem.units if base.units[one.name].pool == pool.name):
        if unit in pair:
            every = costs.every_option(unit, *place)
            ways[unit.name] = [one for one in every if 1 < one.grid.pp <= LONGEST and not one.grid.is_sharded]
        else:
            known = costs.options(unit, *place)
            ways[unit.name] = sorted(known, key=lambda one: sum(one.seconds.values()))[:1]
    for picked in product(*ways.values()):
        options = dict(zip(ways, picked, strict=True))
        if any(unaligned(*(options[unit.name].grid for unit in pair))):
            continue
        try:
            fused = costs.fused(pool.machine_type, options, pair)
        except PlanError:
            continue
        spent, room = (
            sum(sum(one.seconds.values()) for one in fused.values()),
            costs.room_bytes(place[0], fused),
        )
        for unit in pair:
            for index in problem.generating.intersection(unit.stages):
                decoder = costs.decoder(unit, fused[unit.name], *place, max(room, 0.0))
                spent += costs.generate_s(problem.graph.stages[index], decoder) if decoder else math.inf
        placed = {
            name: PlannedUnit(pool=pool.name, grid=option.grid, generate_tp=option.generate_tp)
            for name, option in options.items()
        }
        settings = {**base.settings, FUSED: [unit.name for unit in pair]}
        yield spent, replace(base, units={**base.units, **placed}, settings=settings)
