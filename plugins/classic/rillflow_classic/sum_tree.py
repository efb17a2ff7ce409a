"""Sum tree: draw places in proportion to their priorities, and change priorities, in logarithmic time.

    level 0                total
    level 1        sum ... sum ... sum       each the sum of FAN children
    leaves     p p p ... p p p ... p p p     one priority of each place

A level is one array, so that a batch of draws descends one level at a time, without a loop over the batch.
Every sum is made anew from its children, so that rounding errors do not add up (arXiv 1511.05952, B.2.1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FAN = 16
"""Children of a node: few levels, and a node's children fill a few cache lines."""

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class SumTree:
    """Priorities of places, and their sums.

    Args:
        num_places: number of places; all priorities begin at 0.
    """

    def __init__(self, num_places: int) -> None:
        sizes = [num_places]
        while sizes[0] > 1:
            sizes.insert(0, -(-sizes[0] // FAN))
        self._levels: list[Floats] = [np.zeros((size + FAN - 1) // FAN * FAN) for size in sizes]
        self.num_places = num_places
        """Number of places."""

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[0][0])

    @property
    def leaves(self) -> Floats:
        """[num_places] the priorities; do not write to them."""
        return self._levels[-1][: self.num_places]

    def set(self, places: Places, priorities: Floats) -> None:
        """Replace the priorities of places [B]; of a repeated place the last one counts."""
        self._levels[-1][places] = priorities
        for child, parent in zip(self._levels[:0:-1], self._levels[-2::-1], strict=True):
            places = places // FAN
            parent[places] = child.reshape(-1, FAN)[places].sum(1)

    def find(self, masses: Floats) -> Places:
        """Return the places [B] at masses [B] of 0 up to the total, along the sum of the priorities.

        A place of priority 0 is never found as long as the total is positive.
        """
        nodes, left = np.zeros(len(masses), np.int64), masses
        for level in self._levels[1:]:
            sums = level.reshape(-1, FAN)[nodes].cumsum(1)
            last = (sums < sums[:, -1:]).sum(1)  # rounding must not lead past the last child that has mass
            child = np.minimum((sums <= left[:, None]).sum(1), last)
            rows = np.arange(len(nodes))
            left = left - np.where(child > 0, sums[rows, child - 1], 0.0)
            nodes = nodes * FAN + child
        return nodes
