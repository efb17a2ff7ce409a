"""Dock: named arrays in one block of memory, and bells that wake a waiting process.

    owner ─ memfd, pipes ─> Dock ── pickled: process id and descriptors ──> Dock in another process
                                    (opens /proc/PID/fd/N: same user, same machine, owner alive)

The memory and the pipes have no name in any folder, so nothing is left over when processes are killed: the
kernel frees them with the last process. A bell is a pipe; it only wakes. What is there to do is read from the
arrays, so a lost or repeated ring does no harm.
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
from rillflow_classic.workers.recording import ArraySpec, Specs

_ALIGNMENT = 64
_DRAINED_BYTES = 65536


class Dock:
    """Arrays by name in shared memory, zero at the beginning, and bells by name.

    Args:
        specs: the arrays.
        bells: names of the bells.
        is_shared: whether other processes attach to it; else it cannot be sent to them.

    Raises:
        StreamError: the machine has no such memory.
    """

    def __init__(self, specs: Specs, bells: Sequence[str], *, is_shared: bool) -> None:
        self._specs, self._is_shared, self._owner = dict(specs), is_shared, os.getpid()
        try:
            self._memory = os.memfd_create("rillflow-streams")
            os.ftruncate(self._memory, max(1, _end_of(specs)))
        except (AttributeError, OSError) as error:
            raise StreamError(
                f"no shared memory of {_end_of(specs):,} bytes: {error}",
                why="streams in memory use memfd_create, a call of Linux",
                fix="use workers.transport = 'tcp', or shorter fragments",
            ) from None
        self._pipes = {name: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for name in bells}
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_shared:
            raise StreamError(
                "inline streams are sent to another process",
                why="they are in the memory of one process",
                fix="use workers.transport = 'shared_memory' or 'tcp'",
            )
        return {
            "_specs": self._specs,
            "_owner": self._owner,
            "_memory": self._memory,
            "_pipes": self._pipes,
            "_is_shared": True,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        if self._owner == os.getpid():
            self._memory = os.dup(self._memory)
            self._pipes = {name: (os.dup(ends[0]), os.dup(ends[1])) for name, ends in self._pipes.items()}
        else:
            self._memory = self._reopened(self._memory, os.O_RDWR)
            self._pipes = {
                name: (
                    self._reopened(ends[0], os.O_RDONLY | os.O_NONBLOCK),
                    self._reopened(ends[1], os.O_WRONLY | os.O_NONBLOCK),
                )
                for name, ends in self._pipes.items()
            }
            self._owner = os.getpid()
        self._map()

    def under(self, prefix: str) -> dict[str, Array]:
        """Return the arrays whose names begin with a prefix, by the rest of their names."""
        return {
            name.removeprefix(prefix): each for name, each in self.arrays.items() if name.startswith(prefix)
        }

    def ring(self, bell: str) -> None:
        """Wake the process that waits for a bell, now or at its next wait."""
        with contextlib.suppress(BlockingIOError):  # full of rings, so it wakes
            os.write(self._pipes[bell][1], b"\0")

    def wait(self, bell: str, seconds: float) -> bool:
        """Wait until a bell rings, at most some seconds; return whether it rang."""
        end = self._pipes[bell][0]
        poll = select.poll()
        poll.register(end, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return False
        try:
            os.read(end, _DRAINED_BYTES)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptors; arrays stay valid as long as they are used."""
        for each in (self._memory, *(end for ends in self._pipes.values() for end in ends)):
            os.close(each)
        self._pipes = {}

    def _map(self) -> None:
        self._mapped = mmap.mmap(self._memory, max(1, _end_of(self._specs)))
        self.arrays: dict[str, Array] = {}
        at = 0
        for name, spec in self._specs.items():
            self.arrays[name] = np.ndarray(spec.shape, spec.dtype, self._mapped, at)
            at = _aligned(at + spec.nbytes)

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


def _end_of(specs: Mapping[str, ArraySpec]) -> int:
    at = 0
    for spec in specs.values():
        at = _aligned(at + spec.nbytes)
    return at


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
