"""Layout: the ranks that hold every weight of a model, and the slice that each of them holds.

    training  d=1 p=1 t=4     generation  t_g=2, so two replicas of two ranks

    rank      0   1   2   3   rank        0     1     2     3
    weight   [A] [B] [C] [D]             [A B] [A B] [C D] [C D]      tp 0 0 1 1
                                                                micro_dp 0 1 0 1

Generation's tp groups take ranks at a stride of t / t_g. So a rank's training shard lies within its
generation shard, and nothing is held twice (HybridFlow, arXiv 2409.19256, section 5.3). The same holds with
pipelines: consecutive stages are combined on a rank.

A weight is a parameter of the whole model, by its name there; tied ones count once. A rank's own tensor is
its intervals of every dim, concatenated in ascending order (see placement.slices):

    a dim of 10, this rank has [0:3] and [5:8]       its own tensor   0 1 2 | 5 6 7
                                                     box [6:8]    ->  4:6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod

import torch
from torch import nn

from rillflow.errors import PlacementError, nearest
from rillflow.placement.mesh import Mesh, divisors
from rillflow.placement.sbp import Part, Placement, Split
from rillflow.placement.slices import Interval, Slice, cuts, keys

Box = tuple[slice, ...]
"""Index of a tensor, one slice per dim."""
Layout = Mapping[str, Placement]
"""Placement of every weight, by name; a weight of some pipeline stages is placed on their ranks only."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of the whole model, independent of where its slices are."""

    name: str
    """Name in the whole model's ``named_parameters``; tied ones by their first name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: torch.dtype
    """Dtype of its elements."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return prod(self.shape) * self.dtype.itemsize


Weights = Mapping[str, Weight]
"""The weights of a model, in its own order."""


def logical_weights(module: nn.Module) -> dict[str, Weight]:
    """Return the weights of a whole module, which may be on the meta device."""
    return {
        name: Weight(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in module.named_parameters()
    }


def training_layout(
    weights: Weights,
    parts: Mapping[str, Part],
    stages: Mapping[str, Sequence[int]],
    mesh: Mesh,
    *,
    fsdp: int = 1,
    ep: int = 1,
    experts: Set[str] = frozenset(),
) -> dict[str, Placement]:
    """Return the placement of weights in training.

    Args:
        weights: weights of the whole model.
        parts: placement of each weight along tp (``models.tensor_plan.weight_parts``).
        stages: pipeline stages of each weight; a tied embedding has two.
        mesh: mesh with dp, pp and tp.
        fsdp: this many consecutive dp ranks shard the first dim of each tp shard, as in FSDP2; with 1 every
            dp rank has a copy.
        ep: this many consecutive dp ranks shard the first dim of ``experts``.
        experts: weights whose first dim counts a mixture's experts.

    Raises:
        PlacementError: the mesh lacks an axis, or a weight's stage does not exist.
    """
    found = {}
    if fsdp > 1:
        d, p, t = (mesh.axis(name).size for name in ("dp", "pp", "tp"))
        mesh = Mesh.of(ranks=mesh.ranks, dp=d // fsdp, fsdp=fsdp, pp=p, tp=t)
    if ep > 1:
        d, p, t = (mesh.axis(name).size for name in ("dp", "pp", "tp"))
        mesh = Mesh.of(ranks=mesh.ranks, dp=d // ep, ep=ep, pp=p, tp=t)
    for name, weight in weights.items():
        whole: dict[str, Part] = {"tp": parts[name]}
        order: tuple[str, ...] = ()
        if fsdp > 1 and weight.shape:
            whole["fsdp"] = Split(0)
            order = ("tp", "fsdp") if isinstance(parts[name], Split) else ("fsdp",)
        if ep > 1 and name in experts:
            whole["ep"] = Split(0)
        found[name] = Placement(_stage_mesh(name, mesh, stages[name]), whole, order=order)
    return found


def generation_mesh(train: Mesh, tp: int, *, is_sharded: bool = False) -> Mesh:
    """Return the mesh on which a training mesh's ranks generate, so that each keeps its training shard.

    Pipeline stages are combined: a replica of t_g ranks has all layers.

    If only dp shards the parameters (FSDP2), t_g of its ranks may share a copy, where t_g divides d. Their
    training rows of a weight are not within their generation shard, so both are held.

    Args:
        train: mesh with dp, pp and tp of sizes d, p and t.
        tp: t_g, a divisor of t.
        is_sharded: whether dp shards the parameters.

    Returns:
        dp, micro_dp and tp of sizes d, p t / t_g and t_g.

    Raises:
        PlacementError: t_g does not divide t; it shows the division.
    """
    d, p, t = (train.axis(name).size for name in ("dp", "pp", "tp"))
    if is_sharded and d == train.size and d % max(tp, 1) == 0:
        return Mesh.of(ranks=train.ranks, dp=d // tp, micro_dp=1, tp=tp)
    if tp < 1 or t % tp:
        left = f"{t} / {tp} leaves {t % tp}" if tp > 0 else "the minimum is 1"
        raise PlacementError(
            f"generation has tp {tp} and training tp {t}",
            why=f"each generation shard consists of whole training shards, and {left}",
            fix=f"choose the tp of generation among {', '.join(map(str, divisors(t)))}",
        )
    stride = t // tp
    ranks = [group[micro::stride] for group in train.groups("tp") for micro in range(stride)]
    return Mesh.of(ranks=chain.from_iterable(ranks), dp=d, micro_dp=p * stride, tp=tp)


def generation_layout(weights: Weights, parts: Mapping[str, Part], mesh: Mesh) -> dict[str, Placement]:
    """Return the placement of weights in generation: split along tp, a copy in every replica.

    Args:
        weights: weights of the whole model.
        parts: placement of each weight along tp.
        mesh: see ``generation_mesh``; any mesh with an axis tp works.
    """
    return {name: Placement(mesh, {"tp": parts[name]}) for name in weights}


@lru_cache(maxsize=4096)
def intervals(placement: Placement, shape: tuple[int, ...], rank: int) -> tuple[tuple[Interval, ...], ...]:
    """Return a rank's intervals, dim by dim."""
    at = keys(placement, rank, len(shape))
    return tuple(tuple(cut[key]) for cut, key in zip(_cuts(placement, shape), at, strict=True))


def local_shape(placement: Placement, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's own tensor."""
    return tuple(sum(stop - start for start, stop in held) for held in intervals(placement, shape, rank))


def local_index(held: Sequence[Sequence[Interval]], box: Slice) -> Box:
    """Return the index of a box in the tensor of a rank that holds these intervals.

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
        f"a rank does not hold {bounds[0]}:{bounds[1]}", why=f"it holds {list(held) or 'nothing'}"
    )


_cuts = lru_cache(maxsize=1024)(cuts)


def _stage_mesh(name: str, mesh: Mesh, stages: Sequence[int]) -> Mesh:
    """Return the mesh of the ranks of some pipeline stages; equal arguments return the same object."""
    count = mesh.axis("pp").size
    if not stages or not all(0 <= stage < count for stage in stages):
        raise PlacementError(
            f"{name} is placed on the pipeline stages {list(stages)}",
            why=f"there are {count} stages, counted from 0",
            fix=nearest(str(max(stages, default=0)), map(str, range(count))),
        )
    return _cut_mesh(mesh, tuple(stages))


@lru_cache(maxsize=256)
def _cut_mesh(mesh: Mesh, stages: tuple[int, ...]) -> Mesh:
    ranks = [rank for rank in mesh.ranks if mesh.coordinates(rank)["pp"] in stages]
    sizes = {axis.name: axis.size for axis in mesh.axes} | {"pp": len(stages)}
    return Mesh.of(ranks=ranks, first=0, **sizes)
