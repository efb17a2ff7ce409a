"""Samplers: choose the ready groups for a taker. Always whole groups: their rows are each other's baseline.

They are pure functions of the table's state, in begin order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

BLOCKED, READY, TAKEN, DONE = range(4)
"""State of a group for a stage: columns missing, ready to be taken, leased, finished."""

Sampler = Callable[[NDArray[np.uint8], int], NDArray[np.int64]]
"""Takes the states of all groups in begin order and a maximum count; returns indices of groups."""


def in_order(state: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Return the earliest groups that nobody has taken, up to the first that is not ready.

    The choice and its order then do not depend on when groups became ready.
    """
    first = np.flatnonzero(state <= READY)[:count]
    blocked = np.flatnonzero(state[first] == BLOCKED)
    return first[: blocked[0]] if len(blocked) else first


def ready_first(state: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Return the ready groups, earliest first: no taker waits for a straggler."""
    return np.flatnonzero(state == READY)[:count]


SAMPLERS: Mapping[str, Sampler] = {"in_order": in_order, "ready_first": ready_first}
"""Samplers by the ``order`` of a stage."""


def within(tokens: NDArray[np.int64], budget: int) -> int:
    """Return how many groups, from the first on, fit ``budget`` tokens; 1 or more.

    A stage whose takers pass a budget is balanced by tokens: takers of long rows get few groups, and fast
    takers take more often.
    """
    return max(1, int(np.searchsorted(np.cumsum(tokens), budget, side="right")))
