"""Tables: the cost model's answers as arrays, asked once; what a unit costs on so many devices at the least.

Costs.options ───────────────> UnitTable   seconds, bytes [options]
Costs.decoder, generate_s ──> generated    seconds of a copy with so much room
UnitTables of a pool ───────> Choices      least seconds [fleet and size]: no way to lie there is faster
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rillflow.planner.grid import Grid
from rillflow.planner.hardware import Fleet
from rillflow.planner.mapping.partitions import Pool
from rillflow.planner.objective import Floats
from rillflow.planner.option import Costs, Option, Seat
from rillflow.planner.problem import SAMPLER, Problem, Unit
from rillflow.planner.work import Work


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a pool may be."""

    fleet: str
    """The machines' name."""
    devices: int
    """How many."""


@dataclass(frozen=True, kw_only=True)
class UnitTable:
    """The options of a unit at one place; generation counts with all the room it could have."""

    options: tuple[Option, ...]
    """As the cost model gives them."""
    seconds: Floats
    """[options, stages of the unit]; 0 of publishing to a sampler, which depends on two units."""
    loads: Floats
    """Seconds of the pool in a step, streamed generation with replicas that never run dry, [options]."""
    generation: Floats
    """The part of a load that is generation, [options]."""
    bytes: Floats
    """Resident, working and sampling bytes, [options, 3]."""
    copies: np.ndarray
    """Options that generate alike have the same number, [options]."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What generation with a certain room costs."""

    seconds: tuple[float, ...]
    """Of every stage that generates, until its last row has ended."""
    load_s: float
    """Of all of them, as the pool's load counts it."""


class Tables:
    """A problem's costs as arrays.

    Example:
        Tables(problem, CostModel(problem)).unit(0, Place(fleet="h100", devices=8)).seconds.min(axis=0)
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self.problem = problem
        self.costs = costs
        self.units = problem.units
        self._unit_tables: dict[tuple[int, Place], UnitTable | None] = {}
        self._generated: dict[tuple[int, Place, int, int, float], Generated | None] = {}

    @cached_property
    def fleets(self) -> tuple[Fleet, ...]:
        """The cluster's."""
        return self.problem.hardware.fleets

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every fleet and size a pool may have, ascending within a fleet."""
        return tuple(Place(fleet=fleet.name, devices=size) for fleet in self.fleets for size in fleet.sizes)

    def stages(self, unit: int) -> tuple[int, ...]:
        """The stages of a unit, in the order of its table's columns."""
        return self.units[unit].stages

    @cached_property
    def generating(self) -> tuple[tuple[int, ...], ...]:
        """By unit, the columns of its table that generate."""
        graph = self.problem.graph
        return tuple(
            tuple(
                column
                for column, index in enumerate(unit.stages)
                if self.problem.work(graph.stages[index]) is Work.GENERATE
            )
            for unit in self.units
        )

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """The stages that bring weights from one pool to another."""
        if not any(unit.name == SAMPLER for unit in self.units):
            return ()
        return tuple(
            stage.index for stage in self.problem.graph.stages if self.problem.work(stage) is Work.PUBLISH
        )

    def unit(self, unit: int, place: Place) -> UnitTable | None:
        """The options of a unit at a place; none where it does not fit."""
        key = (unit, place)
        if key not in self._unit_tables:
            self._unit_tables[key] = self._table(unit, place)
        return self._unit_tables[key]

    def generated(self, unit: int, place: Place, option: Option, room_bytes: float) -> Generated | None:
        """Seconds of generation beside which so much room is left; none where no row fits."""
        key = (unit, place, option.generate_tp, option.grid.ep, room_bytes)
        if key not in self._generated:
            self._generated[key] = self._generate(self.units[unit], unit, place, option, room_bytes)
        return self._generated[key]

    def room(self, pool: Pool, place: Place, options: Sequence[Option]) -> float:
        """Bytes left for a cache."""
        named = {self.units[unit].name: option for unit, option in zip(pool, options, strict=True)}
        return self.costs.room_bytes(place.fleet, named)

    def seat(self, place: Place, option: Option, pool: str) -> Seat:
        """A unit's seat."""
        return Seat(pool=pool, fleet=place.fleet, devices=place.devices, grid=option.grid)

    def _generate(
        self, named: Unit, unit: int, place: Place, option: Option, room_bytes: float
    ) -> Generated | None:
        decoder = self.costs.decoder(named, option, place.fleet, place.devices, room_bytes)
        if decoder is None:
            return None
        stages = [self.problem.graph.stages[named.stages[column]] for column in self.generating[unit]]
        seconds = tuple(self.costs.generate_s(stage, decoder) for stage in stages)
        load = sum(seconds)
        if self.problem.freshness:
            load = sum(self.costs.steady_s(stage, decoder) for stage in stages)
        return Generated(seconds=seconds, load_s=load)

    def _table(self, unit: int, place: Place) -> UnitTable | None:
        named = self.units[unit]
        options = self.costs.options(named, place.fleet, place.devices)
        alone = {number: self._alone(unit, place, option) for number, option in enumerate(options)}
        generated = {number: found for number, found in alone.items() if found is not None}
        if not generated:
            return None
        kept = list(generated)
        seconds, loads = np.zeros((len(kept), len(named.stages))), np.zeros(len(kept))
        for row, number in enumerate(kept):
            given, ends = options[number].seconds, iter(generated[number].seconds)
            for column, index in enumerate(named.stages):
                if column in self.generating[unit]:
                    seconds[row, column] = next(ends)
                elif index not in self.crossing:
                    seconds[row, column] = given[index]
            silent = [column for column in range(len(named.stages)) if column not in self.generating[unit]]
            loads[row] = seconds[row, silent].sum() + generated[number].load_s
        options = tuple(options[number] for number in kept)
        alike: dict[tuple[int, int], int] = {}
        copies = [
            alike.setdefault((one.generate_tp, one.grid.ep), len(alike)) if self.generating[unit] else 0
            for one in options
        ]
        return UnitTable(
            options=options,
            seconds=seconds,
            loads=loads,
            generation=np.array([generated[number].load_s for number in kept]),
            bytes=np.array([(one.resident_bytes, one.working_bytes, one.sampling_bytes) for one in options]),
            copies=np.array(copies),
        )

    def _alone(self, unit: int, place: Place, option: Option) -> Generated | None:
        if not self.generating[unit]:
            return Generated(seconds=(), load_s=0.0)
        room = self.room((unit,), place, [option])
        return self.generated(unit, place, option, room) if room >= 0 else None


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Every place of one pool, with what its units cost there at the least."""

    places: tuple[Place, ...]
    """Fleets and sizes on which its units could fit together."""
    fleet: np.ndarray
    """The fleet's number, [places]."""
    devices: np.ndarray
    """[places]."""
    price: Floats
    """Of all devices an hour, [places]."""
    least: Floats
    """Seconds of every stage of the graph, 0 of other pools', [places, stages]."""
    load: Floats
    """Seconds of a step in which the pool computes, [places]."""

    def only(self, kept: np.ndarray) -> Choices:
        """Some of them, [places] of bool or numbers."""
        numbers = np.arange(len(self.places))[kept]
        return Choices(
            places=tuple(self.places[number] for number in numbers),
            fleet=self.fleet[numbers],
            devices=self.devices[numbers],
            price=self.price[numbers],
            least=self.least[numbers],
            load=self.load[numbers],
        )


def choices(tables: Tables, pool: Pool) -> Choices:
    """Where a pool may be; no combination of options there is faster in any stage than its ``least``."""
    found = [(place, least) for place in tables.places if (least := _least(tables, pool, place)) is not None]
    fleets = {fleet.name: number for number, fleet in enumerate(tables.fleets)}
    numbers = [fleets[place.fleet] for place, _ in found]
    return Choices(
        places=tuple(place for place, _ in found),
        fleet=np.array(numbers, dtype=np.int64),
        devices=np.array([place.devices for place, _ in found], dtype=np.int64),
        price=np.array(
            [
                place.devices * tables.fleets[number].price_per_hour
                for number, (place, _) in zip(numbers, found, strict=True)
            ]
        ),
        least=np.array([least.seconds for _, least in found]).reshape(
            len(found), len(tables.problem.graph.stages)
        ),
        load=np.array([least.load_s for _, least in found]),
    )


def _least(tables: Tables, pool: Pool, place: Place) -> Generated | None:
    """The least seconds of every stage of the graph at a place, with the most room there could be."""
    found = []
    for unit in pool:
        table = tables.unit(unit, place)
        if table is None:
            return None
        found.append(table)
    room = tables.room(pool, place, [_smallest(table) for table in found])
    if room < 0:
        return None
    seconds, load = np.zeros(len(tables.problem.graph.stages)), 0.0
    for unit, table in zip(pool, found, strict=True):
        seconds[list(tables.stages(unit))] = table.seconds.min(axis=0)
        load += float(table.loads.min())
    return Generated(seconds=tuple(seconds.tolist()), load_s=load)


def _smallest(table: UnitTable) -> Option:
    """An option no larger than any, in each kind of bytes."""
    resident, working, sampling = (float(number) for number in table.bytes.min(axis=0))
    return Option(
        grid=Grid(),
        generate_tp=max(option.generate_tp for option in table.options),
        seconds={},
        resident_bytes=resident,
        working_bytes=working,
        sampling_bytes=sampling,
    )
