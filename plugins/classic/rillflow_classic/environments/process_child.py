"""Process child: a child process that steps some of the lanes of a vector environment.

(buffer, seed | None) ── socket ─> lanes ─> shared rows; None, or an error ── socket ─> parent

consumes      commands: the buffer to write; the seed of a reset, None for a step
waits for     the next command
unblocked by  a command, or the end of the socket
produces      one answer to each command; after an error it ends
shuts down    healthy: the parent closes the socket; crash: the parent sees its end. It ends with its
              parent, also while an environment hangs
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rillflow.errors import RillflowError
from rillflow.workers.watchdog import end_with
from rillflow_classic.environments.catalog import CatalogEntry, find, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.lanes import Lane, LaneGroup, Rows


class SharedRows:
    """Actions and two buffers of rows in one file that several processes map.

    Steps write the buffers in turn, so a process that dies in a step leaves the last results whole.

    Args:
        lane: has the spaces.
        num_slots: number of slots N.
    """

    def __init__(self, lane: Lane, num_slots: int) -> None:
        self._num_slots = num_slots
        space, action = lane.observation_space, lane.action_space
        rows = {
            "observations": (space.shape or (), np.dtype(space.dtype)),
            "rewards": ((), np.dtype(np.float32)),
            "terminated": ((), np.dtype(bool)),
            "truncated": ((), np.dtype(bool)),
        }
        self._layout = [{"actions": (action.shape or (), np.dtype(action.dtype))}, rows, rows]
        self.size = sum(self._bytes(*each) for part in self._layout for each in part.values())
        """Size of the file in bytes."""

    def _bytes(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        size = self._num_slots * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return -(-size // 64) * 64

    def map(self, descriptor: int) -> tuple[Any, list[Rows]]:
        """Return the actions [N, ...] and the buffers in an open file."""
        memory, place, parts = mmap.mmap(descriptor, self.size), 0, list[dict[str, Any]]()
        for layout in self._layout:
            parts.append({})
            for name, (shape, dtype) in layout.items():
                parts[-1][name] = np.ndarray((self._num_slots, *shape), dtype, memory, place)
                place += self._bytes(shape, dtype)
        return parts[0]["actions"], [Rows(**part) for part in parts[1:]]


@dataclass(frozen=True, kw_only=True)
class LaneShare:
    """What a child is told."""

    config: EnvironmentSettings
    """Settings of the environment, with its provider."""
    first: int
    """Index of its first lane."""
    last: int
    """Index after its last lane."""
    num_lanes: int
    """Lanes of all children."""
    descriptor: int
    """Open file of the shared rows."""


def serve(link: Connection) -> None:
    """Make lanes and step them until the parent closes the socket."""
    share: LaneShare = link.recv()
    try:
        entry: CatalogEntry = find(share.config)
        lanes = [make_lane(share.config, entry) for _ in range(share.first, share.last)]
        group, width = LaneGroup(lanes, share.first), len(lanes[0].agents)
        every, buffers = SharedRows(lanes[0], share.num_lanes * width).map(share.descriptor)
        mine = slice(share.first * width, share.last * width)
        actions, parts = every[mine], [group.split(rows.part(mine)) for rows in buffers]
        while True:
            link.send(None)
            buffer, seed = link.recv()
            if seed is None:
                group.step(actions, parts[buffer])
            else:
                group.begin(seed, parts[buffer])
    except EOFError:
        return
    except RillflowError as error:
        link.send(error)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    serve(Connection(int(sys.argv[2])))
