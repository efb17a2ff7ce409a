"""Store: the payload of a machine's streams, in segments of memory that hold one frame each.

    reserve(bytes) ─> segment ─ the writer copies a frame in ─> keep(groups) ─> readers map it
                         ^                                                          │
                         └── delete(groups): the last group in it is gone <─────────┘

A segment is written over only if nobody can be reading it; else it is removed, and who has mapped it
reads on what was there. **bounded-store** All segments together have at most ``capacity_bytes``; a
reservation that does not fit waits, which is back-pressure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rillflow.data_plane.instructions import Ids
from rillflow.data_plane.segments import Files, Memory, mapped
from rillflow.data_plane.wire import Arrays, Packed
from rillflow.errors import StreamError

SMALLEST_BYTES = 64 * 2**10


@dataclass(kw_only=True, eq=False)
class _Segment:
    """What is known of a segment."""

    size: int
    """Its bytes."""
    holder: str
    """Who reserved it."""
    groups: int = 0
    """Groups that are in it and not deleted."""
    is_unread: bool = True
    """Whether nobody can be reading it once it has no groups."""


class Store:
    """Segments, and where every cell lies in them.

    Args:
        segments: where they are.
        capacity_bytes: of all of them together.
    """

    def __init__(self, segments: Files | Memory, *, capacity_bytes: int) -> None:
        self.segments = segments
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Of all segments, those that wait to be written again among them."""
        self._segments: dict[int, _Segment] = {}
        self._free: dict[int, list[int]] = {}
        """By size, segments to be written again."""
        self._next = 0

    def reserve(self, nbytes: int, holder: str) -> int | None:
        """The number of a segment for a frame, or None while there is no room.

        Raises:
            StreamError: there could never be room, or the machine has less shared memory than was said.
        """
        size = _rounded(nbytes)
        if size > self.capacity_bytes:
            raise StreamError(
                f"{holder} reserves {nbytes} bytes",
                why=f"the store has {self.capacity_bytes}",
                fix="put less at once",
            )
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

    def read(self, number: int, holder: str) -> Arrays:
        """The arrays that a holder has written into its segment.

        Raises:
            StreamError: the segment is not the holder's to write, or holds no frame.
        """
        segment = self._segments.get(number)
        if segment is None or segment.holder != holder or segment.groups:
            raise StreamError(f"{holder} writes into segment {number}", why="it has not reserved it")
        return mapped(self.segments, number).arrays

    def write(self, number: int, frame: Packed) -> None:
        """Copy a frame into a reserved segment."""
        frame.write_into(self.segments.opened(number, is_shared=True))

    def keep(self, number: int, groups: int) -> None:
        """The segment holds so many groups from now on."""
        self._segments[number].groups = groups

    def give_up(self, holder: str) -> None:
        """Remove what a holder has reserved and not written."""
        for number, segment in [*self._segments.items()]:
            if segment.holder == holder and not segment.groups:
                self._remove(number, self._segments.pop(number).size)

    def delete(self, numbers: Ids, *, is_unread: bool) -> None:
        """One group each of these segments is gone."""
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
    """Up to one of four sizes between a power of two and the next, so that files can be written again."""
    step = max(SMALLEST_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step
