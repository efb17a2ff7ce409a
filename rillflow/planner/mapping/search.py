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
from rillflow.planner.evaluate import Evaluation, evaluate
from rillflow.planner.mapping.allocations import Bounds, Cut
from rillflow.planner.mapping.clock import Clock
from rillflow.planner.mapping.partitions import Partition, Pool, partitions
from rillflow.planner.mapping.solve import Solver, Way
from rillflow.planner.mapping.tables import Choices, Tables, choices
from rillflow.planner.objective import Goal, Objective
from rillflow.planner.option import Costs
from rillflow.planner.plan import Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import SAMPLER, Problem

CostsOf = Callable[[Problem], Costs]
"""A cost model's class, or what makes one."""
FEW = 512
"""Allocations looked at first, to have a plan to beat."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much the search may look at before it is a heuristic."""

    kept: int = 10
    """Plans that are ranked."""
    allocations: int = 200_000
    """Of one placement, at once; of more those with the least bounds are kept, and the ranking says so."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One placement at its best."""

    plan: Plan
    """What to launch."""
    evaluation: Evaluation
    """What it costs."""
    value: float
    """The objective's; the less the better."""


@dataclass(frozen=True, kw_only=True)
class Loser:
    """A placement that is not among the best."""

    pools: tuple[tuple[str, ...], ...]
    """Names of the units of each pool."""
    freshness: int
    """How many versions old a trained token may be."""
    bound: float
    """No plan with this placement has a lower value; infinite where none fits."""
    found: Ranked | None
    """The best of it that was looked at; none where nothing was."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What the search did."""

    placements: int
    """Set partitions times freshness bounds."""
    bounded: int
    """Placements cut by their bound before any plan of them was solved."""
    allocations: int
    """Allocations whose bound did not cut them."""
    solved: int
    """Allocations solved exactly."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search."""

    best: tuple[Ranked, ...]
    """The best plan of each of the best placements, best first."""
    losers: tuple[Loser, ...]
    """Every other placement, by ascending bound."""
    counts: Counts
    """What the search did."""
    is_exact: bool
    """Whether nothing was left out for being too much."""
    bound: float
    """No plan at all has a lower value; that of the best where the search is exact."""


def search(
    problem: Problem,
    costs: CostsOf,
    *,
    objective: Objective | None = None,
    freshness: Sequence[int] = (0,),
    effort: Effort | None = None,
) -> Ranking:
    """The best plans of a problem.

    Args:
        problem: the step; whether it samples apart is decided here.
        costs: makes the cost model of a problem.
        objective: what is to be least; the step's seconds if nothing is said.
        freshness: bounds to try; 0 is in step, with generation where the policy is trained, more is a sampler
            apart.
        effort: how much may be looked at.

    Raises:
        PlanError: no plan fits, or none keeps the deadline.
    """
    found = _Search(problem, costs, objective or Objective(), freshness, effort or Effort())
    return found.ranking()


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


class _Search:
    def __init__(
        self, problem: Problem, costs: CostsOf, objective: Objective, freshness: Sequence[int], effort: Effort
    ) -> None:
        _require_prices(problem, objective)
        self._objective = objective
        self._effort = effort
        self._best: list[_Solved] = []
        self._choices: dict[tuple[int, Pool], Choices] = {}
        self._beside: dict[tuple[int, int], tuple[float, ...]] = {}
        self._allocations = self._solved = self._bounded = 0
        self._is_exact, self._dropped = True, float("inf")
        self._placements = [
            placement
            for bound in sorted(set(freshness))
            for placement in _placements(_variant(problem, bound), costs)
        ]

    def ranking(self) -> Ranking:
        roots = [(self._bounds(placement).root(), placement) for placement in self._placements]
        roots.sort(key=lambda one: (one[0], one[1].rank))
        bounds: list[tuple[float, _Placement, _Solved | None]] = []
        for root, placement in roots:
            cut = self._cut(placement)
            could = cut.admits(np.array([root]), np.array([0.0]))[0] and np.isfinite(root)
            self._bounded += not could
            best = self._search(placement, cut) if could else None
            if best is not None:
                self._best = sorted([*self._best, best], key=lambda one: one.key)
            bounds.append((root, placement, best))
        self._best = self._best[: self._effort.kept]
        if not self._best:
            raise _nothing_fits()
        kept = {id(one.placement) for one in self._best}
        losers = [
            Loser(
                pools=placement.names,
                freshness=placement.tables.problem.freshness,
                bound=root if best is None else best.way.value,
                found=None if best is None else self._ranked(best),
            )
            for root, placement, best in bounds
            if id(placement) not in kept
        ]
        ranked = tuple(self._ranked(one) for one in self._best)
        return Ranking(
            best=ranked,
            losers=tuple(sorted(losers, key=lambda one: (one.bound, one.pools))),
            counts=Counts(
                placements=len(self._placements),
                bounded=self._bounded,
                allocations=self._allocations,
                solved=self._solved,
            ),
            is_exact=self._is_exact,
            bound=min(ranked[0].value, self._dropped),
        )

    def _search(self, placement: _Placement, cut: Cut) -> _Solved | None:
        """The best plan of a placement that is better than the cut."""
        solver = Solver(placement.tables, placement.clock, placement.partition, self._objective)
        best: Way | None = None
        for width in (FEW, self._effort.allocations):
            bounds = self._bounds(placement)
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
        pools = range(len(bounds.choices))
        while len(places):
            rows = bounds.values(places)
            rows = rows.only(cut.admits(rows.values, rows.devices))
            if not len(rows.places):
                break
            places = rows.places[np.lexsort((rows.devices, rows.values))]
            new = [(pool, int(places[0, pool])) for pool in pools if not known[pool][places[0, pool]]]
            if new:
                for pool, number in new:
                    known[pool][number] = True
                    bounds.tighten(pool, number, solver.front(pool, bounds.choices[pool].places[number], cut))
                continue
            self._solved += 1
            taken = [bounds.choices[pool].places[places[0, pool]] for pool in pools]
            beside = self._functions(placement, sum(place.devices for place in taken))
            way = solver.solve(taken, bounds, beside, cut)
            if way is not None:
                best, cut = way, Cut(value=way.value, devices=way.devices)
            places = places[1:]
        return best

    def _cut(self, placement: _Placement) -> Cut:
        """What a plan of a placement must be better than: the last of those that are ranked."""
        if len(self._best) < self._effort.kept:
            return Cut()
        last = self._best[self._effort.kept - 1]
        wins_ties = placement.rank < last.placement.rank
        return Cut(value=last.way.value, devices=last.way.devices + wins_ties)

    def _bounds(self, placement: _Placement) -> Bounds:
        tables = placement.tables
        for pool in placement.partition:
            if (id(tables), pool) not in self._choices:
                self._choices[id(tables), pool] = choices(tables, pool)
        most = sum(fleet.devices for fleet in tables.fleets)
        return Bounds(
            tables.problem,
            placement.clock,
            [self._choices[id(tables), pool] for pool in placement.partition],
            self._objective,
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


def _variant(problem: Problem, freshness: int) -> Problem:
    if freshness == 0:
        return replace(problem, samples_apart=False, freshness=0)
    return problem.apart(freshness)


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
            fix="give price_per_hour of every fleet",
        )


def _nothing_fits() -> PlanError:
    return PlanError("no plan fits")
