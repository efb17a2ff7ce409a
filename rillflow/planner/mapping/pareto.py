"""Pareto: of many plans those that no other equals or betters in every number that counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rillflow.planner.objective import Floats


def undominated(
    numbers: Floats,
    groups: np.ndarray | None = None,
    handicap: Callable[[int, np.ndarray], Floats] | None = None,
) -> np.ndarray:
    """Rows of ``numbers`` [rows, n], the less the better, to keep; of equal ones the first.

    Args:
        numbers: what counts.
        groups: rows of different groups are never compared, [rows].
        handicap: what is added to a row before it is compared with others, [others, n]: what it may cost
            elsewhere to have that row in place of them.
    """
    if not len(numbers):
        return np.zeros(0, dtype=np.int64)
    left = np.lexsort((np.arange(len(numbers)), numbers.sum(axis=1)))
    kept = []
    while len(left):
        first, rest = left[0], left[1:]
        kept.append(first)
        mine = numbers[first] if handicap is None else numbers[first] + handicap(int(first), rest)
        better = (mine <= numbers[rest]).all(axis=1)
        if groups is not None:
            better &= groups[rest] == groups[first]
        left = rest[~better]
    return np.sort(np.array(kept, dtype=np.int64))
