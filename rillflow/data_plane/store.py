"""Store: the payload of a machine's streams, in files of shared memory that hold one frame each.

    reserve(bytes) ─> segment ─ the writer copies a frame in ─> keep(groups) ─> readers map it
                         ^                                                          │
                         └── delete(groups): the last group in it is gone <─────────┘

A segment is written over only if nobody can be reading it; else its file is removed, and who has mapped it
reads on what was there. **bounded-store** All files together have at most ``capacity_bytes``; a reservation
that does not fit waits, which is back-pressure.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.data_plane.instructions import Ids
from rillflow.data_plane.schema import ColumnType
from rillflow.data_plane.wire import HEAD_BYTES, Arrays, Message, Packed, head_of, message_of
from rillflow.errors import StreamError

SMALLEST_BYTES = 64 * 2**10
LENGTHS = ".lengths"
"""Of a ragged column ``x`` a segment holds the values ``x`` and ``x.lengths``."""
ROWS = ".rows"
"""Of every segment: how many rows each of its groups has."""
STORED = {"bfloat16": "int16"}
"""Types of columns that arrays do not have, and those that their bits are stored as."""


@dataclass(kw_only=True, eq=False)
class _Segment:
    """A file of shared memory."""

    size: int
    """Bytes of the file."""
    holder: str
    """Who reserved it."""
    groups: int = 0
    """Groups that are in it and not deleted."""
    is_unread: bool = True
    """Whether nobody can be reading it once it has no groups."""


class Store:
    """Segments, and where every cell lies in them.

    Args:
        folder: an empty folder of its own, in shared memory.
        capacity_bytes: of all files together.
    """

    def __init__(self, folder: Path, *, capacity_bytes: int) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Of all files, those that wait to be written again among them."""
        self._segments: dict[int, _Segment] = {}
        self._free: dict[int, list[int]] = {}
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
            for number in [each for free in self._free.values() for each in free]:
                if self.used_bytes + size > self.capacity_bytes:
                    self._remove(number)
            if self.used_bytes + size > self.capacity_bytes:
                return None
            number, self._next = self._next, self._next + 1
            self._create(number, size)
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
        return mapped(self.folder, number).arrays

    def write(self, number: int, frame: Packed) -> None:
        """Copy a frame into a reserved segment."""
        frame.write_into(opened(self.folder, number, is_shared=True))

    def keep(self, number: int, groups: int) -> None:
        """The segment holds so many groups from now on."""
        self._segments[number].groups = groups

    def give_up(self, holder: str) -> None:
        """Remove what a holder has reserved and not written."""
        for number, segment in [*self._segments.items()]:
            if segment.holder == holder and not segment.groups:
                self._remove(number)

    def delete(self, numbers: Ids, *, is_unread: bool) -> None:
        """One group each of these segments is gone."""
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            segment = self._segments[int(number)]
            segment.groups -= int(count)
            segment.is_unread &= is_unread
            if not segment.groups:
                if segment.is_unread:
                    self._free.setdefault(segment.size, []).append(int(number))
                    del self._segments[int(number)]
                else:
                    self._remove(int(number))

    def close(self) -> None:
        """Remove every file."""
        for file in self.folder.iterdir():
            file.unlink()
        self.folder.rmdir()

    def _create(self, number: int, size: int) -> None:
        descriptor = os.open(self.folder / str(number), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            (self.folder / str(number)).unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise StreamError(
                f"{size} bytes of shared memory for a segment are not there",
                why=f"{self.folder} is full before the store's {self.capacity_bytes} bytes are",
                fix="give the store fewer, or the machine more (docker: --shm-size)",
            ) from None
        finally:
            os.close(descriptor)
        self.used_bytes += size

    def _remove(self, number: int) -> None:
        file = self.folder / str(number)
        self.used_bytes -= file.stat().st_size
        file.unlink()
        self._segments.pop(number, None)
        for free in self._free.values():
            if number in free:
                free.remove(number)


def opened(folder: Path, number: int, *, is_shared: bool) -> memoryview:
    """A segment's bytes; what is changed in one that is not shared, nobody else sees."""
    with (folder / str(int(number))).open("r+b") as file:
        access = mmap.ACCESS_WRITE if is_shared else mmap.ACCESS_COPY
        return memoryview(mmap.mmap(file.fileno(), 0, access=access))


def mapped(folder: Path, number: int) -> Message:
    """The frame in a segment, without a copy."""
    data = opened(folder, number, is_shared=False)
    head = head_of(data)
    body = data[head.body_at : head.body_at + head.body_bytes]
    return message_of(head, bytes(data[HEAD_BYTES : HEAD_BYTES + head.json_bytes]), body)


def checked(arrays: Arrays, columns: Mapping[str, ColumnType], rows: Ids) -> None:
    """Refuse arrays that are not these columns of groups with ``rows`` [N] rows each.

    Raises:
        StreamError: a column is missing, not the writer's, of another type, shape or number of entries.
    """
    wanted = {ROWS, *columns, *(name + LENGTHS for name, column in columns.items() if column.ragged)}
    if set(arrays) != wanted:
        odd = sorted(set(arrays) ^ wanted)
        raise StreamError(f"{odd[0]!r} is {'missing' if odd[0] in wanted else 'not for this writer'}")
    if arrays[ROWS].dtype != np.int64 or not np.array_equal(arrays[ROWS], rows):
        raise StreamError("groups are written with another number of rows than they have", why=f"{rows[:9]}")
    for name, column in columns.items():
        values, entries = arrays[name], len(rows) if column.per == "group" else int(rows.sum())
        if column.ragged:
            lengths = arrays[name + LENGTHS]
            if lengths.dtype != np.int64 or lengths.shape != (entries,) or (lengths < 0).any():
                raise StreamError(
                    f"{name + LENGTHS} is {lengths.dtype} {list(lengths.shape)}, not int64 [{entries}]"
                )
            entries = int(lengths.sum())
        expected = (STORED.get(column.dtype, column.dtype), (entries, *column.shape))
        if (values.dtype.name, values.shape) != expected:
            raise StreamError(
                f"column {name!r} is {values.dtype.name} {list(values.shape)}",
                why=f"it is {expected[0]} {list(expected[1])} by the schema, the rows and their lengths",
            )


def gathered(
    segments: Mapping[int, Arrays], numbers: Ids, places: Ids, columns: Mapping[str, ColumnType]
) -> dict[str, NDArray[Any]]:
    """Columns of groups at ``places`` [N] of segments ``numbers`` [N]; views where they lie side by side."""
    cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) != 1)) + 1
    runs = [
        (segments[int(numbers[start])], int(places[start]), int(places[stop - 1]) + 1)
        for start, stop in pairwise([0, *cuts.tolist(), len(numbers)])
    ]
    parts: dict[str, list[NDArray[Any]]] = {}
    for arrays, start, stop in runs:
        rows = _ends(arrays[ROWS])
        for name, column in columns.items():
            first, last = (start, stop) if column.per == "group" else (int(rows[start]), int(rows[stop]))
            if column.ragged:
                lengths = arrays[name + LENGTHS]
                parts.setdefault(name + LENGTHS, []).append(lengths[first:last])
                skipped = int(lengths[:first].sum())
                first, last = skipped, skipped + int(lengths[first:last].sum())
            parts.setdefault(name, []).append(arrays[name][first:last])
    return {name: found[0] if len(found) == 1 else np.concatenate(found) for name, found in parts.items()}


def _ends(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _rounded(nbytes: int) -> int:
    """Up to one of four sizes between a power of two and the next, so that files can be written again."""
    step = max(SMALLEST_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step
