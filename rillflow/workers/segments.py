"""Segments: anonymous shared memory, which ends with its last holder, and is written again once it is free.

    buffers ── SegmentPool.hold ──> MemorySegment: a read-only descriptor ── to any process ──> mapped

Linux grants a write lease on a file only if nobody else has it open, mapped or in a message on its way. So
the kernel counts the holders of a segment, also those that are killed. Memory that is written again has its
pages already, which takes a fraction of the time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MAX_POOL_BYTES = 2**28
"""Largest sum of segments that a pool keeps for later values."""
_MIN_BYTES = 2**16
MAX_SEGMENTS = 32
"""Largest number of segments that it keeps; each has two descriptors of its own."""
_ALIGNMENT = 64


class MemorySegment:
    """Shared memory that does not change as long as anybody holds it.

    Args:
        descriptor: its descriptor, which it owns.
        size: its bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        weakref.finalize(self, os.close, descriptor)

    def mapped(self) -> NDArray[np.uint8]:
        """Return its bytes, mapped privately; the mapping ends with the last array that uses it."""
        return torch.from_file(
            _path(self.descriptor), shared=False, size=self.size, dtype=torch.uint8
        ).numpy()


class SegmentPool:
    """The segments that a process writes. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._kept: list[_OwnSegment] = []
        self._lock = threading.Lock()

    def hold(self, buffers: Sequence[Any]) -> tuple[MemorySegment, list[int]]:
        """Copy buffers into a segment; return it with the offset of each."""
        offsets, end = list[int](), 0
        for buffer in buffers:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            offsets.append(start)
            end = start + memoryview(buffer).nbytes
        capacity = max(_MIN_BYTES, 1 << (end - 1).bit_length())
        with self._lock:
            own = self._free(capacity)
            held = MemorySegment(os.open(_path(own.descriptor), os.O_RDONLY), end)
            self._kept.append(own)
            while len(self._kept) > MAX_SEGMENTS or self._bytes > MAX_POOL_BYTES:
                self._kept.pop(0)  # it ends with its holders
        for buffer, start in zip(buffers, offsets, strict=True):
            own.write(memoryview(buffer).cast("B"), start)
        return held, offsets

    @property
    def _bytes(self) -> int:
        return sum(each.capacity for each in self._kept)

    def _free(self, capacity: int) -> _OwnSegment:
        """Take out a segment that nobody holds, or return a new one."""
        alike = (each for each in self._kept if each.capacity == capacity)
        found = next((each for each in alike if each.is_free), None)
        if found is None:
            return _OwnSegment(capacity)
        self._kept.remove(found)
        return found


class _OwnSegment:
    """The writer's side of a segment."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        made = os.memfd_create("rillflow")
        os.ftruncate(made, capacity)
        self.descriptor = os.open(_path(made), os.O_RDWR)  # a lease counts only files that were opened
        os.close(made)
        weakref.finalize(self, os.close, self.descriptor)
        self._memory: NDArray[np.uint8] | None = None
        self._is_new = True

    @property
    def is_free(self) -> bool:
        """Whether nobody else has it open or mapped."""
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False
        fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        self._is_new = False
        return True

    def write(self, content: memoryview, start: int) -> None:
        """Write bytes at an offset."""
        if not self._is_new:
            if self._memory is None:
                self._memory = np.frombuffer(mmap.mmap(self.descriptor, self.capacity), np.uint8)
            self._memory[start : start + len(content)] = np.frombuffer(content, np.uint8)
            return
        while len(content):  # one call writes 2 GiB at most; the first write is faster without a mapping
            written = os.pwrite(self.descriptor, content, start)
            content, start = content[written:], start + written


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
