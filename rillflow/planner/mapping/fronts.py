"""Fronts: the ways the units of one pool may lie there together, all that could be part of a best plan.

options of the units, one unit after another ─ too slow, dominated ─> combinations ─ room ─> with generation

A combination is cut where another has no more seconds in any segment of the pool and no more bytes of any
kind, or where its pool alone would take longer than the best plan known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rillflow.planner.mapping.pareto import undominated
from rillflow.planner.mapping.partitions import Pool
from rillflow.planner.mapping.tables import Place, Tables, UnitTable
from rillflow.planner.objective import Floats

Admits = Callable[[Floats], np.ndarray]
"""Which loads of the pool, seconds [n], leave a plan that could be better than the best known."""
Handicaps = Sequence[Floats]
"""By unit: seconds by which a stage may come later elsewhere if one option takes the place of another,
[options, options in its place, stages of the unit]; infinite where that cannot be compared."""
MOST_COMBINATIONS = 200_000
"""Beyond so many the slowest are left out, and the search says that it is no longer exact."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Ways in which the units of a pool lie at one place."""

    options: np.ndarray
    """Which option each unit has, [ways, units]."""
    seconds: Floats
    """Of every stage of the graph, 0 of other pools', [ways, stages]."""
    loads: Floats
    """Seconds of a step in which the pool computes, [ways]."""
    is_whole: bool
    """Whether nothing was left out for being too much."""


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """Combinations of the first units of a pool."""

    options: np.ndarray
    segments: Floats
    loads: Floats
    sums: Floats
    largest: Floats
    copies: np.ndarray

    def only(self, kept: np.ndarray) -> _Ways:
        return _Ways(
            options=self.options[kept],
            segments=self.segments[kept],
            loads=self.loads[kept],
            sums=self.sums[kept],
            largest=self.largest[kept],
            copies=self.copies[kept],
        )


def front(
    tables: Tables,
    pool: Pool,
    place: Place,
    *,
    segments: Sequence[Sequence[int]],
    admits: Admits,
    handicaps: Handicaps | None = None,
    most: int = MOST_COMBINATIONS,
) -> Front:
    """The ways a pool's units may lie at a place, none replaceable by another that is as good everywhere.

    Args:
        tables: the costs.
        pool: its units.
        place: its devices.
        segments: the pool's stages, of which only sums count.
        admits: which loads leave a plan that could win.
        handicaps: what an option in place of another may cost elsewhere; none: nothing.
        most: combinations at once; of more the fastest, and the front is not whole.
    """
    found = [_table(tables, unit, place) for unit in pool]
    shares = [_by_segment(tables.stages(unit), segments) for unit in pool]
    rest = np.cumsum([0.0, *(float(table.loads.min()) for table in reversed(found))])[::-1]
    handicap = _Handicap(handicaps, shares) if handicaps is not None else None
    ways, is_whole = _none_yet(len(segments)), True
    for place_of_unit, table in enumerate(found):
        ways = _with(ways, table, shares[place_of_unit])
        ways = ways.only(admits(ways.loads + rest[place_of_unit + 1]))
        if len(ways.loads) > most:
            ways, is_whole = ways.only(np.argsort(ways.loads, kind="stable")[:most]), False
        numbers = np.column_stack([ways.segments, ways.loads, ways.sums, ways.largest])
        ways = ways.only(
            undominated(
                numbers, ways.copies, handicap.of(ways.options, numbers.shape[1]) if handicap else None
            )
        )
    return _generating(tables, pool, place, found, ways, segments, admits, handicap, is_whole)


def _table(tables: Tables, unit: int, place: Place) -> UnitTable:
    found = tables.unit(unit, place)
    assert found is not None, "a place is no choice of a pool one of whose units does not fit there"
    return found


def _by_segment(stages: Sequence[int], segments: Sequence[Sequence[int]]) -> Floats:
    """1 where a stage of the unit is part of a segment, [stages of the unit, segments]."""
    return np.array([[float(index in segment) for segment in segments] for index in stages])


def _none_yet(count: int) -> _Ways:
    return _Ways(
        options=np.zeros((1, 0), dtype=np.int64),
        segments=np.zeros((1, count)),
        loads=np.zeros(1),
        sums=np.zeros((1, 2)),
        largest=np.zeros(1),
        copies=np.zeros(1, dtype=np.int64),
    )


def _with(ways: _Ways, table: UnitTable, shares: Floats) -> _Ways:
    """Every way with every option of one unit more."""
    count = len(table.options)
    old = np.repeat(np.arange(len(ways.loads)), count)
    new = np.tile(np.arange(count), len(ways.loads))
    resident, working, sampling = table.bytes[new].T
    return _Ways(
        options=np.concatenate([ways.options[old], new[:, None]], axis=1),
        segments=ways.segments[old] + (table.seconds @ shares)[new],
        loads=ways.loads[old] + table.loads[new],
        sums=ways.sums[old] + np.stack([resident, sampling], axis=1),
        largest=np.maximum(ways.largest[old], working),
        copies=ways.copies[old] * (int(table.copies.max()) + 1) + table.copies[new],
    )


def _generating(
    tables: Tables,
    pool: Pool,
    place: Place,
    found: Sequence[UnitTable],
    ways: _Ways,
    segments: Sequence[Sequence[int]],
    admits: Admits,
    handicap: _Handicap | None,
    is_whole: bool,
) -> Front:
    """Those that fit, with the seconds of generation in the room each leaves."""
    stages = len(tables.problem.graph.stages)
    kept, seconds, loads = [], [], []
    for row, numbers in enumerate(ways.options):
        options = [table.options[number] for table, number in zip(found, numbers, strict=True)]
        room = tables.room(pool, place, options)
        own, load = np.zeros(stages), 0.0
        for unit, table, number in zip(pool, found, numbers, strict=True):
            own[list(tables.stages(unit))] = table.seconds[number]
            load += float(table.loads[number])
            if room < 0 or not tables.generating[unit]:
                continue
            generated = tables.generated(unit, place, table.options[number], room)
            if generated is None:
                room = -1.0
                continue
            own[[tables.stages(unit)[column] for column in tables.generating[unit]]] = generated.seconds
            load += generated.load_s - float(table.generation[number])
        if room >= 0:
            kept.append(row)
            seconds.append(own)
            loads.append(load)
    ways = ways.only(np.array(kept, dtype=np.int64))
    all_seconds, all_loads = np.array(seconds).reshape(len(kept), stages), np.array(loads)
    late = np.stack([all_seconds[:, list(segment)].sum(axis=1) for segment in segments], axis=1)
    best = admits(all_loads)
    ways, all_seconds, all_loads, late = ways.only(best), all_seconds[best], all_loads[best], late[best]
    numbers = np.column_stack([late, all_loads])
    last = undominated(numbers, None, handicap.of(ways.options, numbers.shape[1]) if handicap else None)
    return Front(
        options=ways.options[last], seconds=all_seconds[last], loads=all_loads[last], is_whole=is_whole
    )


class _Handicap:
    """What it may cost elsewhere to have one way in place of another."""

    def __init__(self, handicaps: Handicaps, shares: Sequence[Floats]) -> None:
        self._segments = [
            np.where(
                np.isinf(one).any(axis=2, keepdims=True), np.inf, np.where(np.isinf(one), 0.0, one) @ share
            )
            for one, share in zip(handicaps, shares, strict=True)
        ]

    def of(self, options: np.ndarray, columns: int) -> Callable[[int, np.ndarray], Floats]:
        """For ``undominated`` of so many columns: nothing is added to those after the segments."""

        def handicap(first: int, others: np.ndarray) -> Floats:
            found = np.zeros((len(others), columns))
            for place in range(options.shape[1]):
                part = self._segments[place][options[first, place], options[others, place]]
                found[:, : part.shape[1]] += part
            return found

        return handicap
