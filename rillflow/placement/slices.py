"""Slices: the part of a value that each rank holds.

    length 10, {"dp": Split(0), "tp": Split(0)}, dp 2, tp 2

        dp 0 [0:5]           dp 1 [5:10]             every axis splits the pieces of the one before it
        tp 0 [0:3]  [3:5]    [5:8]  [8:10]

Dims are split independently, so a rank holds the product of its intervals of every dim. Its own tensor is
the concatenation of these intervals, dim by dim, in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import prod

from rillflow.errors import PlacementError
from rillflow.placement.sbp import Placement, Split

Interval = tuple[int, int]
"""Start, and stop (excluded)."""
Coordinates = tuple[int, ...]
Cuts = dict[Coordinates, list[Interval]]
"""Ascending, non-empty intervals of one dim, by coordinates of the axes that split the dim."""


@dataclass(frozen=True)
class Slice:
    """A box of a value.

    Example:
        Slice(((0, 4), (2, 8))).size == 24
    """

    bounds: tuple[Interval, ...]
    """Start and stop (excluded) in every dim; empty for a scalar."""

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod([max(stop - start, 0) for start, stop in self.bounds])

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dim."""
        return tuple([stop - start for start, stop in self.bounds])

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return self.size == 0

    def intersection(self, other: Slice) -> Slice:
        """Return the box of common elements; it may be empty.

        Raises:
            PlacementError: they have different numbers of dims.
        """
        if len(self.bounds) != len(other.bounds):
            raise PlacementError(
                f"{self} and {other} have no intersection", why="they have different numbers of dims"
            )
        pairs = zip(self.bounds, other.bounds, strict=True)
        return Slice(tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in pairs))

    def piece(self, place: int, count: int) -> Slice:
        """Return box ``place`` of ``count`` that divide this one as evenly as one cut allows; may be empty.

        The cut divides the first dim that is long enough, or else the longest.
        """
        if count == 1:
            return self
        lengths = self.shape
        longest = lengths.index(max(lengths))
        dim = next((dim for dim, length in enumerate(lengths) if length >= count), longest)
        start, length = self.bounds[dim][0], lengths[dim]
        first, last = (start + length * edge // count for edge in (place, place + 1))
        return Slice((*self.bounds[:dim], (first, last), *self.bounds[dim + 1 :]))

    def pieces(self, count: int) -> list[Slice]:
        """Return at most ``count`` boxes that divide this one, none empty; see ``piece``."""
        boxes = [self.piece(place, count) for place in range(count)] if self.bounds else [self]
        return [box for box in boxes if not box.is_empty]

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in self.bounds)}]"


def slices(placement: Placement, shape: Sequence[int]) -> dict[int, tuple[Slice, ...]]:
    """Return every rank's non-empty slices of a value; a rank has several only if runs are split.

    Raises:
        PlacementError: see ``cuts``.
    """
    by_dim = cuts(placement, shape)
    found = {}
    for rank in placement.mesh.ranks:
        at = keys(placement, rank, len(shape))
        found[rank] = tuple(map(Slice, product(*(cut[key] for cut, key in zip(by_dim, at, strict=True)))))
    return found


def keys(placement: Placement, rank: int, dims: int) -> tuple[Coordinates, ...]:
    """Return, for every dim, the rank's coordinates along the axes that split it."""
    at = placement.mesh.coordinates(rank)
    return tuple(tuple(at[name] for name in placement.splits(dim)) for dim in range(dims))


def cuts(placement: Placement, shape: Sequence[int]) -> list[Cuts]:
    """Return the intervals of each dim, by coordinates.

    Raises:
        PlacementError: a length is negative, the placement splits a dim that the shape lacks, or given sizes
            do not add up to the length they split.
    """
    for name in placement.order:
        part = placement.parts[name]
        if isinstance(part, Split) and part.dim >= len(shape):
            raise PlacementError(
                f"axis {name!r} splits dim {part.dim} of a value of shape {list(shape)}",
                why=f"the value has {len(shape)} dims, counted from 0",
            )
    if min(shape, default=0) < 0:
        raise PlacementError(f"a value has the shape {list(shape)}", why="a length is at least 0")
    return [_cut(placement, dim, length) for dim, length in enumerate(shape)]


def _cut(placement: Placement, dim: int, length: int) -> Cuts:
    held: Cuts = {(): [(0, length)] if length else []}
    for name, split in placement.splits(dim).items():
        count = placement.mesh.axis(name).size
        held = {
            (*at, coordinate): piece
            for at, intervals in held.items()
            for coordinate, piece in enumerate(_dealt(intervals, split, count, name))
        }
    return held


def _dealt(intervals: list[Interval], split: Split, count: int, name: str) -> list[list[Interval]]:
    """Return the intervals of every coordinate of an axis."""
    length = _length(intervals)
    if split.sizes is not None:
        if sum(split.sizes) != length:
            raise PlacementError(
                f"the sizes {split.sizes} of axis {name!r} add up to {sum(split.sizes)}",
                why=f"dim {split.dim} has length {length}",
            )
        return _parted(intervals, split.sizes)
    runs = _parted(intervals, _chunks(length, split.runs))
    pieces = [_parted(run, _chunks(_length(run), count)) for run in runs]
    return [_merged(chain.from_iterable(run[place] for run in pieces)) for place in range(count)]


def _length(intervals: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _chunks(length: int, count: int) -> list[int]:
    """Return the lengths of torch.chunk's pieces, with 0 for omitted pieces."""
    size = -(-length // count)
    return [min(size, max(0, length - place * size)) for place in range(count)]


def _parted(intervals: Sequence[Interval], lengths: Sequence[int]) -> list[list[Interval]]:
    """Return the concatenated intervals, cut into pieces of these lengths."""
    rest = list(reversed(intervals))
    parts: list[list[Interval]] = []
    for wanted in lengths:
        parts.append([])
        while wanted:
            start, stop = rest.pop()
            taken = min(wanted, stop - start)
            parts[-1].append((start, start + taken))
            wanted -= taken
            if start + taken < stop:
                rest.append((start + taken, stop))
    return parts


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals with adjacent ones merged."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return found
