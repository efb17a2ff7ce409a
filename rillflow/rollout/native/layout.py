"""Layout: which memory every running row has. Arithmetic on lengths alone; no torch.

    band      a rectangle of rows x positions, for rows of like length; the longest first
    slot      a row's place in a pass: bands laid end to end, so every band is a run of slots

    band 0    1 row of 8,192       slot  0
    band 1    9 rows of 1,024      slots 1 .. 9
    band 2   54 rows of 256        slots 10 .. 63       new rows come here, as far as it is long enough

A row that outgrows its band moves to the next longer one, if it fills half of it. Else it makes its own
band longer while that wastes little, so rows of equal lengths have one rectangle; or gets a band between.

While a band's memory is made anew, one layer of it is there twice. What ``usable_positions`` leaves of
a budget holds that.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

PLACES = 16
"""Positions come in multiples of this, so that every row begins where a cache line does."""
BANDS = 4
"""Bands at most: each costs a few operations a layer, whatever is in it."""
WORTH = 4096
"""Positions that rows half as long would leave free, from which on they do not share a band."""
_GROWTH = 64
"""Positions that a band grows by at least; from four times as many on, a quarter."""


class CachePlace(NamedTuple):
    """Where a row's keys and values are."""

    band: int
    """The band's name."""
    row: int
    """Which of its rows."""


class Member(Protocol):
    """A row, as far as its memory is concerned."""

    limit: int
    """Positions it reaches at most."""
    arrival: int
    """Who came first has the lower."""

    @property
    def place(self) -> CachePlace | None:
        """None while it has none."""

    def reach(self, clock: int) -> int:
        """Positions it needs in this step."""


_M = TypeVar("_M", bound=Member)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Take the beginning of a row over into another place; all of a step's at once, before its pass."""

    source: CachePlace
    """What to read."""
    target: CachePlace
    """What to write."""
    length: int
    """How many positions."""


@dataclass(kw_only=True, eq=False)
class Band(Generic[_M]):
    """A rectangle of memory."""

    name: int
    """It has no other's."""
    length: int
    """Positions of every row."""
    rows: int
    """Rows there is memory for."""
    members: list[_M] = field(default_factory=list)
    """The running ones by row, without a hole."""


class BandLayout(Generic[_M]):
    """Where the running rows are, and where they would be.

    Args:
        fixed_rows: rows that every pass feeds, idle ones in the shortest band; None feeds those that run.
        grain: lengths are multiples of this.
    """

    def __init__(self, fixed_rows: int | None = None, grain: int = PLACES) -> None:
        self._fixed_rows = fixed_rows or 0
        self._grain = grain
        self._names = count()
        self.bands: list[Band[_M]] = []
        """As they are, the longest first."""

    def least_positions(self, limit: int) -> int:
        """What one row that reaches ``limit`` takes alone, idle ones beside it included."""
        return self._whole(limit) + self._fixed_rows * self._grain

    def arranged(
        self, members: Collection[_M], clock: int, *, is_tight: bool = False, ahead: int = 0
    ) -> list[Band[_M]]:
        """Bands for these rows in this step; nothing is changed by asking.

        Args:
            members: the rows, those included that have no place yet.
            clock: the step.
            is_tight: no more memory than they need now, whatever it costs to move them.
            ahead: positions that every row is to have besides, as far as its limit lets it.
        """
        needs = {member: min(member.reach(clock) + ahead, member.limit) for member in members}
        growth = (0 if ahead else _GROWTH) if is_tight else None
        plan = _Plan(self.bands, needs, self._fixed_rows, self._grain, self._names, growth)
        return plan.bands()

    @property
    def kept_rows(self) -> dict[int, int]:
        """Of every band, the rows that hold what they held after a pass: idle ones that are fed do not."""
        rows = {band.name: band.rows for band in self.bands}
        if self._fixed_rows and self.bands:
            rows[self.bands[-1].name] = len(self.bands[-1].members)
        return rows

    def _whole(self, length: int) -> int:
        return -(-length // self._grain) * self._grain


def positions_of(bands: Sequence[Band[_M]]) -> int:
    """Positions there is memory for, in all rows together."""
    return sum(band.rows * band.length for band in bands)


class _Plan(Generic[_M]):
    """Bands as they are about to be.

    Args:
        bands: as they are.
        needs: positions of every row.
        fixed_rows: rows that are fed, idle ones included; 0 for those that run.
        grain: lengths are multiples of this.
        names: of new bands.
        growth: positions that a band gets beyond its need, where there is to be as little memory as can be.
    """

    def __init__(
        self,
        bands: Sequence[Band[_M]],
        needs: dict[_M, int],
        fixed_rows: int,
        grain: int,
        names: count[int],
        growth: int | None,
    ) -> None:
        self._needs, self._fixed_rows, self._grain = needs, fixed_rows, grain
        self._names, self._growth, self._is_tight = names, growth, growth is not None
        self._old = {band.name: band for band in bands}
        self._bands: list[Band[_M]] = [
            Band(name=band.name, length=band.length, rows=band.rows) for band in bands
        ]

    def bands(self) -> list[Band[_M]]:
        """The plan, carried out."""
        homeless = list[_M]()
        if self._fixed_rows and (
            not self._bands or (self._is_tight and self._bands[-1].length > self._grain)
        ):
            # Idle rows have the least memory; what ran beside them moves.
            del self._bands[-1:]
            self._bands.append(Band(name=next(self._names), length=self._grain, rows=0))
        own = {band.name: band for band in self._bands}
        for member, need in self._needs.items():
            band = own.get(member.place.band) if member.place is not None else None
            (homeless if band is None or need > band.length else band.members).append(member)
        homeless.sort(key=lambda member: (self._needs[member], member.arrival))
        while homeless:
            least = self._needs[homeless[0]]
            index = sum(band.length >= least for band in self._bands)
            most = min(2 * least, self._bands[index - 1].length) if index else 2 * least
            alike = [member for member in homeless if self._needs[member] <= most]
            del homeless[: len(alike)]
            if index and not self._leaves_free(self._bands[index - 1], alike):
                self._bands[index - 1].members += alike
            else:
                self._lengthen(alike, index)
        return self._seated()

    def _leaves_free(self, band: Band[_M], members: list[_M]) -> bool:
        """Whether rows would have much more than they need in a band, and can have less."""
        needs = [self._needs[member] for member in (*members, *band.members)]
        free = sum(band.length - need for need in needs if 2 * need <= band.length)
        is_last = band is self._bands[-1]
        return (
            2 * self._needs[members[0]] <= band.length
            and free >= (1 if self._is_tight else WORTH)
            and not (is_last and len(self._bands) == BANDS)
        )

    def _lengthen(self, members: list[_M], index: int) -> None:
        """Make room for rows between bands that are too short, from ``index`` on, and those that are not."""
        longest = self._needs[members[-1]]
        ceiling = self._bands[index - 1].length if index else sys.maxsize
        below = self._bands[index] if index < len(self._bands) else None
        if below is not None:
            others = [self._needs[member] for member in below.members] + [1] * self._idle(below)
            length = min(self._length(longest, [*below.members, *members]), ceiling)
            short = [length - need for need in others if 2 * need <= longest]
            pays = 4 * len(short) >= len(others) + len(members) and sum(short) >= WORTH
            if len(self._bands) == BANDS or not (pays or (self._is_tight and others)):
                below.length, below.rows = length, 0
                below.members += members
                return
        length = min(self._length(longest, members), ceiling)
        self._bands.insert(index, Band(name=next(self._names), length=length, rows=0, members=[*members]))

    def _length(self, longest: int, members: Sequence[_M]) -> int:
        """What rows are to have of which the longest needs ``longest``: more, unless few can reach it."""
        limits = sorted((member.limit for member in members), reverse=True)
        more = max(_GROWTH, longest // 4) if self._growth is None else self._growth
        wanted = max(longest, min(longest + more, limits[len(limits) // 4]))
        return -(-wanted // self._grain) * self._grain

    def _idle(self, band: Band[_M]) -> int:
        """Rows of this band that are fed and do not run."""
        return max(0, self._fixed_rows - len(self._needs)) if band is self._bands[-1] else 0

    def _seated(self) -> list[Band[_M]]:
        """Give every row a place in its band: its own, else a hole; the last ones fill the holes left."""
        found = []
        for band in self._bands:
            rows = len(band.members) + self._idle(band)
            if not rows:
                continue
            seats: list[_M | None] = [None] * (
                len(self._old[band.name].members) if band.name in self._old else 0
            )
            coming = []
            for member in sorted(band.members, key=lambda member: member.arrival):
                if member.place is not None and member.place.band == band.name:
                    seats[member.place.row] = member
                else:
                    coming.append(member)
            for row, seat in enumerate(seats):
                if seat is None and coming:
                    seats[row] = coming.pop(0)
            seats += coming
            band.members = _closed(seats)
            if self._is_tight or band.rows == 0:
                band.rows = rows
            elif rows > band.rows:
                band.rows = max(rows, band.rows * 5 // 4)
            found.append(band)
        return found


def _closed(seats: list[_M | None]) -> list[_M]:
    """The last ones take the holes, the lowest first."""
    row = 0
    while row < len(seats):
        if seats[-1] is None:
            seats.pop()
        elif seats[row] is None:
            seats[row] = seats.pop()
        else:
            row += 1
    return [seat for seat in seats if seat is not None]
