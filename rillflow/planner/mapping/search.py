"""Search: the best plans, exact, and for every other placement why it loses.

units ─> placements: set partitions, in step or with a freshness bound ─ the least bounds first ─┐
   ┌─────────────────────────────────────────────────────────────────────────────────────────────┘
   └─> allocations whose bound is better than the tenth best ─> fronts ─> best way ─> Ranking
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rillflow.errors import PlanError
from rillflow.planner.evaluate import evaluate
from rillflow.planner.mapping.allocations import Bounds, Cut
from rillflow.planner.mapping.clock import Clock
from rillflow.planner.mapping.fronts import MOST_COMBINATIONS
from rillflow.planner.mapping.partitions import Partition, Pool, partitions
from rillflow.planner.mapping.ranking import Cause, Counts, Effort, Loser, Ranked, Ranking
from rillflow.planner.mapping.reasons import no_plan_fits, why_it_fits_nowhere, why_it_loses
from rillflow.planner.mapping.solve import Solver, Way
from rillflow.planner.mapping.tables import Choices, Tables, choices
from rillflow.planner.objective import Goal, Objective
from rillflow.planner.option import Costs
from rillflow.planner.plan import Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import SAMPLER, Problem

CostsOf = Callable[[Problem], Costs]
"""A cost model's class, or what makes one."""
TOGETHER = 16
"""Allocations whose fronts are made at once at most: 1, 2, 4, ... as the bounds prove too low."""
EXAMPLES = 2
"""Allocations looked at, to have an example of a placement that was cut by its bound."""
FEW_WAYS = 64
"""Combinations of options looked at for such an example, as long as one of them fits."""


def search(
    problem: Problem,
    costs: CostsOf,
    *,
    objective: Objective | None = None,
    freshness: Sequence[int] = (0,),
    apart_in_step: bool = False,
    effort: Effort | None = None,
) -> Ranking:
    """The best plans of a problem.

    Args:
        problem: the step; whether it samples apart is decided here.
        costs: makes the cost model of a problem.
        objective: what is to be least; the step's seconds if nothing is said.
        freshness: bounds to try; 0 is in step, with generation where the policy is trained, more is a sampler
            apart.
        apart_in_step: whether bound 0 is tried with a sampler apart too, which waits while the policy trains.
        effort: how much may be looked at.

    Raises:
        PlanError: no plan fits, or none keeps the deadline.
    """
    variants = [
        variant for bound in sorted(set(freshness)) for variant in _variants(problem, bound, apart_in_step)
    ]
    return _Search(variants, costs, objective or Objective(), effort or Effort()).ranking()


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """A partition with a freshness bound."""

    tables: Tables
    partition: Partition
    clock: Clock
    names: tuple[tuple[str, ...], ...]

    @property
    def rank(self) -> tuple[int, int, tuple[tuple[str, ...], ...]]:
        """Of equal plans: fewer pools, fresher tokens, names."""
        return (len(self.partition), self.tables.problem.freshness, self.names)


@dataclass(frozen=True, kw_only=True)
class _Solved:
    placement: _Placement
    way: Way

    @property
    def key(self) -> tuple[float, int, tuple[int, int, tuple[tuple[str, ...], ...]]]:
        return (self.way.value, self.way.devices, self.placement.rank)


@dataclass(frozen=True, kw_only=True)
class _LookedAt:
    placement: _Placement
    bound: float
    best: _Solved | None


class _Search:
    def __init__(
        self, variants: Sequence[Problem], costs: CostsOf, objective: Objective, effort: Effort
    ) -> None:
        for variant in variants:
            _require_prices(variant, objective)
        self._objective = objective
        self._effort = effort
        self._best: list[_Solved] = []
        self._choices: dict[tuple[int, Pool], Choices] = {}
        self._beside: dict[tuple[int, int], tuple[float, ...]] = {}
        self._allocations = self._solved = self._bounded = 0
        self._is_exact, self._dropped = True, float("inf")
        self._placements = [placement for variant in variants for placement in _placements(variant, costs)]

    def ranking(self) -> Ranking:
        roots = [
            (self._bounds(placement, self._objective).root(), placement) for placement in self._placements
        ]
        roots.sort(key=lambda one: (one[0], one[1].rank))
        looked_at = [self._looked_at(root, placement) for root, placement in roots]
        self._best = self._best[: self._effort.kept]
        if not self._best:
            raise no_plan_fits([placement.tables for placement in self._placements], self._objective)
        ranked = self._explained([self._ranked(one) for one in self._best])
        kept = {id(one.placement) for one in self._best}
        losers = [self._loser(one, ranked[0]) for one in looked_at if id(one.placement) not in kept]
        return Ranking(
            best=tuple(ranked),
            losers=tuple(sorted(losers, key=lambda one: (one.bound, one.freshness, one.pools))),
            counts=Counts(
                placements=len(self._placements),
                bounded=self._bounded,
                allocations=self._allocations,
                solved=self._solved,
            ),
            is_exact=self._is_exact,
            bound=min(ranked[0].value, self._dropped),
        )

    def _explained(self, ranked: list[Ranked]) -> list[Ranked]:
        """The best plans, each but the first with what it is behind by."""
        if not self._effort.explains:
            return ranked
        reasons = [
            why_it_loses(solved.placement.tables, one, ranked[0])
            for solved, one in zip(self._best[1:], ranked[1:], strict=True)
        ]
        others = [
            replace(one, cause=reason.cause, why=reason.why)
            for one, reason in zip(ranked[1:], reasons, strict=True)
        ]
        return [ranked[0], *others]

    def _looked_at(self, root: float, placement: _Placement) -> _LookedAt:
        """Search one placement, unless its bound says that it cannot be among the best."""
        cut = self._cut(placement)
        could = bool(np.isfinite(root) and cut.admits(np.array([root]), np.zeros(1))[0])
        self._bounded += not could
        best = self._search(placement, cut) if could else None
        if best is not None:
            self._best = sorted([*self._best, best], key=lambda one: one.key)
            return _LookedAt(placement=placement, bound=best.way.value, best=best)
        return _LookedAt(placement=placement, bound=max(root, cut.value if could else root), best=None)

    def _loser(self, looked_at: _LookedAt, winner: Ranked) -> Loser:
        placement, solved = looked_at.placement, looked_at.best
        cause, why, found = None, "", None
        if self._effort.explains:
            solved = solved or self._example(looked_at, winner)
            found = None if solved is None else self._ranked(solved)
            if found is None:
                cause, why = Cause.MEMORY, why_it_fits_nowhere(placement.tables, placement.partition)
            else:
                reason = why_it_loses(placement.tables, found, winner)
                cause, why = reason.cause, reason.why
        return Loser(
            pools=placement.names,
            freshness=placement.tables.problem.freshness,
            bound=looked_at.bound if np.isfinite(looked_at.bound) or found is None else winner.value,
            found=found,
            cause=cause,
            why=why,
        )

    def _example(self, looked_at: _LookedAt, winner: Ranked) -> _Solved | None:
        """A good plan of a placement that was cut by its bound, be it too late; none where none fits."""
        placement, objective = looked_at.placement, self._objective
        start = max(winner.value, looked_at.bound)
        if np.isfinite(objective.deadline_s):
            objective, start = Objective(), winner.evaluation.step_s
        if not np.isfinite(self._bounds(placement, objective).root()):
            return None
        limits = [Cut(value=start * 1.5**times) for times in range(1, 4)] if np.isfinite(start) else []
        for most in (FEW_WAYS, MOST_COMBINATIONS):
            solver = Solver(placement.tables, placement.clock, placement.partition, objective, most)
            for cut in (*limits, Cut()):
                bounds = self._bounds(placement, objective)
                found = bounds.narrow(cut, EXAMPLES)
                way = self._solve_all(placement, solver, bounds, found.places, cut)
                if way is not None:
                    return _Solved(placement=placement, way=way)
        return None

    def _search(self, placement: _Placement, cut: Cut) -> _Solved | None:
        """The best plan of a placement that is better than the cut."""
        solver = Solver(placement.tables, placement.clock, placement.partition, self._objective)
        best: Way | None = None
        for width in (self._effort.first, self._effort.allocations):
            bounds = self._bounds(placement, self._objective)
            found = bounds.narrow(cut, width)
            better = self._solve_all(placement, solver, bounds, found.places, cut)
            if better is not None:
                best, cut = better, Cut(value=better.value, devices=better.devices)
            if found.dropped >= cut.value:
                break
        else:
            self._is_exact, self._dropped = False, min(self._dropped, found.dropped)
        self._is_exact &= solver.is_whole
        return None if best is None else _Solved(placement=placement, way=best)

    def _solve_all(
        self, placement: _Placement, solver: Solver, bounds: Bounds, places: np.ndarray, cut: Cut
    ) -> Way | None:
        """Allocations by ascending bound, the bound of each made tighter by its fronts, then solved."""
        best: Way | None = None
        known = [np.zeros(len(one.places), dtype=bool) for one in bounds.choices]
        self._allocations += len(places)
        rows, first, left, together = bounds.ranked(places, cut), 0, self._effort.solved, 1
        while first < len(rows.values) and cut.admits(rows.values[first:][:1], rows.devices[first:][:1])[0]:
            if self._tighten(solver, bounds, known, rows.places[first : first + together], cut):
                rows, first = bounds.ranked(rows.places[first:], cut), 0
                together = min(2 * together, TOGETHER)
                continue
            if left == 0:
                self._is_exact, self._dropped = False, min(self._dropped, float(rows.values[first]))
                break
            taken = [
                one.places[number] for one, number in zip(bounds.choices, rows.places[first], strict=True)
            ]
            beside = self._functions(placement, sum(place.devices for place in taken))
            way = solver.solve(taken, bounds, beside, cut)
            self._solved, left, first = self._solved + 1, left - 1, first + 1
            if way is not None:
                best, cut = way, Cut(value=way.value, devices=way.devices)
        return best

    def _tighten(
        self, solver: Solver, bounds: Bounds, known: list[np.ndarray], places: np.ndarray, cut: Cut
    ) -> bool:
        """Whether the first of some allocations needed fronts; then those of all of them are made."""
        pools = range(len(bounds.choices))
        if all(known[pool][places[0, pool]] for pool in pools):
            return False
        for pool in pools:
            for number in np.unique(places[:, pool]):
                if not known[pool][number]:
                    known[pool][number] = True
                    place = bounds.choices[pool].places[number]
                    bounds.tighten(pool, int(number), solver.front(pool, place, cut))
        return True

    def _cut(self, placement: _Placement) -> Cut:
        """What a plan of a placement must be better than: the last of those that are ranked."""
        if len(self._best) < self._effort.kept:
            return Cut()
        last = self._best[self._effort.kept - 1]
        wins_ties = placement.rank < last.placement.rank
        return Cut(value=last.way.value, devices=last.way.devices + wins_ties)

    def _bounds(self, placement: _Placement, objective: Objective) -> Bounds:
        tables = placement.tables
        for pool in placement.partition:
            if (id(tables), pool) not in self._choices:
                self._choices[id(tables), pool] = choices(tables, pool)
        most = sum(fleet.devices for fleet in tables.fleets)
        return Bounds(
            tables.problem,
            placement.clock,
            [self._choices[id(tables), pool] for pool in placement.partition],
            objective,
            self._functions(placement, most),
        )

    def _functions(self, placement: _Placement, devices: int) -> tuple[float, ...]:
        """Seconds of functions and formulas beside so many devices; 0 of other stages."""
        key = (id(placement.tables), devices)
        if key not in self._beside:
            stages = placement.tables.problem.graph.stages
            self._beside[key] = tuple(
                placement.tables.costs.function_s(stage, devices) if pool < 0 else 0.0
                for stage, pool in zip(stages, placement.clock.pools, strict=True)
            )
        return self._beside[key]

    def _ranked(self, solved: _Solved) -> Ranked:
        tables, plan = solved.placement.tables, _plan(solved)
        evaluation = evaluate(tables.problem, tables.costs, plan)
        stages = {stage.name: evaluation.seconds[stage.index] for stage in tables.problem.graph.stages}
        return Ranked(
            plan=replace(plan, predicted_step_s=evaluation.step_s, predicted_stages_s=stages),
            evaluation=evaluation,
            value=solved.way.value,
        )


def _variants(problem: Problem, freshness: int, apart_in_step: bool) -> list[Problem]:
    """The problem under a bound: in step with generation where the policy is trained, or a sampler apart."""
    together = replace(problem, samples_apart=False, freshness=0)
    if freshness == 0:
        return [together, together.apart()] if apart_in_step else [together]
    return [problem.apart(freshness)]


def _placements(problem: Problem, costs: CostsOf) -> list[_Placement]:
    tables = Tables(problem, costs(problem))
    names = [unit.name for unit in problem.units]
    observed = [stage.index for stage in problem.graph.stages if stage.index in tables.crossing]
    found = []
    for partition in partitions(names, fixed=problem.fixed, alone=SAMPLER):
        owner = {
            index: pool
            for pool, units in enumerate(partition)
            for unit in units
            for index in tables.stages(unit)
        }
        pools = [owner.get(stage.index, -1) for stage in problem.graph.stages]
        found.append(
            _Placement(
                tables=tables,
                partition=partition,
                clock=Clock(problem.graph, pools=pools, observed=observed),
                names=tuple(tuple(names[unit] for unit in pool) for pool in partition),
            )
        )
    return found


def _plan(solved: _Solved) -> Plan:
    placement, way = solved.placement, solved.way
    pools = [
        PlannedPool(
            name=units[0],
            fleet=place.fleet,
            devices=place.devices,
            device=placement.tables.problem.hardware.fleet(place.fleet).device.name,
        )
        for units, place in zip(placement.names, way.places, strict=True)
    ]
    units = {
        placement.tables.units[unit].name: PlannedUnit(
            pool=pools[pool].name, grid=way.options[unit].grid, generate_tp=way.options[unit].generate_tp
        )
        for pool, members in enumerate(placement.partition)
        for unit in members
    }
    return Plan(
        name=placement.tables.problem.graph.name,
        pools=tuple(sorted(pools, key=lambda pool: -pool.devices)),
        units=units,
        freshness=placement.tables.problem.freshness,
    )


def _require_prices(problem: Problem, objective: Objective) -> None:
    free = [fleet.name for fleet in problem.hardware.fleets if not fleet.price_per_hour]
    if objective.goal is Goal.COST and free:
        raise PlanError(
            f"the least cost is asked for, and fleet {free[0]} has no price",
            why="what costs nothing would always win",
            fix='give every fleet a price, as in price = "2.5 $/h"',
        )
