"""Shared tables: tables of records in one block of memory, and bells that wake a waiting process.

    owner ─ memfd, pipes ─> SharedTables ── pickled: process id, descriptors ──> SharedTables elsewhere
                                            (opens /proc/PID/fd/N: same user, same machine, owner alive)

The memory and the pipes have no name in any folder, so nothing is left over when processes are killed: the
kernel frees them with the last process. A bell is a pipe; it only wakes. What is there to do is read from the
tables, so a lost or repeated ring does no harm.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rillflow.errors import StreamError
from rillflow_classic.fragment import Array
from rillflow_classic.streams.layout import Record, columns_of

_ALIGNMENT = 64
_DRAINED_BYTES = 65536


class SharedTables:
    """Tables by name in memory, zero at the beginning, and bells by name.

    Args:
        tables: record and number of rows of every table.
        bells: names of the bells.

    Raises:
        StreamError: the machine has no such memory.
    """

    def __init__(self, tables: Mapping[str, tuple[Record, int]], bells: Sequence[str]) -> None:
        self._layout, self._owner = dict(tables), os.getpid()
        sizes = [-(-record.itemsize * rows // _ALIGNMENT) * _ALIGNMENT for record, rows in tables.values()]
        self._starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        try:
            self._memory = os.memfd_create("rillflow-streams")
            os.ftruncate(self._memory, self._starts[-1])
        except (AttributeError, OSError) as error:
            raise StreamError(
                f"no shared memory of {self._starts[-1]:,} bytes: {error}",
                why="streams in memory use memfd_create, a call of Linux",
                fix="use shorter fragments, or fewer environments",
            ) from None
        self._pipes = {name: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for name in bells}
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: each for name, each in self.__dict__.items() if name not in ("tables", "columns", "rows")
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._memory = self._reopened(self._memory, os.O_RDWR)
        flags = os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY | os.O_NONBLOCK
        self._pipes = {
            name: (self._reopened(ends[0], flags[0]), self._reopened(ends[1], flags[1]))
            for name, ends in self._pipes.items()
        }
        self._owner = os.getpid()
        self._map()

    def ring(self, bell: str) -> None:
        """Wake the process that waits for a bell, now or at its next wait."""
        with contextlib.suppress(BlockingIOError):  # full of rings, so it wakes
            os.write(self._pipes[bell][1], b"\0")

    def wait(self, bell: str, seconds: float) -> None:
        """Wait until a bell rings, at most some seconds."""
        poll = select.poll()
        poll.register(self.descriptor(bell), select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self.descriptor(bell), _DRAINED_BYTES)

    def descriptor(self, bell: str) -> int:
        """Return the descriptor that is readable after a bell rang."""
        return self._pipes[bell][0]

    def close(self) -> None:
        """Close the descriptors; arrays stay valid as long as they are used."""
        for each in (self._memory, *(end for ends in self._pipes.values() for end in ends)):
            os.close(each)
        self._pipes = {}

    def _map(self) -> None:
        mapped = mmap.mmap(self._memory, self._starts[-1])
        self.tables: dict[str, Array] = {
            name: np.ndarray((rows,), record, mapped, start)
            for (name, (record, rows)), start in zip(self._layout.items(), self._starts, strict=False)
        }
        """Records [rows] of every table."""
        self.columns = {name: columns_of(table) for name, table in self.tables.items()}
        """Arrays [rows, ...] of every table, by name."""
        self.rows = {
            name: table.view(np.uint8).reshape(len(table), -1) for name, table in self.tables.items()
        }
        """[rows, bytes] of every table: its records as they are in memory."""

    def _reopened(self, descriptor: int, flags: int) -> int:
        path = f"/proc/{self._owner}/fd/{descriptor}"
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise StreamError(
                f"the streams of process {self._owner} cannot be opened: {error}",
                why="shared memory needs the same machine and user, and the process that made it",
                fix="use workers.transport = 'tcp' between machines",
            ) from None
