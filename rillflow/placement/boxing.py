"""Boxing: the moves that turn one placement into another, with the fewest bytes received.

    source       {"tp": Split(0)}       0 0 0 1 1 1          each cell, with its holders
    destination  {"tp": Split(1)}  x    0 0 1 1 2 2   ──>    before and afterwards, is
                                                             solved on its own

    cell ─> holders before and after ─┬─ one contribution ──> copies                       stage 1
                                      └─ several ─ owners ──> contributions, summed        stage 1
                                                     └──────> copies of the result         stage 2

A cell is a box of the value that no cut of either placement crosses: every rank holds all of it or nothing.
Its holders are grouped by contribution: the ranks of one contribution hold copies of the same numbers, and
the value is the sum of all contributions.

- Data that a destination rank already holds stays there; other copies share the load of sending evenly.
- Contributions are summed once, at an owner that must hold the result: a rank with a contribution of its own,
  if there is one. All such ranks divide a cell among them, so that Partial to Broadcast is a reduce-scatter
  and an all-gather.
- A partial destination receives every contribution at one coordinate, where it costs least; the others
  hold zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Coordinates, Cuts, Interval, Slice, cuts, keys

Copies = tuple[int, ...]
"""Ranks that hold the same contribution."""
Holders = tuple[Copies, ...]
"""Holders of every contribution; a single one if nothing is partial."""


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
    adds: bool = False
    """Whether it is added to other moves with this destination and slice; otherwise it is the value."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A slice of zeros on a destination rank, because another coordinate holds the value."""

    rank: int
    """The rank that holds the slice."""
    slice: Slice
    """The slice."""


@dataclass(frozen=True, kw_only=True)
class Boxing:
    """The moves from one placement to another.

    Every slice on a destination rank is covered once: by a kept, moved or filled slice without adding, or by
    one set of contributions of the first stage with the same destination and slice.
    """

    stages: tuple[tuple[Move, ...], ...]
    """Moves between ranks: the first stage sends slices of the source, the second one their sums.

    Contributions are added in their order here, after the kept one.
    """
    kept: tuple[Move, ...]
    """Slices that a destination rank already holds, possibly a contribution of its own."""
    fills: tuple[Fill, ...]
    """Zeros of a partial destination where another coordinate holds the value."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """Moves between ranks, of all stages."""
        return tuple(chain.from_iterable(self.stages))

    def bytes(self, itemsize: int) -> int:
        """Return the bytes received by all ranks together, for elements of ``itemsize`` bytes."""
        return itemsize * sum(self._received.values())

    def received(self, rank: int, itemsize: int) -> int:
        """Return the bytes that a rank receives, for elements of ``itemsize`` bytes."""
        return itemsize * self._received.get(rank, 0)

    @cached_property
    def _received(self) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for move in self.moves:
            found[move.destination] += move.slice.size
        return dict(found)


def boxing(source: Placement, destination: Placement, shape: Sequence[int]) -> Boxing:
    """Return the moves that give every rank of ``destination`` its slices of a value of this shape.

    Raises:
        PlacementError: a placement does not fit the shape.
    """
    moves = _Moves()
    for cell in cells(source, destination, shape):
        if destination.partial:
            _bring_partial(moves, cell)
        else:
            moves.bring(cell.slice, cell.source, cell.destination[0])
    return moves.boxing()


def _bring_partial(moves: _Moves, cell: Cell) -> None:
    """Assign each contribution to the coordinate where it adds the least cost."""
    items: list[Holders] = [(copies,) for copies in cell.source]
    items.sort(key=lambda item: min(_cost(item, ranks) for ranks in cell.destination))
    taken: list[Holders] = [() for _ in cell.destination]
    costs = [0 for _ in cell.destination]
    for item in items:
        found = [_cost(held + item, ranks) for held, ranks in zip(taken, cell.destination, strict=True)]
        best = min(
            range(len(taken)),
            key=lambda place: (
                found[place] - costs[place],
                len(taken[place]),
                moves.received[cell.destination[place][0]],
            ),
        )
        taken[best] += item
        costs[best] = found[best]
    for held, ranks in zip(taken, cell.destination, strict=True):
        if held:
            moves.bring(cell.slice, held, ranks)
        else:
            moves.fills += [Fill(rank=rank, slice=cell.slice) for rank in ranks]


def _cost(source: Holders, ranks: Copies) -> int:
    """Return the copies of a cell received until all of ``ranks`` hold the sum of the contributions."""
    if len(source) == 1:
        return len(set(ranks).difference(source[0]))
    owned = not set(ranks).isdisjoint(chain.from_iterable(source))
    return len(source) - owned + len(ranks) - 1


class _Moves:
    """The moves found so far, and the load of the ranks."""

    def __init__(self) -> None:
        self.first: list[Move] = []
        self.second: list[Move] = []
        self.kept: list[Move] = []
        self.fills: list[Fill] = []
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)

    def boxing(self) -> Boxing:
        stages = (self.first, self.second)
        return Boxing(
            stages=tuple(tuple(stage) for stage in stages if stage),
            kept=tuple(self.kept),
            fills=tuple(self.fills),
        )

    def bring(self, piece: Slice, source: Holders, ranks: Copies) -> None:
        """Give all of ``ranks`` the sum of these contributions."""
        if len(source) == 1:
            self._keep_or_send(source[0], dict.fromkeys(ranks, piece))
            return
        holding = set(chain.from_iterable(source))
        owners = [rank for rank in ranks if rank in holding] or ranks
        owned = dict(zip(owners, piece.pieces(len(owners)), strict=False))
        for copies in source:
            self._keep_or_send(copies, owned, adds=True)
        for owner, part in owned.items():
            self.second += [self._move(owner, rank, part) for rank in ranks if rank != owner]

    def _keep_or_send(self, copies: Copies, wanted: dict[int, Slice], *, adds: bool = False) -> None:
        """Give every rank its slice of a contribution."""
        away = [rank for rank in wanted if rank not in copies]
        for rank, sender in zip(away, self._senders(copies, len(away)), strict=True):
            self.first.append(self._move(sender, rank, wanted[rank], adds))
        if len(away) < len(wanted):
            self.kept += [
                Move(source=rank, destination=rank, slice=wanted[rank], adds=adds)
                for rank in wanted
                if rank in copies
            ]

    def _senders(self, copies: Copies, count: int) -> Sequence[int]:
        """Return ``count`` senders among the copies, each equally often, equal ones adjacent.

        Copies that have sent least get the remainder. As ranks are in the order of their mesh, most receive
        from a copy in their own replica.
        """
        if len(copies) == 1:
            return copies * count
        each, left = divmod(count, len(copies))
        once_more = sorted(copies, key=self.sent.__getitem__)[:left]
        return [rank for rank in copies for _ in range(each + (rank in once_more))]

    def _move(self, source: int, destination: int, piece: Slice, adds: bool = False) -> Move:
        self.sent[source] += piece.size
        self.received[destination] += piece.size
        return Move(source=source, destination=destination, slice=piece, adds=adds)


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
