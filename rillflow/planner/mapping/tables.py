"""Tables: the cost model's answers as arrays, asked once; what a unit costs on so many devices at the least.

Costs.options ───────────────> UnitTable   seconds, bytes [options]
Costs.decoder, generate_s ──> generated    seconds of a copy with so much room
UnitTables of a pool ───────> Choices      least seconds [fleet and size]: no way to lie there is faster
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class UnitPlace:
    """A unit at a place."""

    unit: int
    """Its number."""
    place: Place
    """Where its pool is."""


@dataclass(frozen=True, kw_only=True)
class UnitTable:
    """The options of a unit at one place; generation counts with the most room any of them leaves it."""

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


_NOWHERE = UnitTable(
    options=(),
    seconds=np.zeros((0, 0)),
    loads=np.zeros(0),
    generation=np.zeros(0),
    bytes=np.zeros((0, 3)),
    copies=np.zeros(0),
)


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
        self._paired: dict[tuple[int, UnitPlace, UnitPlace], Floats] = {}
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
        key = (unit, place, *_copy(option), room_bytes)
        if key not in self._generated:
            self._generated[key] = self._generate(self.units[unit], unit, place, option, room_bytes)
        return self._generated[key]

    def room(self, pool: Pool, place: Place, options: Sequence[Option]) -> float:
        """Bytes left for a cache."""
        named = {self.units[unit].name: option for unit, option in zip(pool, options, strict=True)}
        return self.costs.room_bytes(place.fleet, named)

    def transfers(self, edge: int, source: UnitPlace, destination: UnitPlace) -> Floats:
        """Seconds of an edge between two pools, [options of the source, options of the destination]."""
        found = self.problem.graph.edges[edge]

        def seconds(one: Option, other: Option) -> float:
            return self.costs.transfer_s(found, _seat(source, one), _seat(destination, other))

        return self._pairs((edge, source, destination), seconds, copies=False)

    def crossings(self, source: UnitPlace, destination: UnitPlace) -> Floats:
        """Seconds of weights to a sampler apart, [options of the source, options of the sampler]."""

        def seconds(one: Option, other: Option) -> float:
            return self.costs.crossing_s(_seat(source, one), _seat(destination, other), other.generate_tp)

        return self._pairs((-1, source, destination), seconds, copies=True)

    def _pairs(
        self,
        key: tuple[int, UnitPlace, UnitPlace],
        seconds: Callable[[Option, Option], float],
        *,
        copies: bool,
    ) -> Floats:
        """Seconds by the options of two units, asked once for options that are alike in what counts."""
        if key not in self._paired:
            _, source, destination = key
            rows, columns = [
                (self.unit(end.unit, end.place) or _NOWHERE).options for end in (source, destination)
            ]
            ways = {(one.grid, one.generate_tp * copies): one for one in reversed(columns)}
            grids = {one.grid: one for one in reversed(rows)}
            asked = {
                grid: {way: seconds(one, other) for way, other in ways.items()} for grid, one in grids.items()
            }
            self._paired[key] = np.array(
                [
                    [asked[one.grid][other.grid, other.generate_tp * copies] for other in columns]
                    for one in rows
                ]
            )
        return self._paired[key]

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
        every = self.costs.options(named, place.fleet, place.devices)
        alone = self._alone(unit, place, every)
        options = tuple(one for one in every if _copy(one) in alone)
        if not options:
            return None
        loud = self.generating[unit]
        given = [
            column
            for column, index in enumerate(named.stages)
            if column not in loud and index not in self.crossing
        ]
        seconds = np.zeros((len(options), len(named.stages)))
        for row, one in enumerate(options):
            seconds[row, given] = [one.seconds[named.stages[column]] for column in given]
            seconds[row, list(loud)] = alone[_copy(one)].seconds
        generation = np.array([alone[_copy(one)].load_s for one in options])
        alike = {copy: number for number, copy in enumerate(alone)}
        return UnitTable(
            options=options,
            seconds=seconds,
            loads=seconds[:, given].sum(axis=1) + generation,
            generation=generation,
            bytes=np.array([(one.resident_bytes, one.working_bytes, one.sampling_bytes) for one in options]),
            copies=np.array([alike[_copy(one)] if loud else 0 for one in options]),
        )

    def _alone(self, unit: int, place: Place, options: Sequence[Option]) -> dict[tuple[int, int], Generated]:
        """By copy, generation with the most room any option leaves it; none where no row fits even so."""
        if not self.generating[unit]:
            return {_copy(one): Generated(seconds=(), load_s=0.0) for one in options}
        most: dict[tuple[int, int], tuple[float, Option]] = {}
        for one in options:
            room = self.room((unit,), place, [one])
            if room >= 0 and (_copy(one) not in most or room > most[_copy(one)][0]):
                most[_copy(one)] = (room, one)
        found = {copy: self.generated(unit, place, one, room) for copy, (room, one) in most.items()}
        return {copy: one for copy, one in found.items() if one is not None}


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


def _copy(option: Option) -> tuple[int, int]:
    """What a decoder reads of an option."""
    return option.generate_tp, option.grid.ep


def _seat(end: UnitPlace, option: Option) -> Seat:
    """A seat in a pool of its own."""
    place = end.place
    return Seat(pool=str(end.unit), fleet=place.fleet, devices=place.devices, grid=option.grid)


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
