"""Variant: the placements of a problem with one freshness bound, each with the best plan found of it.

a pool's units at a fleet and size ─ one option changed at a time until none is faster ─> its way
sizes of pools, one after another ─ the least bounds kept ─> allocations ─ the best evaluated ─> Ranked

A place is a fleet and a size that a pool may have. Until a pool's way at a place is found, it counts as its
units alone there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.evaluate import predicted
from rillflow.planner.grid import Option
from rillflow.planner.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import Problem
from rillflow.planner.ranking import Floats, Objective, Ranked
from rillflow.planner.schedule import BESIDE, in_turn, tasks_of

Whole = NDArray[np.int64]
Pool = tuple[int, ...]
"""Units that share devices, by their place among the problem's, ascending."""
Partition = tuple[Pool, ...]
"""Pools, ordered by their first unit."""
BEAM = 4096
"""Allocations of the first pools that are carried on to the next."""
EVALUATED = 8
"""Allocations of a placement that are evaluated with everything that is sent between pools."""


def partitions(names: Sequence[str]) -> Iterator[Partition]:
    """Every set partition of units, each once; a sampler shares its pool with none.

    1, 2, 5, 15, 52, 203, 877 of 1 to 7 units.
    """
    if not names:
        yield ()
        return
    *before, last = names
    for rest in partitions(before):
        places = range(len(rest)) if last != SAMPLER else ()
        yield from ((*rest[:place], (*rest[place], len(before)), *rest[place + 1 :]) for place in places)
        yield (*rest, (len(before),))


def preference(one: Ranked) -> tuple[float, int, int, int, tuple[str, ...]]:
    """Of equal plans that with fewer devices, fewer pools, fresher tokens, the first names."""
    pools = tuple(pool.name for pool in one.plan.pools)
    return (one.value, one.evaluation.devices, len(pools), one.plan.freshness, pools)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How the units of a pool lie at one place."""

    options: tuple[Option, ...]
    seconds: Mapping[int, float]
    load_s: float
    score: float
    """What is least of the way that is kept: the load, and with a bound the latency that limits steps too."""


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """A pool at every place, [places] and [places, stages]: as its units alone, until its way is found."""

    ways: list[_Way | None]
    seconds: Floats
    loads: Floats


class Variant:
    """A problem with a freshness bound: its placements, and the ways of all pools, found once."""

    def __init__(self, problem: Problem, costs: CostModel, objective: Objective) -> None:
        self.problem = problem
        self._costs, self._objective = costs, objective
        self._units, self._stages = problem.units, problem.graph.stages
        self._fleets = problem.hardware.fleets
        self._found: dict[Pool, _Ways] = {}
        self._is_apart = any(unit.name == SAMPLER for unit in self._units)
        owned = {index for unit in self._units for index in unit.stages}
        most = problem.hardware.devices
        self._beside = np.array(
            [0.0 if stage.index in owned else costs.function_s(stage, most) for stage in self._stages]
        )
        self._places = [(fleet, size) for fleet in self._fleets for size in fleet.sizes]
        """Where a pool may lie; the arrays say of each its fleet's number, devices, price an hour."""
        self._fleet = np.array([self._fleets.index(fleet) for fleet, _ in self._places])
        self._devices = np.array([size for _, size in self._places])
        self._prices = np.array([fleet.price_per_hour * size for fleet, size in self._places])
        self._taken = self._devices[:, None] * (self._fleet[:, None] == np.arange(len(self._fleets)))

    def partitions(self) -> list[Partition]:
        """Every way to put the units into pools."""
        return list(partitions([unit.name for unit in self._units]))

    def bound(self, partition: Partition, room: Whole) -> float:
        """The value if each stage had the place where it is fastest; infinite where a pool fits nowhere."""
        return float(self._values(partition, np.zeros((1, 0), dtype=np.int64), room)[0])

    def best(self, partition: Partition, room: Whole) -> Ranked | None:
        """The best plan found of a placement on so many devices of each fleet; none where none fits."""
        rows = self._allocations(partition, room)
        while True:
            values = self._values(partition, rows, room)
            order = np.lexsort((self._devices[rows].sum(axis=1), values))[: 4 * EVALUATED]
            likely = [row for row in order if np.isfinite(values[row]) and self._packs(rows[row], room)]
            likely = likely[:EVALUATED]
            guessed = {
                (pool, place)
                for row in likely
                for pool, place in zip(partition, rows[row].tolist(), strict=True)
                if self._ways(pool).ways[place] is None
            }
            if not guessed:
                break
            for pool, place in guessed:
                self._find(pool, place)
        best: Ranked | None = None
        for row in likely:
            if best is not None and values[row] > best.value:
                break
            found = self._ranked(partition, rows[row])
            if np.isfinite(found.value) and (best is None or preference(found) < preference(best)):
                best = found
        return best

    def _ranked(self, partition: Partition, row: Whole) -> Ranked:
        """The plan of an allocation, evaluated."""
        pools, units = [], {}
        for pool, place in zip(partition, row.tolist(), strict=True):
            (fleet, size), way = self._places[place], self._ways(pool).ways[place]
            name = self._units[pool[0]].name
            pools.append(PlannedPool(name=name, fleet=fleet.name, devices=size, device=fleet.device.name))
            assert way is not None, "a plan is made of ways that were found"
            for unit, option in zip(pool, way.options, strict=True):
                units[self._units[unit].name] = PlannedUnit(
                    pool=name, grid=option.grid, generate_tp=option.generate_tp
                )
        plan = Plan(
            name=self.problem.graph.name,
            pools=tuple(sorted(pools, key=lambda pool: -pool.devices)),
            units=units,
            freshness=self.problem.freshness,
        )
        plan, found = predicted(self.problem, self._costs, plan)
        value = self._valued(np.array([found.step_s]), row[None])
        return Ranked(plan=plan, evaluation=found, value=float(value[0]))

    def _allocations(self, partition: Partition, room: Whole) -> Whole:
        """Places of pools, [allocations, pools], pool after pool, the least bounds carried on."""
        rows = np.zeros((1, 0), dtype=np.int64)
        for pool in partition:
            if len(rows) > BEAM:
                rows = rows[np.argsort(self._values(partition, rows, room), kind="stable")[:BEAM]]
            used = self._taken[rows].sum(axis=1)[:, None] + self._taken
            fits = (used <= room).all(axis=2) & np.isfinite(self._ways(pool).loads)
            old, new = np.nonzero(fits)
            rows = np.column_stack([rows[old], new])
        return rows

    def _values(self, partition: Partition, rows: Whole, room: Whole) -> Floats:
        """The objective of allocations, nothing sent; pools without a place yet at their fastest."""
        seconds, loads = np.repeat(self._beside[None, :], len(rows), axis=0), []
        within = self._devices <= room[self._fleet]
        for number, pool in enumerate(partition):
            found = self._ways(pool)
            if number < rows.shape[1]:
                seconds = seconds + found.seconds[rows[:, number]]
                loads.append(found.loads[rows[:, number]])
            else:
                seconds = seconds + found.seconds[within].min(axis=0, initial=np.inf)
                loads.append(np.full(len(rows), found.loads[within].min(initial=np.inf)))
        owners = {
            index: str(number)
            for number, pool in enumerate(partition)
            for unit in pool
            for index in self._units[unit].stages
        }
        graph, bound = self.problem.graph, self.problem.freshness
        pools = [owners.get(stage.index, BESIDE) for stage in self._stages]
        tasks = tasks_of(graph, seconds=list(seconds.T), pools=pools, transfers=[0.0] * len(graph.edges))
        ends = np.stack([timing.end_s for timing in in_turn(tasks, latest=np.maximum)])
        step = ends.max(axis=0)
        if bound:
            latency = ends[sorted(self.problem.publishing)].max(axis=0)
            step = np.maximum(np.max(loads, axis=0), latency / (bound + 1))
        return self._valued(step + self.problem.overhead_s, rows)

    def _valued(self, step_s: Floats, rows: Whole) -> Floats:
        """The objective of steps on what allocations take, which is a device at least."""
        devices = np.maximum(self._devices[rows].sum(axis=1), 1)
        return self._objective.values(step_s, devices, self._prices[rows].sum(axis=1))

    def _packs(self, row: Whole, room: Whole) -> bool:
        """Whether the pools find room on the machines of their fleets."""
        return all(
            fleet.machines_needed(self._devices[row][self._fleet[row] == number].tolist())
            <= max(1, room[number] // fleet.per_machine)
            for number, fleet in enumerate(self._fleets)
        )

    def _ways(self, pool: Pool) -> _Ways:
        if pool not in self._found:
            alone = [self._ways((unit,)) for unit in pool] if len(pool) > 1 else []
            count = len(self._devices)
            self._found[pool] = _Ways(
                ways=[None] * count,
                seconds=sum((one.seconds for one in alone), np.zeros((count, len(self._stages)))),
                loads=sum((one.loads for one in alone), np.zeros(count)),
            )
            for place in range(count) if not alone else ():
                self._find(pool, place)
        return self._found[pool]

    def _find(self, pool: Pool, place: int) -> None:
        """Note the way of a pool at a place; infinite seconds where none fits."""
        found, way = self._ways(pool), self._way(pool, place)
        found.ways[place] = way
        if way is None:
            found.loads[place] = found.seconds[place] = np.inf
        else:
            found.loads[place] = way.load_s
            found.seconds[place, list(way.seconds)] = list(way.seconds.values())

    def _way(self, pool: Pool, place: int) -> _Way | None:
        """Grids of a pool's units: from the fastest and from the smallest of each, one changed at a time."""
        fleet, devices = self._places[place]
        choices = [self._costs.options(self._units[unit], fleet.name, devices) for unit in pool]
        if not all(choices):
            return None
        starts = (
            [min(options, key=lambda one: (sum(one.seconds.values()), one.bytes)) for options in choices],
            [min(options, key=lambda one: one.bytes) for options in choices],
        )
        found = [self._descended(pool, place, choices, start) for start in starts]
        return min((one for one in found if one is not None), key=lambda way: way.score, default=None)

    def _descended(
        self, pool: Pool, place: int, choices: Sequence[Sequence[Option]], picked: Sequence[Option]
    ) -> _Way | None:
        """The way that no change of one option makes faster, from a start; none where it never fits."""
        best = self._laid(pool, place, picked)
        while True:
            before = best
            for number, options in enumerate(choices):
                for option in options:
                    tried = [*picked[:number], option, *picked[number + 1 :]]
                    most = math.inf if best is None else best.score * (1 - 1e-9)
                    laid = None if option is picked[number] else self._laid(pool, place, tried, most)
                    if laid is not None:
                        picked, best = tried, laid
            if best is before:
                return best

    def _laid(self, pool: Pool, place: int, options: Sequence[Option], most: float = math.inf) -> _Way | None:
        """What the units cost on these options; none where they do not fit, or score ``most`` or more."""
        fleet, devices = self._places[place]
        units = [self._units[unit] for unit in pool]
        seconds = {index: spent for option in options for index, spent in option.seconds.items()}
        load, bound = sum(seconds.values()), self.problem.freshness
        if load >= most:
            return None
        named = {unit.name: option for unit, option in zip(units, options, strict=True)}
        room = self._costs.room_bytes(fleet.name, named)
        if room < 0:
            return None
        for unit, option in zip(units, options, strict=True):
            for index in self.problem.generating.intersection(unit.stages):
                decoder = self._costs.decoder(unit, option, fleet.name, devices, room)
                if decoder is None:
                    return None
                stage = self._stages[index]
                seconds[index] = spent = self._costs.generate_s(stage, decoder)
                load += self._costs.steady_s(stage, decoder) if bound else spent
        if self._is_apart:
            seconds |= dict.fromkeys(self.problem.publishing.intersection(seconds), 0.0)
        latency = sum(seconds.values()) / (bound + 1)
        score = max(load, latency) + 0.1 * (load + latency) if bound else load
        if score >= most:
            return None
        return _Way(options=tuple(options), seconds=seconds, load_s=load, score=score)
