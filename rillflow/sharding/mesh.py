"""Mesh: one rank's groups along every axis of a training mesh, and the sums of gradients over them.

    dp 2, pp 2, tp 2      stage 0   tp 0 1     dp 0: ranks 0 1
                          stage 1   tp 0 1           ranks 2 3     (dp 1: 4 5, 6 7)

    groups of rank 3:  dp 3 7    pp 1 3    tp 2 3    ends (first and last stage) 1 3

    dp 4, of which fsdp 2      dp 0 1 2 3    fsdp 0 1, 2 3    copies 0 2, 1 3

The rank with ``speaks`` reports its replica's results and metrics.

``Gradients`` sums over the ranks after the backward passes, and computes the global norm:

    replicated over dp          sum over dp (sharded ones were reduce-scattered in the backward pass)
    experts, sharded over ep    sum over the dp ranks with the same experts
    tied, on first and last     sum over the two stages
    SUMMED over tp              sum over tp: every rank has its own heads' part
    replicated over tp          tp rank 0's, for all: equal except for rounding, and copies must not diverge

Sums are added in the order of ranks, so copies of a weight stay bitwise equal. In the norm every logical
element counts once: on the first rank with a copy of it.

If every rank has the whole module, sums over dp start during the last backward pass:

    backward pass   weight n ─ n-1 ─ n-2 ─ n-3 ─ ... ─ 0     a gradient is complete: a hook
    groups               └──────┴─> 0        └─────> 1       fixed: the last weights first, 16 MiB at most
    collectives              exchange ─ gather ─ exchange ─ gather ─ ...    one at a time, so on all ranks

    the hooks      consume gradients; wait for nothing; continue the sums if the collective is done;
                   produce sums of whole groups
    ``finish``     consumes the rest; waits for each collective; unblocked by the other ranks or by the
                   deadline of their group, which raises; produces all sums

There is no thread: the sums are one iterator over collectives, advanced by the hooks and ``finish``. So all
ranks run the same collectives in the same order, however many passes each has. A rank without a pass, or
with a non-finite number, runs all of them in ``finish``. After any other error the iterator is dropped, and
the other ranks wait in a collective until its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh, divisors, require_whole_beside_experts
from rillflow.sharding.codec import CodedSum
from rillflow.workers.collectives import ProcessRanks, Ranks, SingleRank

AXES = ("dp", "pp", "tp")
"""The axes of a training mesh, the slowest-varying first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGroups:
    """The groups of one rank.

    Example:
        rank_groups(Mesh.of(dp=2, pp=1, tp=2), ranks).tp.size == 2

    Raises:
        PlacementError: ep is above 1 together with fsdp, pp or tp.
    """

    mesh: Mesh
    """All ranks of the pool by dp, pp and tp."""
    everyone: Ranks
    """All ranks."""
    dp: Ranks
    """Ranks with the same weights, or other shards of them, and other rows."""
    fsdp: Ranks
    """Ranks of dp with the other shards of one copy; this rank alone if it has all of it."""
    copies: Ranks
    """Ranks of dp with the same shards."""
    ep: Ranks
    """Ranks of dp with the other experts of one copy; this rank alone if it has all of them."""
    twins: Ranks
    """Ranks of dp with the same experts."""
    pp: Ranks
    """Ranks with the other stages of the same replica."""
    tp: Ranks
    """Ranks with the other parts of the same layers."""
    ends: Ranks
    """The first and the last stage, on these two; this rank alone on stages between."""
    _made: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)
    """Torch's device meshes by kind of device, created on request."""

    def __post_init__(self) -> None:
        sizes = {"ep": self.ep.size, "fsdp": self.fsdp.size, "pp": self.pp.size, "tp": self.tp.size}
        mesh = " x ".join(f"{axis} {size}" for axis, size in {"dp": self.dp.size, **sizes}.items())
        require_whole_beside_experts(f"a training mesh is {mesh}", **sizes)

    @staticmethod
    def whole(ranks: Ranks) -> RankGroups:
        """Return the groups of a rank with the whole module, among others with it and other rows."""
        mesh, alone = Mesh.of(dp=ranks.size, pp=1, tp=1), SingleRank()
        return RankGroups(
            mesh=mesh,
            everyone=ranks,
            dp=ranks,
            fsdp=alone,
            copies=ranks,
            ep=alone,
            twins=ranks,
            pp=alone,
            tp=alone,
            ends=alone,
        )

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole model."""
        return self.pp.size == self.tp.size == self.fsdp.size == self.ep.size == 1

    @property
    def is_descending(self) -> bool:
        """Whether the first stage is on the last rank of ``pp``; see ``Mesh.turned``."""
        pipeline = self.mesh.groups("pp")[0]
        return pipeline[0] > pipeline[-1]

    @property
    def stage(self) -> int:
        """Index of the pipeline stage, from 0."""
        return self.pp.size - 1 - self.pp.rank if self.is_descending else self.pp.rank

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which receives tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which has logits, scores and losses."""
        return self.stage == self.pp.size - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank reports for its replica: the first rank of the last stage."""
        return self.last and self.tp.rank == 0

    def device_mesh(self, kind: str, *axes: str) -> DeviceMesh:
        """Return axes of the mesh as torch's DeviceMesh; axes of one rank are omitted.

        Args:
            kind: kind of the devices: ``cpu`` or ``cuda``.
            axes: some of copies, fsdp, pp and tp, in this order; at least one has several ranks.

        Raises:
            PlacementError: the ranks are not processes.
        """
        if kind not in self._made:
            self._made[kind] = self._device_mesh(kind)
        there = tuple(axis for axis in axes if axis in (self._made[kind].mesh_dim_names or ()))
        return self._made[kind][there]

    def _device_mesh(self, kind: str) -> DeviceMesh:
        axes = {"copies": self.copies, "fsdp": self.fsdp, "pp": self.pp, "tp": self.tp}
        there = {name: ranks for name, ranks in axes.items() if ranks.size > 1}
        members = require_processes(self.everyone).members
        ids = torch.tensor([members[rank] for rank in self.mesh.ranks])
        groups = [require_processes(ranks).group for ranks in there.values()]
        shape = [ranks.size for ranks in there.values()]
        return DeviceMesh.from_group(groups, kind, ids.view(shape), mesh_dim_names=tuple(there))


def rank_groups(mesh: Mesh, ranks: Ranks, fsdp: int = 1, ep: int = 1) -> RankGroups:
    """Return this rank's groups; every rank calls it with the same mesh.

    Args:
        mesh: dp, pp and tp, in this order, over ranks 0, 1, ...
        ranks: all ranks.
        fsdp: number of consecutive dp ranks that share one copy of the parameters.
        ep: number of consecutive dp ranks that share one copy of the experts.

    Raises:
        PlacementError: the mesh has other axes, or another size than the ranks; fsdp or ep does
            not divide dp; ep is above 1 together with fsdp, pp or tp.
    """
    if mesh.names != AXES:
        raise PlacementError(
            f"the training mesh has the axes {', '.join(mesh.names) or 'none'}",
            why=f"they must be {', '.join(AXES)}, in this order; an unused axis has size 1",
        )
    if mesh.size != ranks.size or sorted(mesh.ranks) != list(range(ranks.size)):
        sizes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
        raise PlacementError(
            f"the mesh {sizes} does not fit {ranks.size} ranks",
            why=f"it has {mesh.size} places, and every rank needs exactly one",
            fix=f"choose dp, pp and tp whose product is {ranks.size}",
        )
    stages, rows = mesh.groups("pp"), mesh.groups("dp")
    alike, cut = _cut(rows, "fsdp", fsdp)
    twins, apart = _cut(rows, "ep", ep)
    between = [[rank] for group in stages for rank in group[1:-1]]
    ends = [sorted({group[0], group[-1]}) for group in stages]
    return RankGroups(
        mesh=mesh,
        everyone=ranks,
        dp=ranks.part(rows),
        fsdp=ranks.part(cut),
        copies=ranks.part(alike),
        ep=ranks.part(apart),
        twins=ranks.part(twins),
        pp=ranks.part(stages),
        tp=ranks.part(mesh.groups("tp")),
        ends=ranks.part([*ends, *between]),
    )


def _cut(
    rows: Sequence[Sequence[int]], axis: str, size: int
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Return the dp groups of ranks with the same shard, and those of ranks that share one copy."""
    if len(rows[0]) % size:
        raise PlacementError(
            f"{axis} is {size} and dp is {len(rows[0])}",
            why=f"{axis} must divide dp; {len(rows[0])} / {size} leaves {len(rows[0]) % size}",
            fix=f"choose {axis} among {', '.join(map(str, divisors(len(rows[0]))))}",
        )
    alike = [group[first::size] for group in rows for first in range(size)]
    return alike, [group[first : first + size] for group in rows for first in range(0, len(group), size)]


def require_processes(ranks: Ranks) -> ProcessRanks:
    """Return the ranks if they are processes of torch.distributed.

    Raises:
        PlacementError: they are threads of one process.
    """
    if not isinstance(ranks, ProcessRanks):
        raise PlacementError(
            "pp, tp, ep or fsdp is above 1, and the ranks are threads of one process",
            why="such a mesh exchanges weights and activations between processes",
            fix='run it with backend = "ray" or "process", or leave pp, tp, ep and fsdp at 1',
        )
    return ranks


GROUP_BYTES = 2**24
"""Maximum bytes of gradients summed together: small enough to start early, large enough to use bandwidth."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """Sums of the gradients of one rank's parameters over ranks, by the parameters' names."""

    groups: RankGroups
    """The rank's groups."""
    experts: frozenset[str] = frozenset()
    """Parameters of experts sharded over ep; their gradients already cover the tokens of all ep ranks."""
    summed: frozenset[str] = frozenset()
    """Parameters whose gradients lack the other tp ranks' parts."""
    whole: frozenset[str] = frozenset()
    """Parameters whose complete gradient is on every tp rank."""
    tied: frozenset[str] = frozenset()
    """Parameters of a weight on both the first and the last stage."""
    coded: CodedSum | None = None
    """Sums the gradients of ranks with the whole model through a codec; None: they are sent as they are."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of every gradient."""
        return self.groups.is_whole

    def early(self, weights: Mapping[str, nn.Parameter]) -> EarlySums | None:
        """Return an object that starts sums as gradients complete; None if all are summed at the end."""
        dp = self.groups.dp
        if self.coded is not None or not self.is_whole or not isinstance(dp, ProcessRanks):
            return None
        return EarlySums(dp, weights)

    def complete(self, gradients: Mapping[str, Tensor], begun: EarlySums | None) -> None:
        """Replace every gradient by its sum over all ranks, in place; every rank passes all parameters."""
        groups = self.groups
        if begun is not None:
            begun.finish()
        elif self.coded is not None:
            self.coded.sum_(groups.dp, gradients)
        elif groups.fsdp.size == 1:  # otherwise they are sharded over dp, and already summed
            groups.dp.sum_([gradients[name] for name in gradients if name not in self.experts])
            groups.twins.sum_([gradients[name] for name in gradients if name in self.experts])
        groups.ends.sum_([gradients[name] for name in gradients if name in self.tied])
        if groups.tp.rank:
            for name in self.whole & gradients.keys():
                gradients[name].zero_()
        groups.tp.sum_([gradients[name] for name in gradients if name in self.whole | self.summed])

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the global norm of completed gradients, equal on every rank."""
        if self.is_whole:
            return nn.utils.get_total_norm(list(gradients.values()))
        own = [gradient for name, gradient in gradients.items() if self._counts(name)]
        square = torch.zeros(1, dtype=torch.float64)
        if own:
            square += nn.utils.get_total_norm(own).double().cpu() ** 2
        squares = self.groups.everyone.stack(square)
        total = squares[self.groups.mesh.ranks[0]].clone()
        for rank in self.groups.mesh.ranks[1:]:  # by stage, so that a descending model has the same bits
            total += squares[rank]
        return total.sqrt()[0]

    def _counts(self, name: str) -> bool:
        groups = self.groups
        copy_over_dp = (groups.twins if name in self.experts else groups.copies).rank > 0
        copy_over_tp = name in self.whole | self.summed and groups.tp.rank > 0
        copy_over_pp = name in self.tied and not groups.first
        return not (copy_over_dp or copy_over_tp or copy_over_pp)


class EarlySums:
    """Sums of one step's gradients over ranks; each starts when all gradients of its group are complete.

    Args:
        ranks: the ranks with the same weights.
        weights: the weights whose gradients are summed, in place.
    """

    def __init__(self, ranks: ProcessRanks, weights: Mapping[str, nn.Parameter]) -> None:
        self._ranks, self._weights = ranks, weights
        self._incomplete = set(weights)
        self._collectives = self._sums()
        self._work: Work | None = None
        device = next(iter(weights.values())).device
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def complete(self, name: str) -> None:
        """Mark a weight's gradient as complete, and continue the sums without waiting."""
        self._incomplete.discard(name)
        self._go_on(wait=False)

    def finish(self) -> None:
        """Run all remaining sums; every weight has a gradient."""
        self._incomplete.clear()
        self._go_on(wait=True)
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)

    def _go_on(self, *, wait: bool) -> None:
        """Run collectives until a gradient is missing or, except on a CUDA stream, one is still running."""
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
            wait = True  # it blocks only the stream
        with nullcontext() if stream is None else stream:
            while wait or self._work is None or self._work.is_completed():
                self._work = None  # it references a bucket
                self._work = next(self._collectives, None)
                if self._work is None:
                    return

    def _sums(self) -> Iterator[Work | None]:
        """Yield all collectives in order, and None while a gradient of the next group is incomplete."""
        for names in _groups(self._weights):
            while not self._incomplete.isdisjoint(names):
                yield None
            weights = [self._weights[name] for name in names]
            gradients = [each.grad for each in weights if each.grad is not None]
            if self._stream is not None:
                for gradient in gradients:  # keeps a gradient's memory until the stream is done
                    gradient.record_stream(self._stream)
            yield from self._ranks.summing(gradients)


def _groups(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return groups of names, the last parameters first, each filled up to the limit."""
    groups, filled = list[list[str]](), GROUP_BYTES
    for name in reversed(list(weights)):
        filled += weights[name].nbytes
        if filled > GROUP_BYTES:
            groups.append([])
            filled = weights[name].nbytes
        groups[-1].append(name)
    return groups
