"""Local: where in a rank's own tensor a box of the whole weight is.

    a dim of 10, this rank has [0:3] and [5:8]       its own tensor   0 1 2 | 5 6 7
                                                     box [6:8]    ->  4:6

A rank's tensor is its intervals of every dim joined in ascending order (see placement.slices).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rillflow.errors import PlacementError
from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Cuts, Interval, Slice, cuts, keys

Box = tuple[slice, ...]
"""An index of a tensor, a slice a dim."""


@lru_cache(maxsize=4096)
def intervals(placement: Placement, shape: tuple[int, ...], rank: int) -> tuple[tuple[Interval, ...], ...]:
    """What a rank holds, dim by dim."""
    at = keys(placement, rank, len(shape))
    return tuple(tuple(cut[key]) for cut, key in zip(_cuts(placement, shape), at, strict=True))


def local_shape(placement: Placement, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape of a rank's own tensor."""
    return tuple(sum(stop - start for start, stop in held) for held in intervals(placement, shape, rank))


def local_index(held: Sequence[Sequence[Interval]], box: Slice) -> Box:
    """Where a box is in the tensor of a rank that holds these intervals.

    Raises:
        PlacementError: the box is not within one interval of every dim.
    """
    return tuple(_place(found, bounds) for found, bounds in zip(held, box.bounds, strict=True))


def _place(held: Sequence[Interval], bounds: Interval) -> slice:
    before = 0
    for start, stop in held:
        if start <= bounds[0] and bounds[1] <= stop:
            first = before + bounds[0] - start
            return slice(first, first + bounds[1] - bounds[0])
        before += stop - start
    raise PlacementError(
        f"a rank is asked for {bounds[0]}:{bounds[1]}", why=f"it holds {list(held) or 'nothing'}"
    )


@lru_cache(maxsize=1024)
def _cuts(placement: Placement, shape: tuple[int, ...]) -> list[Cuts]:
    return cuts(placement, shape)
