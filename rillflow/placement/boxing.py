"""Boxing: the moves that turn one placement into another, with the fewest bytes received.

    source       {"tp": Split(0)}       0 0 0 1 1 1          each cell, with its holders
    destination  {"tp": Split(1)}  x    0 0 1 1 2 2   ──>    before and afterwards, is      ──> kept, moves
                                                             solved on its own

A cell is a box of the value that no cut of either placement crosses: every rank holds all of it or nothing.
Data that a destination rank already holds stays there. Every other destination rank receives one copy, and
the holders share the load of sending evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Coordinates, Cuts, Interval, Slice, cuts, keys

Holders = tuple[int, ...]
"""Ranks that hold a cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A box of a value, with its holders before and afterwards."""

    slice: Slice
    """The box."""
    source: Holders
    """Holders in the source placement."""
    destination: Holders
    """Holders in the destination placement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """A part of one dim that neither placement cuts."""

    interval: Interval
    source: Coordinates
    destination: Coordinates


@dataclass(frozen=True, kw_only=True)
class Move:
    """A slice that is sent from one rank to another, or stays."""

    source: int
    """The sending rank."""
    destination: int
    """The receiving rank; the sender itself for a kept slice."""
    slice: Slice
    """The slice, in coordinates of the whole value."""


@dataclass(frozen=True, kw_only=True)
class Boxing:
    """The moves from one placement to another; they cover every element of a destination rank once."""

    moves: tuple[Move, ...]
    """Moves between ranks."""
    kept: tuple[Move, ...]
    """Slices that a destination rank already holds."""


def boxing(source: Placement, destination: Placement, shape: Sequence[int]) -> Boxing:
    """Return the moves that give every rank of ``destination`` its slices of a value of this shape.

    Raises:
        PlacementError: a placement does not fit the shape.
    """
    moves, kept = list[Move](), list[Move]()
    sent: dict[int, int] = defaultdict(int)
    for cell in cells(source, destination, shape):
        away = [rank for rank in cell.destination if rank not in cell.source]
        for rank, sender in zip(away, _senders(cell.source, len(away), sent), strict=True):
            moves.append(Move(source=sender, destination=rank, slice=cell.slice))
            sent[sender] += cell.slice.size
        if len(away) < len(cell.destination):
            kept += [
                Move(source=rank, destination=rank, slice=cell.slice)
                for rank in cell.destination
                if rank in cell.source
            ]
    return Boxing(moves=tuple(moves), kept=tuple(kept))


def _senders(holders: Holders, count: int, sent: dict[int, int]) -> Sequence[int]:
    """Return ``count`` senders among the holders, each equally often, equal ones adjacent.

    Holders that have ``sent`` least get the remainder. As ranks are in the order of their mesh, most receive
    from a holder in their own replica.
    """
    if len(holders) == 1:
        return holders * count
    each, left = divmod(count, len(holders))
    once_more = sorted(holders, key=sent.__getitem__)[:left]
    return [rank for rank in holders for _ in range(each + (rank in once_more))]


def cells(source: Placement, destination: Placement, shape: Sequence[int]) -> Iterator[Cell]:
    """Yield the cells of a value of this shape; none is empty, and together they are the value.

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
    """Return the holders of each box, by its coordinates along the splitting axes, dim by dim."""
    found: dict[tuple[Coordinates, ...], list[int]] = defaultdict(list)
    for rank in placement.mesh.ranks:
        found[keys(placement, rank, dims)].append(rank)
    return {key: tuple(ranks) for key, ranks in found.items()}


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
    return sorted((interval, at) for at, interval in cut.items() if interval[0] < interval[1])
