"""Samplers: which ready groups a taker is given. Always whole groups: their rows are each other's baseline.

Pure functions of what stands in the table, in begin order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

BLOCKED, READY, TAKEN, DONE = range(4)
"""What a group is to a stage: columns missing, may be taken, leased, finished."""

Sampler = Callable[[NDArray[np.uint8], int], NDArray[np.int64]]
"""States of all groups in begin order, and how many are wanted at most; gives places among them."""


def in_order(state: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """The groups begun first that nobody has taken, up to the first that is not ready.

    What is taken, and in which order, then does not depend on what became ready when.
    """
    first = np.flatnonzero(state <= READY)[:count]
    blocked = np.flatnonzero(state[first] == BLOCKED)
    return first[: blocked[0]] if len(blocked) else first


def ready_first(state: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Whichever groups are ready, the ones begun first before others: nobody waits for a straggler."""
    return np.flatnonzero(state == READY)[:count]


SAMPLERS: Mapping[str, Sampler] = {"in_order": in_order, "ready_first": ready_first}
"""By the name that a stage's ``order`` has."""


def within(tokens: NDArray[np.int64], budget: int) -> int:
    """How many groups from the first on have at most ``budget`` tokens together; one at least.

    A stage whose takers pass a budget is balanced by tokens: who gets long rows gets few, and who is fast
    asks more often.
    """
    return max(1, int(np.searchsorted(np.cumsum(tokens), budget, side="right")))
