"""Plan: the slices that move between ranks, in buckets, and their costs.

    weights, source layout, destination layout
        │ boxing, once for all weights with equal shape and placements
        v
    ReshardPlan ── received, sent, kept, redundant, peak: bytes of a rank
        │ buckets
        v
    Bucket: portions of weights whose moves together stay within a limit on every rank

Pure: nothing is allocated. Every rank computes the whole plan, so all agree on the buckets without
communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from rillflow.errors import PlacementError, nearest
from rillflow.placement.boxing import Boxing, Move, boxing
from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Slice, slices
from rillflow.sharding.layout import Layout, Weights

Way = Literal["sent", "received"]
"""Direction of a move, from one rank's view."""
_Kind = tuple[torch.dtype, bool]
"""Properties shared by the portions of a bucket: dtype, and whether anything moves between ranks."""
MOST_BYTES = 64 * 2**20
"""Default limit of a bucket's bytes per rank."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Some of a weight's moves: all of them, or a piece of each if they are too large."""

    name: str
    """Name of the weight."""
    piece: int = 0
    """Index of the piece, for every move."""
    pieces: int = 1
    """Number of pieces."""

    @property
    def is_last(self) -> bool:
        """Whether this portion completes the weight."""
        return self.piece == self.pieces - 1


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Portions that move together."""

    dtype: torch.dtype
    """Dtype of all its weights."""
    parts: tuple[Portion, ...]
    """Its portions; data between two ranks is in this order."""
    moves: bool
    """Whether anything moves between ranks; if not, ranks only copy kept slices and need not synchronise."""


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """A box of a weight that is sent or received."""

    name: str
    """Name of the weight."""
    slice: Slice
    """The box's elements."""
    peer: int
    """The rank that receives or sends it."""


@dataclass(frozen=True, kw_only=True)
class WeightMoves:
    """The moves of a weight, for every rank; shared by all weights with equal shape and placements."""

    boxing: Boxing
    """The moves."""
    held: Mapping[int, int]
    """Elements that each rank has before."""
    wanted: Mapping[int, int]
    """Elements that each rank has afterwards."""

    @cached_property
    def of_rank(self) -> dict[tuple[int, Way | Literal["kept"]], list[Move]]:
        """Moves by rank and kind: sent, received, or kept on the same rank."""
        found: dict[tuple[int, Way | Literal["kept"]], list[Move]] = defaultdict(list)
        for move in self.boxing.moves:
            found[move.source, "sent"].append(move)
            found[move.destination, "received"].append(move)
        for move in self.boxing.kept:
            found[move.source, "kept"].append(move)
        return dict(found)

    @cached_property
    def loads(self) -> dict[tuple[int, Way | Literal["kept"]], int]:
        """Elements that a rank sends, receives and keeps."""
        return {key: sum(move.slice.size for move in moves) for key, moves in self.of_rank.items()}

    @cached_property
    def load(self) -> int:
        """Most elements that one rank sends, receives or keeps."""
        return max(self.loads.values(), default=0)

    @cached_property
    def longest(self) -> int:
        """Longest side of a moving box, which limits the number of pieces."""
        return max((length for move in self.boxing.moves for length in move.slice.shape), default=1)


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """The moves of weights from one layout to another.

    Example:
        plan = reshard_plan(weights, training, generation)
        plan.received(0), plan.redundant(0), plan.peak(0)
    """

    weights: Weights
    """The weights, with the dtype in which they are sent."""
    source: Layout
    """Layout before."""
    destination: Layout
    """Layout afterwards."""
    by_weight: Mapping[str, WeightMoves]
    """Moves by weight; one object for all weights with equal shape and placements."""
    most_bytes: int = MOST_BYTES
    """Limit of a bucket's bytes per rank."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of either layout."""
        layouts = (self.source, self.destination)
        meshes = {id(place.mesh): place.mesh for layout in layouts for place in layout.values()}
        return tuple(sorted({rank for mesh in meshes.values() for rank in mesh.ranks}))

    @property
    def moves(self) -> bool:
        """Whether anything moves between ranks."""
        return any(moves.boxing.moves for moves in self.by_weight.values())

    def received(self, rank: int) -> int:
        """Return the bytes that a rank receives."""
        return self._bytes(lambda moves: moves.loads.get((rank, "received"), 0))

    def sent(self, rank: int) -> int:
        """Return the bytes that a rank sends."""
        return self._bytes(lambda moves: moves.loads.get((rank, "sent"), 0))

    def kept(self, rank: int) -> int:
        """Return the bytes of the destination that a rank already has."""
        return self._bytes(lambda moves: moves.loads.get((rank, "kept"), 0))

    def held(self, rank: int) -> int:
        """Return the bytes of the source on a rank."""
        return self._bytes(lambda moves: moves.held.get(rank, 0))

    def wanted(self, rank: int) -> int:
        """Return the bytes of the destination on a rank."""
        return self._bytes(lambda moves: moves.wanted.get(rank, 0))

    def redundant(self, rank: int) -> int:
        """Return the bytes of the source outside the rank's destination: extra memory if they stay."""
        return self.held(rank) - self.kept(rank)

    def peak(self, rank: int) -> int:
        """Return the bytes of both layouts together, counting common slices once."""
        return self.wanted(rank) + self.redundant(rank)

    def is_within(self, name: str, rank: int) -> bool:
        """Return whether a rank's source slices of a weight are all within its destination slices."""
        moves = self.by_weight[name]
        return moves.held.get(rank, 0) == moves.loads.get((rank, "kept"), 0)

    def is_same(self, name: str, rank: int) -> bool:
        """Return whether a rank's source and destination slices of a weight are equal."""
        moves = self.by_weight[name]
        return self.is_within(name, rank) and moves.wanted.get(rank, 0) == moves.held.get(rank, 0)

    def crossing(self, way: Way, parts: Iterable[Portion], rank: int) -> Iterator[Crossed]:
        """Yield the boxes that a rank sends, or receives, for some portions."""
        for part in parts:
            for move in self.by_weight[part.name].of_rank.get((rank, way), ()):
                box = move.slice.piece(part.piece, part.pieces)
                peer = move.destination if way == "sent" else move.source
                if not box.is_empty:
                    yield Crossed(name=part.name, slice=box, peer=peer)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All weights in buckets with at most ``most_bytes`` sent, received or kept per rank.

        Larger weights are cut along one dim. Weights of different ranks alternate, so that the ranks of all
        pipeline stages send at the same time.

        Raises:
            PlacementError: ``most_bytes`` is not positive.
        """
        if self.most_bytes < 1:
            raise PlacementError(f"a bucket has {self.most_bytes} bytes", why="it must have at least one")
        found: list[Bucket] = []
        parts: dict[_Kind, list[Portion]] = defaultdict(list)
        loads: dict[_Kind, dict[tuple[int, str], int]] = defaultdict(lambda: defaultdict(int))
        for name in self._in_turn():
            moves, dtype = self.by_weight[name], self.weights[name].dtype
            kind = (dtype, bool(moves.boxing.moves))
            most = self.most_bytes // dtype.itemsize
            pieces = min(-(-moves.load // max(most, 1)), moves.longest) if kind[1] else 1
            each = {key: load // pieces for key, load in moves.loads.items()}
            for piece in range(pieces):
                if parts[kind] and any(loads[kind][key] + load > most for key, load in each.items()):
                    found.append(Bucket(dtype=dtype, parts=tuple(parts.pop(kind)), moves=kind[1]))
                    del loads[kind]
                parts[kind].append(Portion(name=name, piece=piece, pieces=pieces))
                for key, load in each.items():
                    loads[kind][key] += load
        rest = (Bucket(dtype=kind[0], parts=tuple(last), moves=kind[1]) for kind, last in parts.items())
        return (*found, *rest)

    def _in_turn(self) -> list[str]:
        """Return the weights of the same ranks in their order, interleaved with those of other ranks."""
        alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self.weights:
            alike[self.source[name].mesh.ranks].append(name)
        turns = {
            name: (place / len(names), queue)
            for queue, names in enumerate(alike.values())
            for place, name in enumerate(names)
        }
        return sorted(self.weights, key=turns.__getitem__)

    def _bytes(self, count: Callable[[WeightMoves], int]) -> int:
        return sum(
            count(self.by_weight[name]) * weight.dtype.itemsize for name, weight in self.weights.items()
        )


def reshard_plan(weights: Weights, source: Layout, destination: Layout) -> ReshardPlan:
    """Return the moves that bring every weight from its source to its destination placement.

    Args:
        weights: the weights, with the dtype at the destination.
        source: placement of each before.
        destination: placement of each afterwards, on the same ranks or on others.

    Raises:
        PlacementError: a layout lacks a weight or does not fit its shape, or a weight is Partial.
    """
    made: dict[tuple[tuple[int, ...], Placement, Placement], WeightMoves] = {}
    by_weight = {}
    for name, weight in weights.items():
        before, after = _of(source, name, "source"), _of(destination, name, "destination")
        key = (weight.shape, before, after)
        if key not in made:
            made[key] = WeightMoves(
                boxing=boxing(before, after, weight.shape),
                held=_sizes(before, weight.shape),
                wanted=_sizes(after, weight.shape),
            )
        by_weight[name] = made[key]
    return ReshardPlan(weights=weights, source=source, destination=destination, by_weight=by_weight)


def _of(layout: Layout, name: str, side: str) -> Placement:
    if name not in layout:
        raise PlacementError(
            f"the {side} layout has no placement for {name}",
            why="every weight must be transferred",
            fix=nearest(name, layout),
        )
    if layout[name].partial:
        raise PlacementError(
            f"{name} is Partial in the {side} layout", why="a weight is replicated or split, never a sum"
        )
    return layout[name]


def _sizes(placement: Placement, shape: tuple[int, ...]) -> dict[int, int]:
    return {rank: sum(box.size for box in held) for rank, held in slices(placement, shape).items()}
