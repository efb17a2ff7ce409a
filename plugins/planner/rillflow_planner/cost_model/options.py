"""Options: list every grid that divides a model evenly over devices, and select the ones worth keeping.

devices ─ divisors ─> grids ─ seconds, bytes ─> those that fit alone ─ drop dominated ones ─> options
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rillflow.placement.grid import Grid
from rillflow_planner.model_shape import ModelShape


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def cuts_heads(shape: ModelShape, tp: int) -> bool:
    """Return whether tp devices get equal numbers of heads; with latent attention, only query heads count."""
    return shape.heads % tp == 0 and (bool(shape.latent) or shape.kv_heads % tp == 0)


def grids(shape: ModelShape, devices: int, per_machine: int) -> Iterator[Grid]:
    """Yield grids to train or score on exactly these devices: tp within a machine, pp at most one per
    layer.
    """
    for tp in divisors(devices):
        if tp > per_machine or per_machine % tp or not cuts_heads(shape, tp):
            continue
        for pp in divisors(devices // tp):
            if pp > shape.layers:
                break
            dp = devices // tp // pp
            for ep in expert_sizes(shape, dp * tp, tp):
                for is_sharded in (False, True) if dp > 1 else (False,):
                    yield Grid(dp=dp, pp=pp, tp=tp, ep=ep, is_sharded=is_sharded)


def expert_sizes(shape: ModelShape, devices: int, tp: int) -> list[int]:
    """Return sizes of ep: 1, and divisors of the experts and of a stage's devices that are at least tp."""
    if not shape.is_mixture:
        return [1]
    return [1, *(ep for ep in divisors(devices) if ep > 1 and ep >= tp and shape.experts % ep == 0)]


def sampling_sizes(shape: ModelShape, devices: int) -> list[int]:
    """Return possible sizes of a sampler's copy: divisors of the pool that divide the heads."""
    return [tp for tp in divisors(devices) if cuts_heads(shape, tp)]


def undominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of Pareto-optimal rows of [points, costs]; of equal rows, the first."""
    rows, first = np.unique(costs, axis=0, return_index=True)
    no_worse = (rows[:, None] >= rows).all(axis=2).sum(axis=1)
    return np.sort(first[no_worse == 1])  # rows for which only the row itself is no worse
