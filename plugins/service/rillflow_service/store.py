"""Store: the columns of a machine's streams, in memory segments that hold one frame each.

    reserve(bytes) ─> segment ─ the writer copies a frame in ─> claim() ─> readers map it
                         ^                                                     │
                         └── delete(groups): the segment's last group is gone <┘

A segment is reused only if no reader can have it mapped. Otherwise it is removed, and readers keep their
mapping of it. **bounded-store** All segments together have at most ``capacity_bytes``; a reservation that
does not fit waits, which is back-pressure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rillflow.data_plane.instructions import Ids
from rillflow.data_plane.schema import ColumnType
from rillflow.errors import StreamError
from rillflow.workers.wire import Arrays
from rillflow_service.requests import ROWS
from rillflow_service.segments import Files, Memory, checked, gathered, mapped

SMALLEST_BYTES = 64 * 2**10


@dataclass(kw_only=True, eq=False)
class _Segment:
    """State of a segment."""

    size: int
    """Size in bytes."""
    holder: str
    """Holder that reserved the segment."""
    groups: int = 0
    """Number of its groups that are not deleted."""
    is_unread: bool = True
    """Whether no reader can have it mapped once it has no groups."""
    columns: Mapping[str, ColumnType] = field(default_factory=dict)
    """Columns in the segment."""


class Store:
    """Segments, and the location of every cell in them.

    Args:
        segments: the memory of the segments.
        capacity_bytes: largest total size.
    """

    address = ""
    """Address from which readers on other machines fetch; RemoteStore has one."""

    def __init__(self, segments: Files | Memory, *, capacity_bytes: int) -> None:
        self.segments = segments
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Size of all segments, including those that wait for reuse."""
        self._segments: dict[int, _Segment] = {}
        self._free: dict[int, list[int]] = {}
        """Segments for reuse, by size."""
        self._next = 0

    def reserve(self, nbytes: int, holder: str) -> int | None:
        """Return the number of a segment for a frame, or None while there is no room.

        Raises:
            StreamError: the frame exceeds the store, or the machine has less shared memory than the store.
        """
        size = _rounded(nbytes)
        if size > self.capacity_bytes:
            why = f"the store has {self.capacity_bytes}"
            fix = "write less at once"
            raise StreamError(f"{holder} reserves {nbytes} bytes", why=why, fix=fix)
        if free := self._free.get(size):
            number = free.pop()
        else:
            for other, numbers in self._free.items():
                while numbers and self.used_bytes + size > self.capacity_bytes:
                    self._remove(numbers.pop(), other)
            if self.used_bytes + size > self.capacity_bytes:
                return None
            number, self._next = self._next, self._next + 1
            self.segments.create(number, size)
            self.used_bytes += size
        self._segments[number] = _Segment(size=size, holder=holder)
        return number

    async def claim(
        self, number: int | None, holder: str, columns: Mapping[str, ColumnType], rows: Ids | None
    ) -> Ids:
        """Verify and keep the groups that a holder has written into its segment; return their rows [N].

        Args:
            number: the segment; None if there are no columns.
            holder: the holder that reserved it.
            columns: required columns.
            rows: [N] required rows of the groups, if known.

        Raises:
            StreamError: the holder has not reserved the segment, or it does not hold exactly these columns.
        """
        segment = self._segments.get(-1 if number is None else number)
        arrays: Arrays = {}
        if number is not None:
            if segment is None or segment.holder != holder or segment.groups:
                raise StreamError(
                    f"{holder} writes into segment {number}", why="it has not reserved that segment"
                )
            arrays = mapped(self.segments, number)
        if rows is None:
            rows = arrays[ROWS].copy() if ROWS in arrays else np.zeros(0, np.int64)
            if rows.ndim != 1 or (rows < 1).any():
                raise StreamError(
                    f"{holder} begins groups of {rows[:9].tolist()} rows", why="a group has at least 1 row"
                )
        checked(arrays, columns, rows)
        if segment is not None:
            segment.groups, segment.columns = len(rows), columns
        return rows

    def gathered(self, names: Sequence[str], numbers: Ids, places: Ids) -> Arrays:
        """Return columns of groups at ``places`` [N] of segments ``numbers`` [N], with the groups' rows.

        Raises:
            StreamError: one of them does not exist (any more).
        """
        columns: dict[str, ColumnType] = {ROWS: ColumnType(dtype="int64", per="group")}
        frames: dict[int, Arrays] = {}
        for number in np.unique(numbers).tolist():
            its = places[numbers == number]
            frames[number] = mapped(self.segments, number)
            segment = self._segments.get(number)
            if segment is None or not 0 <= its.min() <= its.max() < len(frames[number][ROWS]):
                raise StreamError(f"group {its.max()} of segment {number} does not exist")
            for name in names:
                kind = segment.columns.get(name)
                if kind is None or columns.setdefault(name, kind) != kind:
                    raise StreamError(f"segment {number} has no column {name[:64]!r} of the same type")
        return gathered(frames, numbers, places, columns)

    async def give_up(self, holder: str) -> None:
        """Remove the segments that a holder has reserved and not written."""
        for number, segment in [*self._segments.items()]:
            if segment.holder == holder and not segment.groups:
                self._remove(number, self._segments.pop(number).size)

    async def delete(self, numbers: Ids, *, is_unread: bool) -> None:
        """Delete one group in each of these segments."""
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            segment = self._segments[int(number)]
            segment.groups -= int(count)
            segment.is_unread &= is_unread
            if not segment.groups:
                del self._segments[int(number)]
                if segment.is_unread:
                    self._free.setdefault(segment.size, []).append(int(number))
                else:
                    self._remove(int(number), segment.size)

    def _remove(self, number: int, size: int) -> None:
        self.segments.remove(number)
        self.used_bytes -= size


def _rounded(nbytes: int) -> int:
    """Round up to one of four sizes between a power of two and the next, so that segments can be reused."""
    step = max(SMALLEST_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step
