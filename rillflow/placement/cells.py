"""Cells: the boxes of a value that no cut of either placement goes through.

    source       {"tp": Split(0)}       0 0 0 1 1 1          one cell, and who holds it
    destination  {"tp": Split(1)}  x    0 0 1 1 2 2   ──>    before and who has to hold it
                                                             afterwards, is one problem

Within a cell every rank holds all or nothing. Its holders are told apart by contribution: the ranks of one
contribution hold copies of the same numbers, and the value is all contributions combined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Coordinates, Cuts, Interval, Slice, cuts, keys

Copies = tuple[int, ...]
"""The ranks that hold the same contribution."""
Holders = tuple[Copies, ...]
"""Every contribution; one only where nothing is partial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A box of a value, before and afterwards."""

    slice: Slice
    """The box."""
    source: Holders
    """Who holds it."""
    destination: Holders
    """Who is to hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """A run of one dim that neither placement cuts."""

    interval: Interval
    source: Coordinates
    destination: Coordinates


def cells(source: Placement, destination: Placement, shape: Sequence[int]) -> Iterator[Cell]:
    """The cells of a value of this shape; none is empty, and together they are the value.

    Raises:
        PlacementError: a placement does not fit the shape.
    """
    by_dim = zip(cuts(source, shape), cuts(destination, shape), strict=True)
    grid = [_segments(before, after) for before, after in by_dim]
    held, wanted = _holders(source, len(shape)), _holders(destination, len(shape))
    for segments in product(*grid):
        yield Cell(
            slice=Slice(tuple([segment.interval for segment in segments])),
            source=held[tuple([segment.source for segment in segments])],
            destination=wanted[tuple([segment.destination for segment in segments])],
        )


def _holders(placement: Placement, dims: int) -> dict[tuple[Coordinates, ...], Holders]:
    """Who holds the box that lies at these coordinates of the axes that cut, dim by dim."""
    found: dict[tuple[Coordinates, ...], dict[Coordinates, list[int]]] = {}
    for rank in placement.mesh.ranks:
        at = placement.mesh.coordinates(rank)
        contribution = tuple(at[name] for name in placement.partial)
        found.setdefault(keys(placement, rank, dims), {}).setdefault(contribution, []).append(rank)
    return {key: tuple(map(tuple, copies.values())) for key, copies in found.items()}


def _segments(source: Cuts, destination: Cuts) -> list[_Segment]:
    before, after = _ascending(source), _ascending(destination)
    found, left, right = [], 0, 0
    while left < len(before) and right < len(after):
        (a, b), at = before[left]
        (c, d), to = after[right]
        found.append(_Segment(interval=(max(a, c), min(b, d)), source=at, destination=to))
        left, right = left + (b <= d), right + (d <= b)
    return found


def _ascending(cut: Cuts) -> list[tuple[Interval, Coordinates]]:
    return sorted((interval, at) for at, intervals in cut.items() for interval in intervals)
