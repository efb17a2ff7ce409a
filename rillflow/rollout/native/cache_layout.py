"""Cache layout: the cache row of every running row, and the prefixes in it. Arithmetic only; no torch.

    length bucket   a rectangle of rows x positions, for rows of similar length; the longest first
    slot            a row's index in a pass: buckets laid end to end, so every bucket is a run of slots

    bucket 0    1 row of 8,192       slot  0
    bucket 1    9 rows of 1,024      slots 1 .. 9
    bucket 2   54 rows of 256        slots 10 .. 63       new rows start here if they fit

A row that outgrows its bucket moves to the next longer one if it fills half of it. Otherwise its own bucket
grows while that wastes little memory, so rows of equal lengths share one rectangle; or it gets a new bucket.
While a bucket is reallocated, one of its layers is in memory twice. ``Cache.budget_bytes`` accounts for that.

``PrefixIndex`` finds the cache row that holds a prefix:

    tokens   [ block of 16 ][ block of 16 ][ rest ]
    names    hash of 1       hash of 1, 2   the whole        ─> cache row

A cache row stays in the index until another row overwrites it, whether or not its own row still runs. So
samples of a prompt, prompts with a common system prompt, and later turns of a conversation compute only the
tokens that differ. The hashed names find a candidate; then its tokens are compared one by one.

Invariant own-positions: a pass writes into a cache row only behind the tokens that the index offers of it.

    a running row       its prefix when it is read, then the position that it feeds
    a padding row       the next position of a running row (see ``cuda_graphs``)
    an idle row         position 0 of a cache row that ``kept_rows`` leaves out, in deterministic mode

Every offered cache row holds keys and values of the present weights: the index forgets all rows when the
weights change, and rows that keep their cache then (``keep_cache``) are offered no more.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

ALIGNMENT = 16
"""Positions are allocated in multiples of this, so that every row begins at a cache line."""
MOST_BUCKETS = 4
"""Maximum number of buckets: each costs a few operations per layer, whatever it holds."""
WORTH = 4096
"""Positions that rows of at most half a bucket's length must waste there before they get another bucket."""
_GROWTH = 64
"""Minimum growth of a bucket in positions; from four times as many on, it grows by a quarter."""


class CacheRow(NamedTuple):
    """The row of a length bucket that holds a running row's keys and values."""

    bucket: int
    """The bucket's name."""
    row: int
    """Index of the row in the bucket."""


class Member(Protocol):
    """A row's place in the layout."""

    limit: int
    """Maximum positions of the row."""
    arrival: int
    """Order of arrival; earlier rows have a lower number."""

    @property
    def cache_row(self) -> CacheRow | None:
        """Cache row; None until a cache row is assigned."""

    def reach(self, clock: int) -> int:
        """Return the positions that it needs in this step."""


_M = TypeVar("_M", bound=Member)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy of a row's first positions to another cache row; a step's copies run at once, before its pass."""

    source: CacheRow
    """Cache row to read."""
    target: CacheRow
    """Cache row to write."""
    length: int
    """Number of positions."""


@dataclass(kw_only=True, eq=False)
class LengthBucket(Generic[_M]):
    """A rectangle of memory."""

    name: int
    """Unique name."""
    length: int
    """Positions of every row."""
    rows: int
    """Allocated rows."""
    members: list[_M] = field(default_factory=list)
    """Running rows by index, without gaps."""


class CacheLayout(Generic[_M]):
    """Cache rows of the running rows, present or planned.

    Args:
        fixed_rows: rows of every pass, with idle ones in the shortest bucket; None for the running rows only.
        grain: lengths are multiples of this.
    """

    def __init__(self, fixed_rows: int | None = None, grain: int = ALIGNMENT) -> None:
        self._fixed_rows = fixed_rows or 0
        self._grain = grain
        self._names = count()
        self.buckets: list[LengthBucket[_M]] = []
        """The present buckets, the longest first."""

    def least_positions(self, limit: int) -> int:
        """Return the positions that one row of length ``limit`` needs alone, idle rows included."""
        return self._whole(limit) + self._fixed_rows * self._grain

    def arranged(
        self, members: Collection[_M], clock: int, *, is_tight: bool = False, ahead: int = 0
    ) -> list[LengthBucket[_M]]:
        """Return the buckets for these rows in this step; the present buckets do not change.

        Args:
            members: the rows, including rows without a cache row.
            clock: the step.
            is_tight: allocate only the present need, even if rows must move.
            ahead: extra positions of every row, up to its limit.
        """
        needs = {member: min(member.reach(clock) + ahead, member.limit) for member in members}
        growth = (0 if ahead else _GROWTH) if is_tight else None
        plan = _Plan(self.buckets, needs, self._fixed_rows, self._grain, self._names, growth)
        return plan.buckets()

    @property
    def kept_rows(self) -> dict[int, int]:
        """Rows of every bucket whose contents survive a pass: idle rows that are fed do not."""
        rows = {bucket.name: bucket.rows for bucket in self.buckets}
        if self._fixed_rows and self.buckets:
            rows[self.buckets[-1].name] = len(self.buckets[-1].members)
        return rows

    def _whole(self, length: int) -> int:
        return -(-length // self._grain) * self._grain


def positions_of(buckets: Sequence[LengthBucket[_M]]) -> int:
    """Return the allocated positions of all rows together."""
    return sum(bucket.rows * bucket.length for bucket in buckets)


class _Plan(Generic[_M]):
    """The next buckets.

    Args:
        buckets: the present buckets.
        needs: positions of every row.
        fixed_rows: rows of every pass, idle ones included; 0 for the running rows only.
        grain: lengths are multiples of this.
        names: source of names for new buckets.
        growth: positions beyond the need when memory is to be minimal; None for the usual growth.
    """

    def __init__(
        self,
        buckets: Sequence[LengthBucket[_M]],
        needs: dict[_M, int],
        fixed_rows: int,
        grain: int,
        names: count[int],
        growth: int | None,
    ) -> None:
        self._needs, self._fixed_rows, self._grain = needs, fixed_rows, grain
        self._names, self._growth, self._is_tight = names, growth, growth is not None
        self._old = {bucket.name: bucket for bucket in buckets}
        self._buckets: list[LengthBucket[_M]] = [
            LengthBucket(name=bucket.name, length=bucket.length, rows=bucket.rows) for bucket in buckets
        ]

    def buckets(self) -> list[LengthBucket[_M]]:
        """Return the planned buckets with their rows."""
        homeless = list[_M]()
        if self._fixed_rows and (
            not self._buckets or (self._is_tight and self._buckets[-1].length > self._grain)
        ):
            # Idle rows get the least memory; running rows of that bucket move.
            del self._buckets[-1:]
            self._buckets.append(LengthBucket(name=next(self._names), length=self._grain, rows=0))
        own = {bucket.name: bucket for bucket in self._buckets}
        for member, need in self._needs.items():
            bucket = own.get(member.cache_row.bucket) if member.cache_row is not None else None
            (homeless if bucket is None or need > bucket.length else bucket.members).append(member)
        homeless.sort(key=lambda member: (self._needs[member], member.arrival))
        while homeless:
            least = self._needs[homeless[0]]
            index = sum(bucket.length >= least for bucket in self._buckets)
            most = min(2 * least, self._buckets[index - 1].length) if index else 2 * least
            alike = [member for member in homeless if self._needs[member] <= most]
            del homeless[: len(alike)]
            if index and not self._leaves_free(self._buckets[index - 1], alike):
                self._buckets[index - 1].members += alike
            else:
                self._lengthen(alike, index)
        return self._seated()

    def _leaves_free(self, bucket: LengthBucket[_M], members: list[_M]) -> bool:
        """Return whether rows would waste much of a bucket and a shorter bucket is possible."""
        needs = [self._needs[member] for member in (*members, *bucket.members)]
        free = sum(bucket.length - need for need in needs if 2 * need <= bucket.length)
        is_last = bucket is self._buckets[-1]
        return (
            2 * self._needs[members[0]] <= bucket.length
            and free >= (1 if self._is_tight else WORTH)
            and not (is_last and len(self._buckets) == MOST_BUCKETS)
        )

    def _lengthen(self, members: list[_M], index: int) -> None:
        """Lengthen the bucket at ``index`` for these rows, or insert a new bucket before it."""
        longest = self._needs[members[-1]]
        ceiling = self._buckets[index - 1].length if index else sys.maxsize
        below = self._buckets[index] if index < len(self._buckets) else None
        if below is not None:
            others = [self._needs[member] for member in below.members] + [1] * self._idle(below)
            length = min(self._length(longest, [*below.members, *members]), ceiling)
            short = [length - need for need in others if 2 * need <= longest]
            pays = 4 * len(short) >= len(others) + len(members) and sum(short) >= WORTH
            if len(self._buckets) == MOST_BUCKETS or not (pays or (self._is_tight and others)):
                below.length, below.rows = length, 0
                below.members += members
                return
        length = min(self._length(longest, members), ceiling)
        self._buckets.insert(
            index, LengthBucket(name=next(self._names), length=length, rows=0, members=[*members])
        )

    def _length(self, longest: int, members: Sequence[_M]) -> int:
        """Return the length for rows that need up to ``longest``: more, unless few rows can reach it."""
        limits = sorted((member.limit for member in members), reverse=True)
        more = max(_GROWTH, longest // 4) if self._growth is None else self._growth
        wanted = max(longest, min(longest + more, limits[len(limits) // 4]))
        return -(-wanted // self._grain) * self._grain

    def _idle(self, bucket: LengthBucket[_M]) -> int:
        """Return the number of idle rows in this bucket."""
        return max(0, self._fixed_rows - len(self._needs)) if bucket is self._buckets[-1] else 0

    def _seated(self) -> list[LengthBucket[_M]]:
        """Give every row a cache row: its present one, else a gap; the last rows fill other gaps."""
        found = []
        for bucket in self._buckets:
            rows = len(bucket.members) + self._idle(bucket)
            if not rows:
                continue
            seats: list[_M | None] = [None] * (
                len(self._old[bucket.name].members) if bucket.name in self._old else 0
            )
            coming = []
            for member in sorted(bucket.members, key=lambda member: member.arrival):
                if member.cache_row is not None and member.cache_row.bucket == bucket.name:
                    seats[member.cache_row.row] = member
                else:
                    coming.append(member)
            for row, seat in enumerate(seats):
                if seat is None and coming:
                    seats[row] = coming.pop(0)
            seats += coming
            bucket.members = _closed(seats)
            if self._is_tight or bucket.rows == 0:
                bucket.rows = rows
            elif rows > bucket.rows:
                bucket.rows = max(rows, bucket.rows * 5 // 4)
            found.append(bucket)
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


BLOCK = 16
"""Tokens of a block."""


class PrefixIndex:
    """The tokens in every cache row, and the rows by the hashes of their prefixes."""

    def __init__(self) -> None:
        self._tokens: dict[CacheRow, tuple[int, ...]] = {}
        self._names: dict[CacheRow, set[object]] = {}
        self._rows: dict[object, CacheRow] = {}

    def put(self, row: CacheRow, tokens: tuple[int, ...]) -> None:
        """Record the tokens of a cache row; they may extend its present tokens."""
        held = self.at(row)
        if not tokens or not held or tokens[: len(held)] != held:
            self.drop(row)
        if not tokens:
            return
        self._tokens[row] = tokens
        self._names.setdefault(row, set()).update(_names(tokens))
        self._rows |= dict.fromkeys(_names(tokens), row)

    def drop(self, row: CacheRow) -> None:
        """Forget the tokens of a cache row."""
        self._tokens.pop(row, None)
        for name in self._names.pop(row, ()):
            if self._rows.get(name) == row:
                del self._rows[name]

    def at(self, row: CacheRow) -> tuple[int, ...]:
        """Return the tokens of a cache row; empty if they are unknown."""
        return self._tokens.get(row, ())

    def find(self, tokens: tuple[int, ...]) -> tuple[CacheRow, int] | None:
        """Return a cache row with a prefix of these tokens and the prefix's length; None if there is none."""
        found = self._rows.get(tokens)
        for name in _names(tokens) if found is None else ():
            if name not in self._rows:
                break
            found = self._rows[name]
        return None if found is None else (found, _common(self._tokens[found], tokens))

    def keep(self, rows: Mapping[int, int]) -> None:
        """Drop all cache rows except the first rows of every bucket; ``rows`` has their number by bucket."""
        for row in [each for each in self._tokens if each.row >= rows.get(each.bucket, 0)]:
            self.drop(row)


def _names(tokens: tuple[int, ...]) -> Iterator[object]:
    """Yield the name of each block, which covers all blocks before it, and then the whole tuple."""
    name = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        name = hash((name, tokens[end - BLOCK : end]))
        yield name
    yield tokens


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
