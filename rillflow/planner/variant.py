"""Variant: the placements of a problem with one freshness bound, each with the best plan found of it.

a pool's units at a fleet and size ─ one option changed at a time until none is faster ─> its way
sizes of pools, one after another ─ the least bounds kept ─> allocations ─ the best evaluated ─> Ranked

Until a pool's way at a place is found, it counts as its units alone there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rillflow.planner.evaluate import evaluate, stages_by_name
from rillflow.planner.option import Costs, Option
from rillflow.planner.plan import Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import SAMPLER, Problem
from rillflow.planner.ranking import Floats, Objective, Ranked
from rillflow.planner.schedule import times
from rillflow.planner.work import Work

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


@dataclass(kw_only=True)
class _Ways:
    """A pool at every place, [places] and [places, stages]: as its units alone, until its way is found."""

    ways: list[_Way | None]
    fleet: NDArray[np.int64]
    devices: NDArray[np.int64]
    seconds: Floats
    loads: Floats

    def put(self, place: int, way: _Way | None) -> None:
        """Note the way of a place; infinite seconds where none fits."""
        self.ways[place] = way
        if way is None:
            self.loads[place] = self.seconds[place] = np.inf
            return
        self.loads[place] = way.load_s
        for index, spent in way.seconds.items():
            self.seconds[place, index] = spent


class Variant:
    """A problem with a freshness bound: its placements, and the ways of all pools, found once."""

    def __init__(self, problem: Problem, costs: Costs, objective: Objective) -> None:
        self.problem = problem
        self._costs = costs
        self._objective = objective
        self._units = problem.units
        self._fleets = problem.hardware.fleets
        self._found: dict[Pool, _Ways] = {}
        self._single: dict[tuple[int, str, int], tuple[_Way, ...]] = {}
        stages = problem.graph.stages
        self._stages = len(stages)
        self._works = [problem.work(stage) for stage in stages]
        self._published = [place for place, work in enumerate(self._works) if work is Work.PUBLISH]
        self._is_apart = any(unit.name == SAMPLER for unit in self._units)
        most = sum(fleet.devices for fleet in self._fleets)
        self._beside = np.zeros(self._stages)
        owned = {index for unit in self._units for index in unit.stages}
        for stage in stages:
            if stage.index not in owned:
                self._beside[stage.index] = costs.function_s(stage, most)

    def partitions(self) -> list[Partition]:
        """Every way to put the units into pools."""
        return list(partitions([unit.name for unit in self._units]))

    def bound(self, partition: Partition, room: NDArray[np.int64]) -> float:
        """The value if each stage had the place where it is fastest; infinite where a pool fits nowhere."""
        rows = np.zeros((1, 0), dtype=np.int64)
        least = np.array([min(int(self._ways(pool).devices.min()) for pool in partition)])
        return float(self._values(partition, rows, least, np.zeros(1), room)[0])

    def best(self, partition: Partition, room: NDArray[np.int64]) -> Ranked | None:
        """The best plan found of a placement on so many devices of each fleet; none where none fits."""
        rows = self._allocations(partition, room)
        devices, price = self._bought(partition, rows)
        while True:
            values = self._values(partition, rows, devices, price, room)
            order = np.lexsort((devices, values))[: 4 * EVALUATED]
            likely = [
                row for row in order if np.isfinite(values[row]) and self._packs(partition, rows[row], room)
            ]
            guessed = {
                (pool, int(place))
                for row in likely[:EVALUATED]
                for pool, place in zip(partition, rows[row], strict=True)
                if self._ways(pool).ways[place] is None
            }
            for pool, place in guessed:
                self._find(pool, place)
            if not guessed:
                break
        best: Ranked | None = None
        for row in likely[:EVALUATED]:
            if best is not None and values[row] > best.value:
                break
            found = self._ranked(self._plan(partition, rows[row]))
            if np.isfinite(found.value) and (best is None or preference(found) < preference(best)):
                best = found
        return best

    def _ranked(self, plan: Plan) -> Ranked:
        evaluation = evaluate(self.problem, self._costs, plan)
        price = sum(
            pool.devices * self.problem.hardware.fleet(pool.fleet).price_per_hour for pool in plan.pools
        )
        step, devices = np.array([evaluation.step_s]), np.array([evaluation.devices])
        value = float(self._objective.values(step, devices, np.array([price]))[0])
        stages = stages_by_name(self.problem, evaluation)
        told = replace(plan, predicted_step_s=evaluation.step_s, predicted_stages_s=stages)
        return Ranked(plan=told, evaluation=evaluation, value=value)

    def _plan(self, partition: Partition, row: NDArray[np.int64]) -> Plan:
        pools, units = [], {}
        for pool, place in zip(partition, row, strict=True):
            found = self._ways(pool)
            fleet = self._fleets[found.fleet[place]]
            name = self._units[pool[0]].name
            pools.append(
                PlannedPool(
                    name=name,
                    fleet=fleet.name,
                    devices=int(found.devices[place]),
                    device=fleet.device.name,
                )
            )
            way = found.ways[place]
            assert way is not None, "a plan is made of ways that were found"
            for unit, option in zip(pool, way.options, strict=True):
                units[self._units[unit].name] = PlannedUnit(
                    pool=name, grid=option.grid, generate_tp=option.generate_tp
                )
        return Plan(
            name=self.problem.graph.name,
            pools=tuple(sorted(pools, key=lambda pool: -pool.devices)),
            units=units,
            freshness=self.problem.freshness,
        )

    def _allocations(self, partition: Partition, room: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of pools, [allocations, pools], pool after pool, the least bounds carried on."""
        rows = np.zeros((1, 0), dtype=np.int64)
        used = np.zeros((1, len(self._fleets)), dtype=np.int64)
        for number, pool in enumerate(partition):
            found = self._ways(pool)
            taken = np.zeros((len(found.ways), len(self._fleets)), dtype=np.int64)
            taken[np.arange(len(found.ways)), found.fleet] = found.devices
            sums = used[:, None, :] + taken[None, :, :]
            old, new = np.nonzero((sums <= room).all(axis=2) & np.isfinite(found.loads)[None, :])
            rows, used = np.concatenate([rows[old], new[:, None]], axis=1), sums[old, new]
            if len(rows) > BEAM and number + 1 < len(partition):
                devices, price = self._bought(partition, rows)
                values = self._values(partition, rows, devices, price, room)
                kept = np.argsort(values, kind="stable")[:BEAM]
                rows, used = rows[kept], used[kept]
        return rows

    def _bought(self, partition: Partition, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats]:
        """Devices of each allocation, and their price an hour."""
        devices, price = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows))
        prices = np.array([fleet.price_per_hour for fleet in self._fleets])
        for pool, places in zip(partition, rows.T, strict=False):
            found = self._ways(pool)
            devices += found.devices[places]
            price += found.devices[places] * prices[found.fleet[places]]
        return devices, price

    def _values(
        self,
        partition: Partition,
        rows: NDArray[np.int64],
        devices: NDArray[np.int64],
        price: Floats,
        room: NDArray[np.int64],
    ) -> Floats:
        """The objective of allocations, nothing sent; pools without a place yet at their fastest."""
        seconds = np.repeat(self._beside[None, :], len(rows), axis=0)
        loads, owner = [], [-1] * self._stages
        for number, pool in enumerate(partition):
            found = self._ways(pool)
            if number < rows.shape[1]:
                seconds = seconds + found.seconds[rows[:, number]]
                loads.append(found.loads[rows[:, number]])
            else:
                fits = found.devices <= room[found.fleet]
                seconds = seconds + found.seconds[fits].min(axis=0, initial=np.inf)
                loads.append(np.full(len(rows), found.loads[fits].min(initial=np.inf)))
            for unit in pool:
                for index in self._units[unit].stages:
                    owner[index] = number
        pools = ["" if pool < 0 else str(pool) for pool in owner]
        graph = self.problem.graph
        ends = times(graph, list(seconds.T), pools, [0.0] * len(graph.edges)).ends
        step = np.stack([np.asarray(end) for end in ends]).max(axis=0)
        if self.problem.freshness:
            latency = np.stack([np.asarray(ends[index]) for index in self._published]).max(axis=0)
            step = np.maximum(np.max(loads, axis=0), latency / (self.problem.freshness + 1))
        return self._objective.values(step + self.problem.overhead_s, devices, price)

    def _packs(self, partition: Partition, row: NDArray[np.int64], room: NDArray[np.int64]) -> bool:
        """Whether the pools find room on the machines of their fleets."""
        for number, fleet in enumerate(self._fleets):
            ways = [self._ways(pool) for pool in partition]
            sizes = [
                int(one.devices[place])
                for one, place in zip(ways, row, strict=True)
                if one.fleet[place] == number
            ]
            if fleet.machines_needed(sizes) > max(1, room[number] // fleet.per_machine):
                return False
        return True

    def _ways(self, pool: Pool) -> _Ways:
        if pool not in self._found:
            sizes = [(number, size) for number, fleet in enumerate(self._fleets) for size in fleet.sizes]
            alone = [self._ways((unit,)) for unit in pool] if len(pool) > 1 else []
            shape = (len(sizes), self._stages)
            self._found[pool] = _Ways(
                ways=[None] * len(sizes),
                fleet=np.array([number for number, _ in sizes], dtype=np.int64),
                devices=np.array([size for _, size in sizes], dtype=np.int64),
                seconds=sum((one.seconds for one in alone), np.zeros(shape)),
                loads=sum((one.loads for one in alone), np.zeros(len(sizes))),
            )
            for place in range(len(sizes)) if not alone else ():
                self._find(pool, place)
        return self._found[pool]

    def _find(self, pool: Pool, place: int) -> None:
        ways = self._found[pool]
        fleet = self._fleets[ways.fleet[place]].name
        ways.put(place, self._way(pool, fleet, int(ways.devices[place])))

    def _way(self, pool: Pool, fleet: str, devices: int) -> _Way | None:
        """Grids of a pool's units: from the fastest and from the smallest of each, one changed at a time."""
        choices = [self._alone(unit, fleet, devices) for unit in pool]
        if not all(choices):
            return None
        if len(pool) == 1:
            return min(choices[0], key=lambda way: way.score)
        starts = [
            [ways[0] for ways in choices],
            [min(ways, key=lambda way: way.options[0].bytes) for ways in choices],
        ]
        found = [self._descended(pool, fleet, devices, choices, start) for start in starts]
        return min((one for one in found if one is not None), key=lambda way: way.score, default=None)

    def _descended(
        self, pool: Pool, fleet: str, devices: int, choices: Sequence[Sequence[_Way]], picked: Sequence[_Way]
    ) -> _Way | None:
        """The way that no change of one option makes faster, from a start; none where it never fits.

        Units that share a pool have less room to generate in than each alone, so that their loads alone bound
        the score from below.
        """
        best = self._laid(pool, fleet, devices, [way.options[0] for way in picked])
        while True:
            before = best
            for place, ways in enumerate(choices):
                for way in ways:
                    tried = [*picked[:place], way, *picked[place + 1 :]]
                    most = math.inf if best is None else best.score * (1 - 1e-9)
                    if way is picked[place] or sum(one.load_s for one in tried) >= most:
                        continue
                    laid = self._laid(pool, fleet, devices, [one.options[0] for one in tried])
                    if laid is not None and laid.score < most:
                        picked, best = tried, laid
            if best is before:
                return best

    def _alone(self, unit: int, fleet: str, devices: int) -> tuple[_Way, ...]:
        """A unit by itself on those options that none beats in seconds and in bytes, the fastest first."""
        key = (unit, fleet, devices)
        if key not in self._single:
            options = self._costs.options(self._units[unit], fleet, devices)
            ordered = sorted(options, key=lambda one: (sum(one.seconds.values()), one.bytes))
            kept: list[Option] = []
            for one in ordered:
                alike = [other for other in kept if other.generate_tp == one.generate_tp]
                if not any(_is_smaller(other, one) for other in alike):
                    kept.append(one)
            ways = [self._laid((unit,), fleet, devices, [one]) for one in kept]
            self._single[key] = tuple(way for way in ways if way is not None)
        return self._single[key]

    def _laid(self, pool: Pool, fleet: str, devices: int, options: Sequence[Option]) -> _Way | None:
        """What the units cost on these options; none where they do not fit."""
        named = {self._units[unit].name: option for unit, option in zip(pool, options, strict=True)}
        room = self._costs.room_bytes(fleet, named)
        if room < 0:
            return None
        seconds: dict[int, float] = {}
        load = 0.0
        for unit, option in zip(pool, options, strict=True):
            seconds.update(option.seconds)
            load += sum(option.seconds.values())
            own = self._units[unit]
            generating = [index for index in own.stages if self._works[index] is Work.GENERATE]
            if not generating:
                continue
            decoder = self._costs.decoder(own, option, fleet, devices, room)
            if decoder is None:
                return None
            for index in generating:
                stage = self.problem.graph.stages[index]
                seconds[index] = spent = self._costs.generate_s(stage, decoder)
                if self.problem.freshness:
                    spent = self._costs.steady_s(stage, decoder)
                load += spent
        if self._is_apart:
            seconds.update({index: 0.0 for index in self._published if index in seconds})
        score, bound = load, self.problem.freshness
        if bound:
            latency = sum(seconds.values()) / (bound + 1)
            score = max(load, latency) + 0.1 * (load + latency)
        return _Way(options=tuple(options), seconds=seconds, load_s=load, score=score)


def _is_smaller(one: Option, other: Option) -> bool:
    """Whether an option takes no more of any kind of bytes."""
    return (
        one.resident_bytes <= other.resident_bytes
        and one.working_bytes <= other.working_bytes
        and one.sampling_bytes <= other.sampling_bytes
    )
