"""Resharding: executes a plan, bucket by bucket.

    source tensors ─ packed by receiver ─> all_to_all ─ unpacked by sender ─> destination tensors
                 └──────────────── slices that the rank keeps: copied ────────┘

Consumes: the slices a rank holds. Waits for: the ranks of the group, once per bucket, up to the deadline.
Unblocked by: the last of them. Produces: the slices it is to hold, and a count of the bytes moved. Shutdown:
after the last bucket the buffers are freed. A rank that dies or does not arrive makes the resharding fail on
all others, and they must discard the slices received so far.

Elements are cast to the plan's dtype before they are sent. If nothing moves, ranks do not synchronise.
Between pools without a common process group, ``pack`` and ``unpack`` give the same bytes for another
transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rillflow.errors import ClusterError, PlacementError, WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Slice, slices
from rillflow.sharding.layout import Box, Layout, Weights, intervals, local_index, local_shape
from rillflow.sharding.reshard_plan import MOST_BYTES, Portion, ReshardPlan, Way, reshard_plan
from rillflow.sharding.tensor import device_of, own
from rillflow.workers.collectives import ProcessRanks, Ranks, Stranded

DEADLINE_S = 600.0
"""Seconds that a rank waits for the others in one bucket."""


def pieces(
    tensor: Tensor, placement: Placement, shape: tuple[int, ...], rank: int
) -> Iterator[tuple[Tensor, Slice]]:
    """Yield the parts of a rank's own tensor of a weight, each with its box in the whole weight."""
    if rank in placement.mesh.ranks:
        held, mine = intervals(placement, shape, rank), own(tensor)
        for box in slices(placement, shape)[rank]:
            yield mine[local_index(held, box)], box


class Resharding:
    """Execution of a plan on one rank; every rank of the plan processes the same buckets in order.

    Args:
        plan: the plan; its ranks are those of the group.
        ranks: the group, with this rank.

    Raises:
        PlacementError: the plan has ranks outside the group.
        ClusterError: something has to move and the ranks are not processes of torch.distributed.
    """

    def __init__(self, plan: ReshardPlan, ranks: Ranks) -> None:
        if plan.ranks[-1] >= ranks.size:
            raise PlacementError(
                f"the plan moves weights between {len(plan.ranks)} ranks, up to rank {plan.ranks[-1]}",
                why=f"the pool has {ranks.size} ranks, counted from 0",
                fix="choose dp, pp and tp whose product is the size of the pool",
            )
        if plan.moves and not isinstance(ranks, ProcessRanks):
            raise ClusterError(
                "weights would move between ranks that are threads of one process",
                why="slices move only between processes of torch.distributed",
                fix='use placement.backend = "ray" or "process", or meshes that move no weight',
            )
        self.plan = plan
        self.rank = ranks.rank
        self.sent_bytes = 0
        """Bytes sent by this rank."""
        self.received_bytes = 0
        """Bytes received by this rank."""
        self.deadline_s = DEADLINE_S
        """Seconds that it waits for the others per bucket."""
        self._ranks = ranks
        self._buffers: dict[str, Tensor] = {}
        self._packed: dict[int, tuple[_Packed, _Packed]] = {}

    @property
    def buffer_bytes(self) -> int:
        """Present bytes of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()

    def pack(self, place: int, source: Mapping[str, Tensor]) -> None:
        """Copy the slices that other ranks get in a bucket to a buffer; then the source is not read again."""
        if self.plan.buckets[place].moves:
            packing = self._packed_of(place)[0]
            buffer = self._buffer("sent", packing, source)
            packing.load(buffer, source)

    def exchange(self, place: int, destination: Mapping[str, Tensor]) -> None:
        """Exchange a bucket with the other ranks, and copy the received slices to their places.

        Raises:
            ClusterError: a rank died or did not arrive in time.
        """
        if not self.plan.buckets[place].moves:
            return
        outgoing, incoming = self._packed_of(place)
        sent = self._buffer("sent", outgoing, {})
        received = self._buffer("received", incoming, destination)
        assert isinstance(self._ranks, ProcessRanks)  # other ranks were refused if the plan moves anything
        try:
            work = dist.all_to_all_single(
                received, sent, incoming.sizes, outgoing.sizes, group=self._ranks.group, async_op=True
            )
            assert work is not None  # this rank is in the group
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise self._stopped(place, error) from error
        self.sent_bytes += sum(outgoing.sizes)
        self.received_bytes += sum(incoming.sizes)
        incoming.unload(received, destination)

    def _packed_of(self, place: int) -> tuple[_Packed, _Packed]:
        """Return the packings that this rank sends and receives in a bucket, computed once."""
        if place not in self._packed:
            parts, peers = self.plan.buckets[place].parts, range(self._ranks.size)
            self._packed[place] = (
                _Packed.of(self.plan, "sent", self.rank, parts, peers),
                _Packed.of(self.plan, "received", self.rank, parts, peers),
            )
        return self._packed[place]

    def _buffer(self, use: str, packing: _Packed, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a buffer of the packing's size; its memory is reused for the next bucket."""
        size = sum(packing.sizes)
        if use not in self._buffers or self._buffers[use].numel() < size:
            self._buffers.pop(use, None)
            self._buffers[use] = torch.empty(size, dtype=torch.uint8, device=device_of(tensors))
        return self._buffers[use][:size]

    def _stopped(self, place: int, error: RuntimeError) -> Stranded:
        parts, crossing = self.plan.buckets[place].parts, self.plan.crossing
        crossed = [*crossing("sent", parts, self.rank), *crossing("received", parts, self.rank)]
        peers = sorted({each.peer for each in crossed})
        told = (str(error).splitlines() or [type(error).__name__])[0]
        return Stranded(
            f"rank {self.rank} stopped at bucket {place + 1} of {len(self.plan.buckets)} "
            f"({parts[0].name}) of a weight transfer with ranks {peers}",
            why=f"one of them died, or did not respond within {self.deadline_s:g} s: {told}",
            fix="restart the ranks from the last checkpoint; the weights that arrived are not used",
        )


def gathered(
    weights: Weights,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    to: Mapping[str, int],
    *,
    most_bytes: int = MOST_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight, complete, on the rank that ``to`` names, and nothing on the others.

    It serves to write a whole model to files: a rank needs memory for one bucket, or for the largest weight
    if that is larger. All ranks must iterate to the end. Weights of different pipeline stages alternate.

    Example:
        for name, tensor in gathered(weights, layout, tensors, ranks, to):  # every rank runs the loop
            keep(name, tensor)  # the one that it goes to enters it

    Args:
        weights: the weights, with the dtypes to yield.
        layout: their placements.
        tensors: this rank's tensors; they are only read.
        ranks: all ranks of the layout.
        to: the receiving rank, by weight.
        most_bytes: limit of a bucket's bytes.

    Raises:
        WeightError: a tensor is missing or of another shape.
        ClusterError: a rank died or did not arrive in time.
    """
    there = {name: Placement(Mesh.of(first=to[name], dp=1)) for name in weights}
    plan = replace(reshard_plan(weights, layout, there), most_bytes=most_bytes)
    require_shapes(tensors, plan, layout, ranks.rank)
    resharding = Resharding(plan, ranks)
    found, device = dict[str, Tensor](), device_of(tensors)
    for place, bucket in enumerate(plan.buckets):
        for part in bucket.parts:
            weight = weights[part.name]
            if ranks.rank == to[part.name] and part.name not in found:
                found[part.name] = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        resharding.pack(place, tensors)
        resharding.exchange(place, found)
        for part in bucket.parts:
            if part.is_last and ranks.rank == to[part.name]:
                keep(plan, part.name, ranks.rank, tensors, found)
                yield part.name, found.pop(part.name)
    resharding.close()


def pack(
    plan: ReshardPlan,
    rank: int,
    peer: int,
    source: Mapping[str, Tensor],
    parts: Sequence[Portion],
    *,
    way: Way = "sent",
) -> Tensor:
    """Return the bytes [N] that a rank sends to another for a bucket's portions; N is 0 if there are none.

    With ``way="received"``, return the same bytes from the tensors of the rank that has received them.
    """
    packing = _Packed.of(plan, way, rank, parts, (peer,))
    packed = torch.empty(sum(packing.sizes), dtype=torch.uint8, device=device_of(source))
    packing.load(packed, source)
    return packed


def unpack(
    plan: ReshardPlan,
    rank: int,
    source: int,
    packed: Tensor,
    destination: Mapping[str, Tensor],
    parts: Sequence[Portion],
) -> None:
    """Copy the bytes that another rank packed for this one, for a bucket's portions, to their places.

    Raises:
        WeightError: the number of bytes differs from the plan.
    """
    packing = _Packed.of(plan, "received", rank, parts, (source,))
    if packed.numel() != sum(packing.sizes):
        raise WeightError(
            f"rank {source} packed {packed.numel():,} bytes for rank {rank}",
            why=f"the plan has {sum(packing.sizes):,}",
            fix="make both ranks plan with the same weights and layouts",
        )
    packing.unload(packed, destination)


def keep(
    plan: ReshardPlan,
    name: str,
    rank: int,
    source: Mapping[str, Tensor],
    destination: Mapping[str, Tensor],
    *,
    back: bool = False,
) -> None:
    """Copy a rank's kept slices of a weight from source to destination, or ``back``.

    Nothing is copied if both are the same memory.
    """
    moves = plan.by_weight[name].of_rank.get((rank, "kept"), ())
    if not moves:
        return
    before, after = own(source[name]), own(destination[name])
    if before.data_ptr() == after.data_ptr():
        return
    shape = plan.weights[name].shape
    held, wanted = (intervals(layout[name], shape, rank) for layout in (plan.source, plan.destination))
    for move in moves:
        here, there = before[local_index(held, move.slice)], after[local_index(wanted, move.slice)]
        (here if back else there).copy_(there if back else here)


def require_shapes(tensors: Mapping[str, Tensor], plan: ReshardPlan, layout: Layout, rank: int) -> None:
    """Refuse tensors that differ from the layout's description of a rank.

    Raises:
        WeightError: a tensor is missing or has another shape; it names the weight.
    """
    for name, weight in plan.weights.items():
        if rank not in layout[name].mesh.ranks:
            continue
        wanted = local_shape(layout[name], weight.shape, rank)
        if name not in tensors and 0 not in wanted:
            raise WeightError(
                f"rank {rank} has no {name}", why=f"its layout gives it {list(wanted)} of the weight"
            )
        if name in tensors and tuple(own(tensors[name]).shape) != wanted:
            raise WeightError(
                f"rank {rank} holds {list(own(tensors[name]).shape)} of {name}",
                why=f"its layout gives it {list(wanted)} of {list(weight.shape)}",
            )


@dataclass(frozen=True, kw_only=True)
class _Box:
    """A box of the own tensor, and its place in a buffer."""

    name: str
    index: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """Boxes in a buffer of bytes, ordered by peer."""

    boxes: list[_Box]
    sizes: list[int]

    @staticmethod
    def of(plan: ReshardPlan, way: Way, rank: int, parts: Sequence[Portion], peers: Sequence[int]) -> _Packed:
        """Return the boxes of some portions that move between a rank and these peers, in ascending order."""
        layout = plan.source if way == "sent" else plan.destination
        boxes, sizes, start = list[_Box](), dict.fromkeys(peers, 0), 0
        crossed = (item for item in plan.crossing(way, parts, rank) if item.peer in sizes)
        for item in sorted(crossed, key=lambda item: item.peer):
            weight = plan.weights[item.name]
            stop = start + item.slice.size * weight.dtype.itemsize
            boxes.append(
                _Box(
                    name=item.name,
                    index=local_index(intervals(layout[item.name], weight.shape, rank), item.slice),
                    shape=item.slice.shape,
                    dtype=weight.dtype,
                    start=start,
                    stop=stop,
                )
            )
            sizes[item.peer] += stop - start
            start = stop
        return _Packed(boxes=boxes, sizes=list(sizes.values()))

    def load(self, buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for box in self.boxes:
            box.within(buffer).copy_(own(tensors[box.name])[box.index])

    def unload(self, buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for box in self.boxes:
            own(tensors[box.name])[box.index].copy_(box.within(buffer))
