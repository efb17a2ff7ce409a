"""Options: every grid that cuts a model evenly over a number of devices, and which of them are worth keeping.

devices ─ divisors ─> grids ─ seconds, bytes ─> those that fit alone ─ dominated ones cut ─> options
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rillflow.planner.grid import Grid
from rillflow.planner.model_shape import ModelShape


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """The whole numbers that divide it, ascending."""
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def cuts_heads(shape: ModelShape, tp: int) -> bool:
    """Whether each of tp devices gets as many heads; latents are not cut, so only queries count."""
    return shape.heads % tp == 0 and (bool(shape.latent) or shape.kv_heads % tp == 0)


def grids(shape: ModelShape, devices: int, per_machine: int) -> Iterator[Grid]:
    """Grids to train or score on just so many devices: tp in one machine, pp at most a stage a layer."""
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
    """Sizes of ep: 1, and what divides the experts and a stage's devices and is no smaller than tp."""
    if not shape.is_mixture:
        return [1]
    return [1, *(ep for ep in divisors(devices) if ep > 1 and ep >= tp and shape.experts % ep == 0)]


def sampling_sizes(shape: ModelShape, devices: int) -> list[int]:
    """Devices a copy of a sampler may have: any number that divides the pool and the heads."""
    return [tp for tp in divisors(devices) if cuts_heads(shape, tp)]


def undominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """The rows of [points, costs] that no other equals in all and beats in one; of equals, the first."""
    rows, first = np.unique(costs, axis=0, return_index=True)
    no_worse = (rows[:, None] >= rows).all(axis=2).sum(axis=1)
    return np.sort(first[no_worse == 1])  # those than which none but themselves is no worse
