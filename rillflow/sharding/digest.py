"""Digest: a 64-bit hash of every weight, independent of how its slices are distributed.

    rank 0  [A B . .] ── bits of each element, mixed, times a key of its place ── summed ──┐
    rank 1  [. . C D] ─────────────────────────────────────────────────────────── summed ──┴─> digest

    digest = sum over elements of  key(row) key(column) mix(bits)   modulo 2^64

The sum does not depend on its order, so ranks sum the digests of their slices without gathering the weight.
The keys are odd and the mixing is one to one, so one changed element always changes the digest. For
exchanged, transposed, missing or stale elements it stays the same with probability about 2^-64. It detects
accidents; it is not a signature.

A publish is a version and these digests; the receivers compare them before they use the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Slice, keys, slices
from rillflow.sharding.layout import Layout, Weights, intervals, local_index
from rillflow.sharding.tensor import device_of, own
from rillflow.workers.collectives import Ranks

_CHUNK = {"cpu": 2**15}
"""Elements per chunk by kind of device, small enough for a core's cache."""
_LARGE_CHUNK = 2**24
"""Elements per chunk on other devices, large enough to fill few kernels."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NAMED = 8
"""Maximum weights that an error lists."""


@dataclass(frozen=True, kw_only=True)
class Digests:
    """Version and digests of a model's weights.

    Example:
        Digests(version=3, of={"lm_head.weight": 0x1f})
    """

    version: int
    """Number of publishes, which identifies the version."""
    of: Mapping[str, int]
    """Digests by weight, from 0 to 2^64 - 1; empty if this version's weights are not compared."""
    canary: tuple[float, ...] = ()
    """The trainer's log probabilities of fixed texts, for engines that copy the weights (roles.canary)."""


def digests(
    weights: Weights,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    members: Sequence[int] | None = None,
) -> dict[str, int]:
    """Return the digest of every weight, summed over ranks; every rank calls it and gets the result.

    Args:
        weights: the weights, with the dtype to digest; tensors of another dtype are cast, chunk by chunk.
        layout: placement of the weights.
        tensors: this rank's tensors.
        ranks: the ranks to sum over; together they hold every weight completely.
        members: the ranks' numbers in the layout, in order; None for those from 0 on.

    Raises:
        WeightError: a part of a weight is on none of these ranks.
    """
    among = tuple(range(ranks.size) if members is None else members)
    rank = among[ranks.rank]
    total = torch.zeros(len(weights), dtype=torch.int64, device=device_of(tensors))
    for place, (name, weight) in enumerate(weights.items()):
        boxes = owned(layout[name], weight.shape, among).get(rank, ())
        held = intervals(layout[name], weight.shape, rank) if boxes else ()
        for box in boxes:
            total[place] += slice_digest(own(tensors[name])[local_index(held, box)], box, weight.dtype)
    ranks.sum_([total])
    return {name: each % 2**64 for name, each in zip(weights, total.tolist(), strict=True)}


def verify(expected: Digests, found: Digests) -> None:
    """Refuse weights that differ from the published ones; without published digests, compare only versions.

    Raises:
        WeightError: the version differs, or weights differ; it names them.
    """
    if found.version != expected.version:
        raise WeightError(
            f"the weights here are version {found.version}, and version {expected.version} is needed",
            why="the needed version was not delivered here, or not to all ranks",
            fix="publish again before generating",
        )
    missing = sorted(expected.of.keys() ^ found.of.keys()) if expected.of else []
    if missing:
        raise WeightError(
            f"{_listed(missing)} of version {expected.version} is on one side only",
            why="publisher and receiver must hold the weights of the same model",
        )
    wrong = [name for name, digest in expected.of.items() if found.of[name] != digest]
    if wrong:
        raise WeightError(
            f"{_listed(wrong)} differs from what was published as version {expected.version}",
            why=f"its digest is {found.of[wrong[0]]:016x}, the published one is {expected.of[wrong[0]]:016x}",
            fix="do not generate with it; publish again",
        )


def slice_digest(values: Tensor, box: Slice, dtype: torch.dtype) -> Tensor:
    """Return a box's contribution to a weight's digest, modulo 2^64: [] int64, on the box's device.

    It does not synchronise, so the kernels of many boxes are queued on an accelerator.

    Args:
        values: values of the box, in its shape.
        box: place of the box in the weight.
        dtype: dtype of the weight; other values are cast.
    """
    bounds = box.bounds or ((0, 1),)
    values = values.reshape(-1, bounds[-1][1] - bounds[-1][0])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.numel():
        return total
    rows, columns = _row_keys(bounds[:-1], values.device), _keys(*bounds[-1], _COLUMNS, values.device)
    most = _CHUNK.get(values.device.type, _LARGE_CHUNK)
    step = max(1, most // values.shape[1])
    for first in range(0, values.shape[0], step):
        chunk = values[first : first + step]
        for left in range(0, values.shape[1], most):
            mixed = _mixed(chunk[:, left : left + most].to(dtype))
            mixed *= columns[left : left + most]
            total += (mixed.sum(1) * rows[first : first + step]).sum()
    return total


@lru_cache(maxsize=4096)
def owned(
    placement: Placement, shape: tuple[int, ...], among: tuple[int, ...], turn: int = 0
) -> dict[int, tuple[Slice, ...]]:
    """Return slices by rank such that exactly one rank of ``among`` has each element of a weight.

    Args:
        placement: placement of the weight.
        shape: shape of the weight.
        among: the ranks to choose from.
        turn: index of the chosen rank among those with the same slice, modulo their number.

    Raises:
        WeightError: a part of the weight is on none of these ranks.
    """
    holders: dict[object, list[int]] = {}
    for rank in (rank for rank in placement.mesh.ranks if rank in set(among)):
        holders.setdefault(keys(placement, rank, len(shape)), []).append(rank)
    chosen = {ranks[turn % len(ranks)] for ranks in holders.values()}
    held = slices(placement, shape)
    found = {rank: held[rank] for rank in sorted(chosen) if held[rank]}
    count = sum(box.size for boxes in found.values() for box in boxes)
    if count != prod(shape):
        raise WeightError(
            f"ranks {list(among)} hold {count:,} of {prod(shape):,} elements of a weight of {list(shape)}",
            why=f"it is on ranks {list(placement.mesh.ranks)}, split along {', '.join(placement.order)}",
        )
    return found


def _mixed(values: Tensor) -> Tensor:
    """Return the bits of every element mixed into 64 bits that are not proportional to the values."""
    found = values.contiguous().view(_BITS[values.element_size()]).to(torch.int64, copy=True)
    found *= _signed(_FIRST)
    # The shift copies the sign, so it maps n and ~n to the same value; no two products of elements of up to
    # 32 bits are such a pair.
    found ^= found >> 29
    return found


def _row_keys(bounds: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return a key for every row of a box: the product of its keys in all dims but the last."""
    found = torch.ones(1, dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(bounds):
        found = (found[:, None] * _keys(start, stop, _ROWS * (2 * dim + 1), device)).reshape(-1)
    return found


@lru_cache(maxsize=64)
def _keys(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """Return an odd key for every place from ``start`` to ``stop`` (excluded), by splitmix64."""
    found = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * _signed(seed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        found ^= (found >> shift) & (2 ** (64 - shift) - 1)
        found *= _signed(factor)
    found ^= (found >> 31) & (2**33 - 1)
    return found | 1


def _signed(number: int) -> int:
    """Return the signed integer with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
