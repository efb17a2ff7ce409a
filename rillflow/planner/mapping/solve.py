"""Solve: the best way to lie on one allocation, grids and all, or that none is better than the best known.

fronts of the pools ─ product, edges at their least ─> ways that could win ─ edges as they are ─> best way
        │                                                                          │
        └─ an edge's seconds depend on two grids, and cost the best way something ─┘
           └─> fronts again, with what a grid may cost elsewhere counted ─> best way, exact
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rillflow.planner.mapping.allocations import Bounds, Cut
from rillflow.planner.mapping.clock import Clock, Number
from rillflow.planner.mapping.fronts import MOST_COMBINATIONS, Admits, Front, front
from rillflow.planner.mapping.partitions import Partition
from rillflow.planner.mapping.tables import Place, Tables, UnitPlace
from rillflow.planner.objective import Floats, Objective
from rillflow.planner.option import Option
from rillflow.planner.problem import SAMPLER

MOST_WAYS = 300_000


@dataclass(frozen=True, kw_only=True)
class Way:
    """How every unit lies."""

    places: tuple[Place, ...]
    """Of each pool."""
    options: Mapping[int, Option]
    """Of each unit."""
    value: float
    """The objective's."""
    devices: int
    """Of all pools."""


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Seconds that depend on the options of two units of different pools."""

    edge: int
    """The edge's number; -1 for weights that cross to a sampler."""
    source: int
    destination: int
    seconds: Floats
    """[options of the source, options of the destination]."""


class Solver:
    """The exact search within an allocation of one placement.

    Example:
        Solver(tables, clock, partition, objective).solve(places, bounds, Cut())
    """

    def __init__(
        self,
        tables: Tables,
        clock: Clock,
        partition: Partition,
        objective: Objective,
        most: int = MOST_COMBINATIONS,
    ) -> None:
        self.is_whole = True
        """Whether nothing was left out for being too much."""
        self._tables = tables
        self._clock = clock
        self._partition = partition
        self._objective = objective
        self._most = most
        self._segments = [clock.segments(pool) for pool in range(len(partition))]
        self._pool_of = {unit: pool for pool, units in enumerate(partition) for unit in units}
        self._fronts: dict[tuple[int, Place], tuple[float, Front]] = {}

    def front(self, pool: int, place: Place, cut: Cut) -> Front:
        """A pool's ways at a place; remembered as long as it was not cut by more than the cut."""
        known = self._fronts.get((pool, place))
        if known is None or known[0] < cut.value:
            found = front(
                self._tables,
                self._partition[pool],
                place,
                segments=self._segments[pool],
                admits=self._admits(place, cut),
                most=self._most,
            )
            self.is_whole &= found.is_whole
            known = self._fronts[pool, place] = (cut.value, found)
        return known[1]

    def solve(self, places: Sequence[Place], bounds: Bounds, beside: Sequence[float], cut: Cut) -> Way | None:
        """The best way on this allocation that is better than the cut; none if none is.

        Args:
            places: of each pool.
            bounds: what counts a step's seconds.
            beside: seconds of functions and formulas on so many devices, by stage.
            cut: the best known.
        """
        fronts = [self.front(pool, place, cut) for pool, place in enumerate(places)]
        if not len(self._product(places, fronts, bounds, beside, [], cut)):
            return None
        pairs = self._pairs(places)
        picked = self._product(places, fronts, bounds, beside, pairs, cut)
        if not len(picked):
            return None
        at_least, _ = self._values(places, fronts, picked, bounds, beside, pairs, exactly=False)
        best = self._best(places, fronts, picked, bounds, beside, pairs)
        if best.value > at_least.min():
            tighter = cut if cut.value <= best.value else Cut(value=best.value, devices=best.devices)
            fronts = [
                front(
                    self._tables,
                    self._partition[pool],
                    place,
                    segments=self._segments[pool],
                    admits=self._admits(place, tighter),
                    handicaps=[self._handicap(unit, places, pairs) for unit in self._partition[pool]],
                    most=self._most,
                )
                for pool, place in enumerate(places)
            ]
            self.is_whole &= all(found.is_whole for found in fronts)
            picked = self._product(places, fronts, bounds, beside, pairs, tighter)
            if len(picked):
                best = min(
                    best,
                    self._best(places, fronts, picked, bounds, beside, pairs),
                    key=lambda way: way.value,
                )
        is_better = cut.admits(np.array([best.value]), np.array([float(best.devices)]))
        return best if is_better[0] else None

    def _admits(self, place: Place, cut: Cut) -> Admits:
        price = place.devices * self._tables.problem.hardware.fleet(place.fleet).price_per_hour

        def admits(loads: Floats) -> np.ndarray:
            many = np.ones(len(loads))
            values = self._objective.values(loads, place.devices * many, price * many)
            could: np.ndarray = np.isfinite(values) & (values <= cut.value)
            return could

        return admits

    def _product(
        self,
        places: Sequence[Place],
        fronts: Sequence[Front],
        bounds: Bounds,
        beside: Sequence[float],
        pairs: Sequence[_Pair],
        cut: Cut,
    ) -> np.ndarray:
        """Ways of each pool that could be better than the cut together, [rows, pools]."""
        picked = np.full((1, len(fronts)), -1, dtype=np.int64)
        if any(not len(found.loads) for found in fronts):
            return picked[:0]
        for pool in sorted(range(len(fronts)), key=lambda pool: len(fronts[pool].loads)):
            count = len(fronts[pool].loads)
            old = len(picked)
            picked = np.repeat(picked, count, axis=0)
            picked[:, pool] = np.tile(np.arange(count), old)
            values, devices = self._values(places, fronts, picked, bounds, beside, pairs, exactly=False)
            could = np.flatnonzero(cut.admits(values, devices))
            if len(could) > MOST_WAYS:
                self.is_whole = False
                could = could[np.argsort(values[could], kind="stable")[:MOST_WAYS]]
            picked = picked[could]
        return picked

    def _best(
        self,
        places: Sequence[Place],
        fronts: Sequence[Front],
        picked: np.ndarray,
        bounds: Bounds,
        beside: Sequence[float],
        pairs: Sequence[_Pair],
    ) -> Way:
        values, devices = self._values(places, fronts, picked, bounds, beside, pairs, exactly=True)
        row = int(np.argmin(values))
        options = {
            unit: self._table_options(unit, places)[fronts[pool].options[picked[row, pool], column]]
            for pool, units in enumerate(self._partition)
            for column, unit in enumerate(units)
        }
        return Way(places=tuple(places), options=options, value=float(values[row]), devices=int(devices[row]))

    def _values(
        self,
        places: Sequence[Place],
        fronts: Sequence[Front],
        picked: np.ndarray,
        bounds: Bounds,
        beside: Sequence[float],
        pairs: Sequence[_Pair],
        *,
        exactly: bool,
    ) -> tuple[Floats, Floats]:
        """Values and devices of rows of ways; pools without one, and pairs unless exactly, at their least."""
        seconds: list[Number] = list(beside)
        loads: list[Number] = []
        for pool, found in enumerate(fronts):
            rows = picked[:, pool]
            is_taken = len(rows) and rows[0] >= 0
            loads.append(found.loads[rows] if is_taken else float(found.loads.min()))
            least = found.seconds[rows] if is_taken else found.seconds.min(axis=0)[None, :]
            for index, place in enumerate(self._clock.pools):
                if place == pool:
                    seconds[index] = least[:, index]
        transfers: dict[int, Number] = {}
        for pair in pairs:
            spent: Number = float(pair.seconds.min())
            if exactly:
                spent = pair.seconds[
                    self._options(pair.source, fronts, picked),
                    self._options(pair.destination, fronts, picked),
                ]
            if pair.edge >= 0:
                transfers[pair.edge] = spent
                continue
            # in step the schedule says who waits; a sampler that streams stands still while weights come
            held = (pair.source, pair.destination) if self._tables.problem.freshness else (pair.source,)
            for index in self._tables.crossing:
                seconds[index] = seconds[index] + spent
                for unit in held:
                    loads[self._pool_of[unit]] = loads[self._pool_of[unit]] + spent
        step = np.broadcast_to(bounds.step_s(seconds, loads, transfers), len(picked))
        devices = np.full(len(picked), float(sum(place.devices for place in places)))
        price = sum(
            place.devices * self._tables.problem.hardware.fleet(place.fleet).price_per_hour
            for place in places
        )
        return self._objective.values(step, devices, np.full(len(picked), price)), devices

    def _options(self, unit: int, fronts: Sequence[Front], picked: np.ndarray) -> np.ndarray:
        pool = self._pool_of[unit]
        column = self._partition[pool].index(unit)
        found: np.ndarray = fronts[pool].options[picked[:, pool], column]
        return found

    def _table_options(self, unit: int, places: Sequence[Place]) -> tuple[Option, ...]:
        table = self._tables.unit(unit, places[self._pool_of[unit]])
        assert table is not None, "a unit has options at the place its pool was given"
        return table.options

    def _pairs(self, places: Sequence[Place]) -> list[_Pair]:
        """Edges between pools, and weights on their way to a sampler."""
        graph, tables = self._tables.problem.graph, self._tables
        owner = {index: unit for unit in self._pool_of for index in tables.stages(unit)}
        found = []
        for number in self._clock.crossing:
            edge = graph.edges[number]
            ends = [
                UnitPlace(unit=unit, place=places[self._pool_of[unit]])
                for unit in (owner[edge.source], owner[edge.destination])
            ]
            seconds = tables.transfers(number, ends[0], ends[1])
            found.append(_Pair(edge=number, source=ends[0].unit, destination=ends[1].unit, seconds=seconds))
        for index in tables.crossing:
            sampler = next(number for number, unit in enumerate(tables.units) if unit.name == SAMPLER)
            ends = [
                UnitPlace(unit=unit, place=places[self._pool_of[unit]]) for unit in (owner[index], sampler)
            ]
            seconds = tables.crossings(ends[0], ends[1])
            found.append(_Pair(edge=-1, source=ends[0].unit, destination=sampler, seconds=seconds))
        return found

    def _handicap(self, unit: int, places: Sequence[Place], pairs: Sequence[_Pair]) -> Floats:
        """What it may cost elsewhere to have one option of a unit in place of another, by stage."""
        stages = list(self._tables.stages(unit))
        graph = self._tables.problem.graph
        count = len(self._table_options(unit, places))
        inward = np.zeros((count, count, len(stages)))
        outward = np.zeros((count, count, len(stages)))
        for pair in pairs:
            for role, numbers in ((pair.source, pair.seconds), (pair.destination, pair.seconds.T)):
                if role != unit:
                    continue
                more = np.maximum(numbers[:, None, :] - numbers[None, :, :], 0.0).max(axis=2)
                if pair.edge < 0:
                    inward[more > 0] = np.inf
                    continue
                edge = graph.edges[pair.edge]
                if role == pair.source:
                    column = stages.index(edge.source)
                    outward[:, :, column] = np.maximum(outward[:, :, column], more)
                else:
                    column = stages.index(edge.destination)
                    inward[:, :, column] = np.maximum(inward[:, :, column], more)
        return inward + outward
