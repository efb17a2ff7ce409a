"""Segments: memory ranges that hold one frame each; a reader's changes are visible to nobody else.

``Files`` serve processes of one machine, ``Memory`` one process. In both, a frame is copied in once and read
in place: columns are views, copied page by page on write.

Segments need Linux: `memfd_create`, `posix_fallocate` and `MADV_REMOVE`.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.data_plane.instructions import Ids
from rillflow.data_plane.schema import ColumnType
from rillflow.errors import StreamError
from rillflow.workers.wire import HEAD_BYTES, Arrays, head_of, message_of
from rillflow_service.requests import LENGTHS, ROWS

STORED = {"bfloat16": "int16"}
"""Column types without an array type, and the types that store their bits."""


class Files:
    """Segments as files in shared memory; a reader keeps a mapped segment after its removal.

    Args:
        folder: an empty folder in shared memory, used only for segments.
    """

    def __init__(self, folder: Path) -> None:
        require_linux(sys.platform)
        self.folder = folder

    def create(self, number: int, size: int) -> None:
        """Reserve the memory of a segment."""
        descriptor = os.open(self.folder / str(number), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            _reserve(descriptor, 0, size, str(self.folder))
        except StreamError:
            self.remove(number)
            raise
        finally:
            os.close(descriptor)

    def opened(self, number: int, *, is_shared: bool) -> memoryview:
        """Return a segment's bytes; changes are private unless ``is_shared``."""
        if not self.has(number):
            raise _gone(number)
        with (self.folder / str(number)).open("r+b") as file:
            access = mmap.ACCESS_WRITE if is_shared else mmap.ACCESS_COPY
            return memoryview(mmap.mmap(file.fileno(), 0, access=access))

    def has(self, number: int) -> bool:
        """Return whether the segment exists."""
        return (self.folder / str(number)).exists()

    def remove(self, number: int) -> None:
        """Remove the segment; its memory is freed when no process maps it."""
        (self.folder / str(number)).unlink()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Range:
    at: int
    size: int
    views: weakref.WeakSet[mmap.mmap]


class Memory:
    """Segments as ranges of one anonymous file, which ends with this process."""

    def __init__(self) -> None:
        require_linux(sys.platform)
        self._file = os.memfd_create("rillflow")
        self._end = 0
        self._ranges: dict[int, _Range] = {}
        self._removed: list[_Range] = []
        weakref.finalize(self, os.close, self._file)

    def create(self, number: int, size: int) -> None:
        """Reserve the memory of a segment."""
        self._free_unread()
        _reserve(self._file, self._end, size, "this machine's memory")
        self._ranges[number] = _Range(at=self._end, size=size, views=weakref.WeakSet())
        self._end += size

    def opened(self, number: int, *, is_shared: bool) -> memoryview:
        """Return a segment's bytes; changes are private unless ``is_shared``."""
        if (there := self._ranges.get(number)) is None:
            raise _gone(number)
        found = self._mapped(there, mmap.ACCESS_WRITE if is_shared else mmap.ACCESS_COPY)
        there.views.add(found)
        return memoryview(found)

    def has(self, number: int) -> bool:
        """Return whether the segment exists."""
        return number in self._ranges

    def remove(self, number: int) -> None:
        """Remove the segment; its memory is freed when it is no longer mapped."""
        self._removed.append(self._ranges.pop(number))
        self._free_unread()

    def _free_unread(self) -> None:
        for each in [each for each in self._removed if not each.views]:
            self._removed.remove(each)
            self._mapped(each, mmap.ACCESS_WRITE).madvise(mmap.MADV_REMOVE)

    def _mapped(self, there: _Range, access: int) -> mmap.mmap:
        return mmap.mmap(self._file, there.size, access=access, offset=there.at)


def require_linux(system: str) -> None:
    """Raise StreamError on an operating system (a value of ``sys.platform``) other than Linux.

    Raises:
        StreamError: the system is not Linux.
    """
    if system != "linux":
        why = "it uses system calls for shared memory that only Linux has"
        fix = "use a Linux machine or container; training with the native engine needs no data plane"
        raise StreamError(f"the data plane does not run on {system}", why=why, fix=fix)


def _gone(number: int) -> StreamError:
    return StreamError(
        f"segment {number} no longer exists", why="the reader's lease has ended", fix="take the groups again"
    )


def _reserve(descriptor: int, at: int, size: int, where: str) -> None:
    try:
        os.posix_fallocate(descriptor, at, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise StreamError(
            f"no room for a segment of {size} bytes of shared memory",
            why=f"{where} is full although the store is not",
            fix="lower the store's capacity, or enlarge shared memory (docker: --shm-size)",
        ) from None


def mapped(segments: Files | Memory, number: int) -> Arrays:
    """Return the columns in a segment, without a copy."""
    data = segments.opened(number, is_shared=False)
    head = head_of(data)
    body = data[head.body_at : head.body_at + head.body_bytes]
    return message_of(head, bytes(data[HEAD_BYTES : HEAD_BYTES + head.json_bytes]), body).arrays


def checked(arrays: Arrays, columns: Mapping[str, ColumnType], rows: Ids) -> None:
    """Raise StreamError unless arrays are these columns of groups with ``rows`` [N] rows each.

    Raises:
        StreamError: a column is missing, belongs to another writer, has a wrong type, shape or entry count,
            or breaks its contract: aligned, finite, within bounds.
    """
    wanted = {ROWS, *columns, *(name + LENGTHS for name, column in columns.items() if column.ragged)}
    if set(arrays) != wanted:
        odd = sorted(set(arrays) ^ wanted)
        raise StreamError(f"{odd[0]!r} is {'missing' if odd[0] in wanted else 'not for this writer'}")
    if arrays[ROWS].dtype != np.int64 or not np.array_equal(arrays[ROWS], rows):
        raise StreamError("groups are written with wrong numbers of rows", why=f"they have {rows[:9]}")
    for name, column in columns.items():
        entries = len(rows) if column.per == "group" else int(rows.sum())
        if column.ragged:
            lengths = arrays[name + LENGTHS]
            _check_type(name + LENGTHS, lengths, "int64", (entries,))
            if (lengths < 0).any():
                raise StreamError(
                    f"{name + LENGTHS} has the length {lengths.min()}", why="a length is at least 0"
                )
            entries = int(lengths.sum())
        _check_type(name, arrays[name], STORED.get(column.dtype, column.dtype), (entries, *column.shape))
    for name, column in columns.items():
        if column.aligned:
            _check_aligned(name, column.aligned, arrays)
        _check_values(name, column, arrays[name])


def _check_type(name: str, values: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    if (values.dtype.name, values.shape) != (dtype, shape):
        why = f"the schema, rows and lengths require {dtype} {list(shape)}"
        raise StreamError(f"column {name!r} is {values.dtype.name} {list(values.shape)}", why=why)


def _check_aligned(name: str, other: str, arrays: Arrays) -> None:
    own, others = arrays[name + LENGTHS], arrays[other + LENGTHS]
    for place in np.flatnonzero(own != others)[:1].tolist():
        raise StreamError(
            f"entry {place} has {own[place]} values of {name!r} and {others[place]} of {other!r}",
            why="the stream's columns say that they are aligned",
            fix="write one value for each of the other column's",
        )


def _check_values(name: str, column: ColumnType, values: NDArray[Any]) -> None:
    if column.dtype == "bfloat16":
        values = (values.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    rules: dict[str, NDArray[np.bool_]] = {}
    if column.finite:
        rules["finite"] = np.isfinite(values)
    if column.least is not None:
        rules[f"at least {column.least:g}"] = values >= column.least
    if column.most is not None:
        rules[f"at most {column.most:g}"] = values <= column.most
    broken = [np.flatnonzero(~good) for good in rules.values()]
    for place in sorted(int(each[0]) for each in broken if len(each))[:1]:
        raise StreamError(
            f"value {place} of column {name!r} is {values.reshape(-1)[place]}",
            why=f"the stream's columns say that it is {', '.join(rules)}",
            fix="correct the writer; nothing of this request was kept",
        )


def gathered(
    segments: Mapping[int, Arrays], numbers: Ids, places: Ids, columns: Mapping[str, ColumnType]
) -> dict[str, NDArray[Any]]:
    """Return columns of groups at ``places`` [N] of segments ``numbers`` [N]; views if contiguous."""
    cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) != 1)) + 1
    runs = [
        (segments[int(numbers[start])], int(places[start]), int(places[stop - 1]) + 1)
        for start, stop in pairwise([0, *cuts.tolist(), len(numbers)])
    ]
    parts: dict[str, list[NDArray[Any]]] = {}
    for arrays, start, stop in runs:
        before, rows = int(arrays[ROWS][:start].sum()), int(arrays[ROWS][start:stop].sum())
        for name, column in columns.items():
            first, last = (start, stop) if column.per == "group" else (before, before + rows)
            if column.ragged:
                lengths = arrays[name + LENGTHS]
                parts.setdefault(name + LENGTHS, []).append(lengths[first:last])
                skipped = int(lengths[:first].sum())
                first, last = skipped, skipped + int(lengths[first:last].sum())
            parts.setdefault(name, []).append(arrays[name][first:last])
    return {name: found[0] if len(found) == 1 else np.concatenate(found) for name, found in parts.items()}
