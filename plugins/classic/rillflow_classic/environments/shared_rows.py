"""Shared rows: actions and results of all slots in memory that several processes map.

    file without a name ─ mmap ─> actions [N, ...] │ buffer 0: observations, rewards, ... │ buffer 1

Steps write the two buffers in turn, so a process that dies in a step leaves the last results whole.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from rillflow_classic.environments.lanes import Rows
from rillflow_classic.environments.vector import Space

_ALIGNMENT = 64


class SharedRows:
    """Views of one mapped file.

    Args:
        space: space of one slot's observation.
        action_space: space of one slot's action.
        num_slots: number of slots N.
        descriptor: open file of another process; None makes a file.
    """

    def __init__(
        self, space: Space, action_space: Space, num_slots: int, descriptor: int | None = None
    ) -> None:
        shapes = [(action_space.shape or (), action_space.dtype)]
        rows = [(space.shape or (), space.dtype), ((), np.float32), ((), bool), ((), bool)]
        places, size = [], 0
        for shape, dtype in (*shapes, *rows, *rows):
            places.append((size, (num_slots, *shape), np.dtype(dtype)))
            count = num_slots * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            size += -(-count // _ALIGNMENT) * _ALIGNMENT
        self._file: IO[bytes] | None = None
        if descriptor is None:
            memory = Path("/dev/shm")
            self._file = tempfile.TemporaryFile(dir=memory if memory.is_dir() else None)  # noqa: SIM115  kept
            descriptor = self._file.fileno()
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        """File descriptor, for another process."""
        memory_map = mmap.mmap(descriptor, size)
        arrays: list[Any] = [
            np.ndarray(shape, dtype, buffer=memory_map, offset=place) for place, shape, dtype in places
        ]
        self.actions: Any = arrays[0]
        """[N, ...] actions of the present step."""
        self.buffers = tuple(
            Rows(
                observations=arrays[first],
                rewards=arrays[first + 1],
                terminated=arrays[first + 2],
                truncated=arrays[first + 3],
            )
            for first in (1, 5)
        )
        """Results of the present step and of the one before, in turn."""
