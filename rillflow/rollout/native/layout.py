"""Layout: the cache memory of every running row. Arithmetic on lengths only; no torch.

    band      a rectangle of rows x positions, for rows of similar length; the longest first
    slot      a row's place in a pass: bands laid end to end, so every band is a run of slots

    band 0    1 row of 8,192       slot  0
    band 1    9 rows of 1,024      slots 1 .. 9
    band 2   54 rows of 256        slots 10 .. 63       new rows start here if they fit

A row that outgrows its band moves to the next longer band if it fills half of it. Otherwise its own band
grows while that wastes little memory, so rows of equal lengths share one rectangle; or it gets a new band.

While a band is reallocated, one of its layers is in memory twice. ``Cache.budget_bytes`` accounts for that.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

PLACES = 16
"""Positions are allocated in multiples of this, so that every row begins at a cache line."""
BANDS = 4
"""Maximum number of bands: each costs a few operations per layer, whatever it holds."""
WORTH = 4096
"""Positions that rows of at most half a band's length must waste there before they get another band."""
_GROWTH = 64
"""Minimum growth of a band in positions; from four times as many on, it grows by a quarter."""


class CachePlace(NamedTuple):
    """Place of a row's keys and values."""

    band: int
    """The band's name."""
    row: int
    """Index of the row in the band."""


class Member(Protocol):
    """A row as the layout sees it."""

    limit: int
    """Maximum positions of the row."""
    arrival: int
    """Order of arrival; earlier rows have a lower number."""

    @property
    def place(self) -> CachePlace | None:
        """Place of the row; None before it has one."""

    def reach(self, clock: int) -> int:
        """Return the positions that it needs in this step."""


_M = TypeVar("_M", bound=Member)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy of a row's first positions to another place; all copies of a step run at once, before its pass."""

    source: CachePlace
    """Place to read."""
    target: CachePlace
    """Place to write."""
    length: int
    """Number of positions."""


@dataclass(kw_only=True, eq=False)
class Band(Generic[_M]):
    """A rectangle of memory."""

    name: int
    """Unique name."""
    length: int
    """Positions of every row."""
    rows: int
    """Allocated rows."""
    members: list[_M] = field(default_factory=list)
    """Running rows by index, without gaps."""


class BandLayout(Generic[_M]):
    """Places of the running rows, present or planned.

    Args:
        fixed_rows: rows of every pass, with idle ones in the shortest band; None for the running rows only.
        grain: lengths are multiples of this.
    """

    def __init__(self, fixed_rows: int | None = None, grain: int = PLACES) -> None:
        self._fixed_rows = fixed_rows or 0
        self._grain = grain
        self._names = count()
        self.bands: list[Band[_M]] = []
        """The present bands, the longest first."""

    def least_positions(self, limit: int) -> int:
        """Return the positions that one row of length ``limit`` needs alone, idle rows included."""
        return self._whole(limit) + self._fixed_rows * self._grain

    def arranged(
        self, members: Collection[_M], clock: int, *, is_tight: bool = False, ahead: int = 0
    ) -> list[Band[_M]]:
        """Return the bands for these rows in this step; the present bands do not change.

        Args:
            members: the rows, including rows without a place.
            clock: the step.
            is_tight: allocate only the present need, even if rows must move.
            ahead: extra positions of every row, up to its limit.
        """
        needs = {member: min(member.reach(clock) + ahead, member.limit) for member in members}
        growth = (0 if ahead else _GROWTH) if is_tight else None
        plan = _Plan(self.bands, needs, self._fixed_rows, self._grain, self._names, growth)
        return plan.bands()

    @property
    def kept_rows(self) -> dict[int, int]:
        """Rows of every band whose contents survive a pass: idle rows that are fed do not."""
        rows = {band.name: band.rows for band in self.bands}
        if self._fixed_rows and self.bands:
            rows[self.bands[-1].name] = len(self.bands[-1].members)
        return rows

    def _whole(self, length: int) -> int:
        return -(-length // self._grain) * self._grain


def positions_of(bands: Sequence[Band[_M]]) -> int:
    """Return the allocated positions of all rows together."""
    return sum(band.rows * band.length for band in bands)


class _Plan(Generic[_M]):
    """The next bands.

    Args:
        bands: the present bands.
        needs: positions of every row.
        fixed_rows: rows of every pass, idle ones included; 0 for the running rows only.
        grain: lengths are multiples of this.
        names: source of names for new bands.
        growth: positions beyond the need when memory is to be minimal; None for the usual growth.
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
        """Return the planned bands with their rows."""
        homeless = list[_M]()
        if self._fixed_rows and (
            not self._bands or (self._is_tight and self._bands[-1].length > self._grain)
        ):
            # Idle rows get the least memory; running rows of that band move.
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
        """Return whether rows would waste much of a band and a shorter band is possible."""
        needs = [self._needs[member] for member in (*members, *band.members)]
        free = sum(band.length - need for need in needs if 2 * need <= band.length)
        is_last = band is self._bands[-1]
        return (
            2 * self._needs[members[0]] <= band.length
            and free >= (1 if self._is_tight else WORTH)
            and not (is_last and len(self._bands) == BANDS)
        )

    def _lengthen(self, members: list[_M], index: int) -> None:
        """Lengthen the band at ``index`` for these rows, or insert a new band before it."""
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
        """Return the length for rows that need up to ``longest``: more, unless few rows can reach it."""
        limits = sorted((member.limit for member in members), reverse=True)
        more = max(_GROWTH, longest // 4) if self._growth is None else self._growth
        wanted = max(longest, min(longest + more, limits[len(limits) // 4]))
        return -(-wanted // self._grain) * self._grain

    def _idle(self, band: Band[_M]) -> int:
        """Return the number of idle rows in this band."""
        return max(0, self._fixed_rows - len(self._needs)) if band is self._bands[-1] else 0

    def _seated(self) -> list[Band[_M]]:
        """Give every row a place in its band: its present one, else a gap; the last rows fill other gaps."""
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
    """Move the last rows into the gaps, the lowest gap first."""
    row = 0
    while row < len(seats):
        if seats[-1] is None:
            seats.pop()
        elif seats[row] is None:
            seats[row] = seats.pop()
        else:
            row += 1
    return [seat for seat in seats if seat is not None]
