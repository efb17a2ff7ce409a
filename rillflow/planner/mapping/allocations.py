"""Allocations: where the pools of a placement may be, all that could be better than the best plan known.

a pool's places ─ one pool after another ─ too many machines, bound no better ─> allocations with bounds

The bound of an allocation is the step if every pool were as fast in each stage as it can be there, pools that
have no place yet as fast as on all that is left. So nothing that is cut could be better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rillflow.planner.hardware import Fleet
from rillflow.planner.mapping.clock import Clock, Number
from rillflow.planner.mapping.fronts import Front
from rillflow.planner.mapping.tables import Choices
from rillflow.planner.objective import Floats, Objective
from rillflow.planner.packing import machines_needed, machines_of
from rillflow.planner.problem import Problem

ROWS_AT_ONCE = 100_000


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The best plan known: only what is better is looked for."""

    value: float = float("inf")
    """Its value."""
    devices: int = 0
    """Its devices: of equal values fewer are better."""

    def admits(self, values: Floats, devices: Floats) -> np.ndarray:
        """Which of these bounds could belong to something better."""
        better: np.ndarray = (values < self.value) | ((values == self.value) & (devices < self.devices))
        return better


@dataclass(frozen=True, kw_only=True)
class Allocations:
    """Places of all pools, by ascending bound."""

    places: np.ndarray
    """Which of its choices each pool has, [allocations, pools]."""
    dropped: float
    """The least bound of those left out for being too many; infinite where none was."""


class Bounds:
    """The bounds of one placement.

    Example:
        Bounds(problem, clock, choices, objective, beside).narrow(Cut(), width=1000)
    """

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        choices: Sequence[Choices],
        objective: Objective,
        beside: Sequence[float],
    ) -> None:
        """``beside``: seconds of functions and formulas by stage, at the least."""
        self.choices = [one.only(np.arange(len(one.places))) for one in choices]
        self._problem = problem
        self._clock = clock
        self._objective = objective
        self._beside = beside
        self._packer = Packer(problem.hardware.fleets)
        self._own = [
            [index for index, place in enumerate(clock.pools) if place == pool]
            for pool in range(len(choices))
        ]

    def root(self) -> float:
        """The value no plan of the placement is below; infinite where a pool fits nowhere."""
        if any(not choices.places for choices in self.choices):
            return float("inf")
        return float(self.values(np.full((1, len(self.choices)), -1, dtype=np.int32)).values[0])

    def tighten(self, pool: int, number: int, found: Front) -> None:
        """Let a pool's place count with what its ways there take at the least; infinite of none."""
        choices = self.choices[pool]
        own = self._own[pool]
        choices.least[number, own] = found.seconds.min(axis=0, initial=np.inf)[own]
        choices.load[number] = found.loads.min(initial=np.inf)

    def narrow(self, cut: Cut, width: int) -> Allocations:
        """Every allocation whose bound is better than the cut; of more than ``width`` the least."""
        self._drop_choices(cut)
        pools = range(len(self.choices))
        order = sorted(pools, key=lambda pool: (-float(self.choices[pool].load.min(initial=np.inf)), pool))
        rows = Rows(
            places=np.full((1, len(self.choices)), -1, dtype=np.int32),
            values=np.zeros(1),
            devices=np.zeros(1),
        )
        dropped = float("inf")
        for pool in order:
            rows = self._extended(rows, pool, cut)
            if len(rows.values) > width:
                ranked = np.lexsort((rows.devices, rows.values))
                dropped = min(dropped, float(rows.values[ranked[width]]))
                rows = rows.only(ranked[:width])
        ranked = np.lexsort((rows.devices, rows.values))
        return Allocations(places=rows.places[ranked], dropped=dropped)

    def ranked(self, places: np.ndarray, cut: Cut) -> Rows:
        """Those allocations [rows, pools] whose bound is better than the cut, by ascending bound."""
        rows = self.values(places)
        rows = rows.only(cut.admits(rows.values, rows.devices))
        return rows.only(np.lexsort((rows.devices, rows.values)))

    def values(self, places: np.ndarray) -> Rows:
        """Bounds of rows [rows, pools] that have a place, or -1, for every pool."""
        left = self._packer.left(self.choices, places)
        seconds: list[Number] = list(self._beside)
        loads: list[Number] = []
        devices, price = np.zeros(len(places)), np.zeros(len(places))
        for pool, choices in enumerate(self.choices):
            if len(places) and places[0, pool] >= 0:
                taken = places[:, pool]
                least, load = choices.least[taken], choices.load[taken]
                devices += choices.devices[taken]
                price += choices.price[taken]
            else:
                least, load = self._best(pool, left)
                devices += choices.devices.min(initial=0)
                price += choices.price.min(initial=0.0)
            loads.append(load)
            for index in self._own[pool]:
                seconds[index] = least[:, index]
        step = np.broadcast_to(self.step_s(seconds, loads, {}), len(places))
        return Rows(places=places, values=self._objective.values(step, devices, price), devices=devices)

    def step_s(
        self, seconds: Sequence[Number], loads: Sequence[Number], transfers: Mapping[int, Number]
    ) -> Number:
        """Seconds of a step, or the period where generation runs ahead; as ``evaluate`` has them."""
        ends = self._clock.ends(seconds, transfers)
        freshness = self._problem.freshness
        latency: Number = 0.0
        for end in [ends[index] for index in self._clock.observed] if freshness else ends:
            latency = np.maximum(latency, end)
        found = latency / (freshness + 1)
        for load in loads:
            found = np.maximum(found, load)
        return found + self._problem.overhead_s

    def _best(self, pool: int, left: np.ndarray) -> tuple[Floats, Floats]:
        """The least seconds of a pool on what is left of each fleet, [rows, stages], and the least load."""
        choices = self.choices[pool]
        rows = len(left)
        least = np.full((rows, len(self._clock.pools)), np.inf)
        load = np.full(rows, np.inf)
        for fleet in np.unique(choices.fleet):
            here = choices.fleet == fleet
            reached = np.searchsorted(choices.devices[here], left[:, fleet], side="right") - 1
            some = reached >= 0
            least[some] = np.minimum(
                least[some], np.minimum.accumulate(choices.least[here], axis=0)[reached[some]]
            )
            load[some] = np.minimum(load[some], np.minimum.accumulate(choices.load[here])[reached[some]])
        return least, load

    def _drop_choices(self, cut: Cut) -> None:
        """Leave out places that no better plan has, whatever the others do."""
        for pool, choices in enumerate(self.choices):
            places = np.full((len(choices.places), len(self.choices)), -1, dtype=np.int32)
            places[:, pool] = np.arange(len(choices.places))
            found = self.values(places)
            self.choices[pool] = choices.only(cut.admits(found.values, found.devices))

    def _extended(self, rows: Rows, pool: int, cut: Cut) -> Rows:
        """Every row with every place of one pool more that there are machines for."""
        count = len(self.choices[pool].places)
        at_once = max(1, ROWS_AT_ONCE // max(count, 1))
        parts = []
        for begin in range(0, len(rows.places), at_once):
            places = np.repeat(rows.places[begin : begin + at_once], count, axis=0)
            places[:, pool] = np.tile(np.arange(count), len(places) // max(count, 1))
            places = places[self._packer.fit(self.choices, places)]
            found = self.values(places)
            parts.append(found.only(cut.admits(found.values, found.devices)))
        if not parts:
            return rows.only(np.zeros(0, dtype=np.int64))
        return Rows(
            places=np.concatenate([part.places for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            devices=np.concatenate([part.devices for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Allocations, some of their pools without a place: -1."""

    places: np.ndarray
    values: Floats
    devices: Floats

    def only(self, kept: np.ndarray) -> Rows:
        return Rows(places=self.places[kept], values=self.values[kept], devices=self.devices[kept])


class Packer:
    """Whether pools find room on the machines of each fleet, for many allocations at once."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = fleets
        self._known: dict[tuple[int, int], int] = {}

    def fit(self, choices: Sequence[Choices], places: np.ndarray) -> np.ndarray:
        """Which rows [rows, pools] there are machines for."""
        found = np.ones(len(places), dtype=bool)
        for number, fleet in enumerate(self._fleets):
            machine = min(fleet.per_machine, fleet.devices)
            parts = [size for size in fleet.sizes if size % machine]
            whole = np.zeros(len(places), dtype=np.int64)
            code = np.zeros(len(places), dtype=np.int64)
            for pool, choice in enumerate(choices):
                devices = self._taken(choice, places[:, pool], number)
                is_part = devices % machine > 0
                whole += np.where(is_part, 0, devices // machine)
                weights = len(choices) + 1
                digit = np.searchsorted(parts, devices) if parts else np.zeros(len(places), dtype=np.int64)
                code += np.where(is_part, weights ** np.minimum(digit, len(parts)), 0)
            codes, back = np.unique(code, return_inverse=True)
            needed = [self._machines(number, int(one), parts, len(choices) + 1) for one in codes]
            found &= whole + np.array(needed, dtype=np.int64)[back] <= machines_of(fleet)
        return found

    def left(self, choices: Sequence[Choices], places: np.ndarray) -> np.ndarray:
        """Devices that a pool without a place could have at most, [rows, fleets]."""
        found = np.zeros((len(places), len(self._fleets)), dtype=np.int64)
        waiting = [pool for pool in range(len(choices)) if len(places) and places[0, pool] < 0]
        for number, fleet in enumerate(self._fleets):
            used = sum(self._taken(choice, places[:, pool], number) for pool, choice in enumerate(choices))
            kept = 0
            if len(self._fleets) == 1 and waiting:
                least = [int(choices[pool].devices.min(initial=fleet.devices + 1)) for pool in waiting]
                kept = sum(least) - max(least)
            found[:, number] = fleet.devices - used - kept
        return found

    def _taken(self, choice: Choices, places: np.ndarray, fleet: int) -> np.ndarray:
        """Devices of a fleet that a pool has in each row."""
        if not len(choice.places):
            return np.zeros(len(places), dtype=np.int64)
        here = (places >= 0) & (choice.fleet[places] == fleet)
        return np.where(here, choice.devices[places], 0)

    def _machines(self, number: int, code: int, parts: Sequence[int], weights: int) -> int:
        key = (number, code * 64 + weights)
        if key not in self._known:
            sizes, rest = [], code
            for size in parts:
                rest, times = divmod(rest, weights)
                sizes += [size] * times
            self._known[key] = machines_needed(self._fleets[number], sizes)
        return self._known[key]
