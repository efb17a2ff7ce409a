"""Variant: the placements of a problem with one freshness bound, and the best plan found for each.

single units at every place ─> lower bounds of allocations ─ lowest first ─> evaluated, until none can win
a pool's units at a place ─ one option changed at a time until none is faster ──┘

A place is a machine type and a possible pool size. Units that share a pool take at least as long as each unit
alone there, so single units give the bound of an allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from rillflow.placement.plan import SAMPLER, Plan, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import Option
from rillflow_planner.evaluate import BESIDE, in_turn, tasks_of
from rillflow_planner.problem import Problem
from rillflow_planner.ranking import Floats, Ranked, SearchObjective, rank

Whole = NDArray[np.int64]
Pool = tuple[int, ...]
"""Units that share devices, as ascending indices into the problem's units."""
Partition = tuple[Pool, ...]
"""Pools, ordered by their first unit."""
BEAM = 4096
"""Largest number of partial allocations kept from pool to pool."""
EVALUATED = 16
"""Largest number of allocations of a placement that are evaluated with transfers between pools."""
STARTS = 32
"""Largest number of options of a pool's units, taken together, from which a search of its grids may begin."""


def partitions(names: Sequence[str]) -> Iterator[Partition]:
    """Yield every set partition of units once; a sampler does not share its pool.

    There are 1, 2, 5, 15, 52, 203, 877 partitions of 1 to 7 units.
    """
    if not names:
        yield ()
        return
    *before, last = names
    for rest in partitions(before):
        places = range(len(rest)) if last != SAMPLER else ()
        yield from ((*rest[:place], (*rest[place], len(before)), *rest[place + 1 :]) for place in places)
        yield (*rest, (len(before),))


def preference(one: Ranked) -> tuple[float, int, int, float, tuple[str, ...]]:
    """Return the sort key: value, then fewer devices, fewer pools, lower freshness, and names."""
    pools = tuple(pool.name for pool in one.plan.pools)
    return (one.value, one.evaluation.devices, len(pools), one.plan.freshness, pools)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Options of the units of a pool at one place, with their cost."""

    options: tuple[Option, ...]
    seconds: Mapping[int, float]
    load_s: float
    score: float
    """Minimised score: the load; with freshness above 0, also the latency that limits steps."""


class Variant:
    """A problem with one freshness bound: its placements, and cached ways of all pools."""

    def __init__(self, problem: Problem, costs: CostModel, objective: SearchObjective) -> None:
        self.problem = problem
        self._costs, self._objective = costs, objective
        self._units, self._stages = problem.units, problem.graph.stages
        self._fleets = problem.hardware.fleets
        self.partitions = [*partitions([unit.name for unit in self._units])]
        """All ways to distribute the units to pools."""
        self._found: dict[tuple[Pool, int], _Way | None] = {}
        self._places = [(fleet, size) for fleet in self._fleets for size in fleet.sizes]
        """Possible places of a pool; the arrays hold each place's machine type, devices, and price per hour.
        """
        self._fleet = np.array([self._fleets.index(fleet) for fleet, _ in self._places])
        self._devices = np.array([size for _, size in self._places])
        self._prices = np.array([fleet.price_per_hour * size for fleet, size in self._places])
        self._taken = self._devices[:, None] * (self._fleet[:, None] == np.arange(len(self._fleets)))
        self._seconds = np.zeros((len(self._units), len(self._places), len(self._stages)))
        """Seconds of every stage, for each unit alone at each place; infinite if the unit does not fit."""
        self._loads = np.full(self._seconds.shape[:2], np.inf)
        for unit, place in np.ndindex(*self._loads.shape):
            way = self._way((unit,), place)
            if way is not None:
                self._loads[unit, place] = way.load_s
                self._seconds[unit, place, list(way.seconds)] = list(way.seconds.values())

    def bound(self, partition: Partition, room: Whole) -> float:
        """Return a lower bound: each stage at its fastest place; infinite if a unit fits nowhere."""
        return float(self._values(partition, np.zeros((1, 0), dtype=np.int64), room)[0])

    def best(self, partition: Partition, room: Whole) -> Ranked | None:
        """Return the best plan found for a placement within these devices of each machine type.

        None if none fits.
        """
        rows = self._allocations(partition, room)
        values = self._values(partition, rows, room)
        best: Ranked | None = None
        evaluated = 0
        for row in np.lexsort((self._devices[rows].sum(axis=1), values)):
            if evaluated == EVALUATED or values[row] > (np.inf if best is None else best.value):
                break
            ways = [self._way(pool, place) for pool, place in zip(partition, rows[row].tolist(), strict=True)]
            if None in ways or not self._packs(rows[row], room):
                continue
            found = self._ranked(partition, rows[row])
            evaluated += 1
            if np.isfinite(found.value) and (best is None or preference(found) < preference(best)):
                best = found
        return best

    def _ranked(self, partition: Partition, row: Whole) -> Ranked:
        """Return the evaluated plan of an allocation."""
        pools, units = [], {}
        for pool, place in zip(partition, row.tolist(), strict=True):
            (fleet, size), way = self._places[place], self._way(pool, place)
            name = self._units[pool[0]].name
            pools.append(fleet.pool(name, size))
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
        return rank(self.problem, self._costs, plan, self._objective)

    def _allocations(self, partition: Partition, room: Whole) -> Whole:
        """Return places of pools, [allocations, pools], extended pool by pool from the lowest bounds."""
        rows = np.zeros((1, 0), dtype=np.int64)
        for pool in partition:
            if len(rows) > BEAM:
                rows = rows[np.argsort(self._values(partition, rows, room), kind="stable")[:BEAM]]
            used = self._taken[rows].sum(axis=1)[:, None] + self._taken
            fits = (used <= room).all(axis=2) & np.isfinite(self._loads[list(pool)].sum(axis=0))
            rows = np.column_stack([rows[(found := np.nonzero(fits))[0]], found[1]])
        return rows

    def _values(self, partition: Partition, rows: Whole, room: Whole) -> Floats:
        """Return the objective of allocations without transfers.

        Pools without a place use their fastest one.
        """
        problem, bound = self.problem, self.problem.freshness
        within, most = self._devices <= room[self._fleet], problem.hardware.devices
        homes = [BESIDE] * len(self._stages)
        seconds, busy = np.zeros((len(rows), len(self._stages))), np.zeros(len(rows))
        for number, pool in enumerate(partition):
            spent, loads = self._seconds[list(pool)].sum(axis=0), self._loads[list(pool)].sum(axis=0)
            if number < rows.shape[1]:
                seconds, load = seconds + spent[rows[:, number]], loads[rows[:, number]]
            else:
                seconds = seconds + spent[within].min(axis=0, initial=np.inf)
                load = loads[within].min(initial=np.inf)
            busy = np.maximum(busy, load)
            for index in (index for unit in pool for index in self._units[unit].stages):
                homes[index] = str(number)
        spent_s = [
            self._costs.function_s(stage, most) if home == BESIDE else own
            for stage, home, own in zip(self._stages, homes, seconds.T, strict=True)
        ]
        tasks = tasks_of(
            problem.graph, seconds=spent_s, pools=homes, transfers=[0.0] * len(problem.graph.edges)
        )
        ends = [timing.end_s for timing in in_turn(tasks, latest=np.maximum)]
        step = np.maximum.reduce([np.broadcast_to(end, len(rows)) for end in ends])
        if bound:
            latency = np.maximum.reduce([ends[index] for index in sorted(problem.publishing)])
            # where admission counts rows, the longest may be left for later steps
            step = busy if problem.hardware.engine.counts else np.maximum(busy, latency / (bound + 1))
        return self._valued(step + problem.overhead_s, rows)

    def _valued(self, step_s: Floats, rows: Whole) -> Floats:
        """Return the objective of steps on the devices of allocations, at least one device."""
        devices = np.maximum(self._devices[rows].sum(axis=1), 1)
        return self._objective.values(step_s, devices, self._prices[rows].sum(axis=1))

    def _packs(self, row: Whole, room: Whole) -> bool:
        """Return whether the pools fit on the machines of their types."""
        return all(
            fleet.machines_needed(self._devices[row][self._fleet[row] == number].tolist())
            <= max(1, room[number] // fleet.per_machine)
            for number, fleet in enumerate(self._fleets)
        )

    def _way(self, pool: Pool, place: int) -> _Way | None:
        """Return the way that no change of one option improves.

        Start from the smallest options, or the first of ``STARTS`` small ones that fit; None without room.
        """
        if (pool, place) not in self._found:
            fleet, devices = self._places[place]
            choices = [self._costs.options(self._units[unit], fleet.name, devices) for unit in pool]
            smallest = (sorted(one, key=lambda it: it.bytes) for one in choices)
            best: _Way | None = None
            before: _Way | None = None
            for tried in islice(product(*smallest), STARTS):
                picked, best = list(tried), self._laid(pool, place, tried)
                if best is not None:
                    break
            while best is not None and best is not before:
                before = best
                for number, option in ((n, one) for n, options in enumerate(choices) for one in options):
                    changed = [*picked[:number], option, *picked[number + 1 :]]
                    found = self._laid(pool, place, changed, best.score * (1 - 1e-9))
                    if found is not None:
                        picked, best = changed, found
            self._found[pool, place] = best
        return self._found[pool, place]

    def _laid(self, pool: Pool, place: int, options: Sequence[Option], most: float = math.inf) -> _Way | None:
        """Return the cost of the units on these options.

        None without room, or if the score reaches ``most``.
        """
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
        if self.problem.samples_apart:
            seconds |= dict.fromkeys(self.problem.publishing.intersection(seconds), 0.0)
        latency = sum(seconds.values()) / (bound + 1)
        score = max(load, latency) + 0.1 * (load + latency) if bound else load
        if score >= most:
            return None
        return _Way(options=tuple(options), seconds=seconds, load_s=load, score=score)
