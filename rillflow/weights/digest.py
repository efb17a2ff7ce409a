"""Digest: 64 bits for every weight, the same however its slices lie.

    rank 0  [A B . .] ── bits of each element, mixed, times a key of its place ── summed ──┐
    rank 1  [. . C D] ─────────────────────────────────────────────────────────── summed ──┴─> digest

    digest = sum over elements of  key(row) key(column) mix(bits)   modulo 2^64

A sum does not ask who adds what first, so ranks that hold slices add up to the whole's digest, and no slice
is gathered for it. The keys are odd and the mixing is one to one, so one changed element always changes the
digest; for elements exchanged, transposed, missing or stale the chance that it stays is about 2^-64. It
finds accidents; it is no signature.

A publication is a version and these digests; whoever received the weights compares before it uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from rillflow.cluster.ranks import Ranks
from rillflow.errors import WeightError
from rillflow.parallel.tensor import device_of, own
from rillflow.placement.sbp import Placement
from rillflow.placement.slices import Slice, keys, slices
from rillflow.weights.layout import Layout, Weights, intervals, local_index

_CHUNK = {"cpu": 2**15}
"""Elements at a time by kind of device: what is made of them stays in a core's cache."""
_LARGE_CHUNK = 2**24
"""Elements at a time elsewhere: few kernels, each of which has enough to do."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NAMED = 8
"""How many weights an error lists."""


@dataclass(frozen=True, kw_only=True)
class Digests:
    """What a version of a model's weights is known by.

    Example:
        Digests(version=3, of={"lm_head.weight": 0x1f})
    """

    version: int
    """Updates that are in it."""
    of: Mapping[str, int]
    """By weight; from 0 to 2^64 - 1. Empty where this version's weights are not compared."""
    canary: tuple[float, ...] = ()
    """What the trainer says of fixed texts, for an engine that copies what it is given (roles.canary)."""


def digests(
    weights: Weights,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    members: Sequence[int] | None = None,
) -> dict[str, int]:
    """The digest of every weight, added up over ranks; every one of them calls it and gets it.

    Args:
        weights: with the type they are to be digested as: tensors of another are cast, piece by piece.
        layout: where they lie.
        tensors: what this rank holds.
        ranks: those that add up; together they hold all of every weight.
        members: which ranks of the layout these are, in order; without it, those from 0 on.

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
    """Refuse weights that are not the ones that were published, as far as the publish has digests.

    Raises:
        WeightError: another version, or weights of this one that differ; it names them.
    """
    if found.version != expected.version:
        raise WeightError(
            f"the weights here are version {found.version} and version {expected.version} is to be used",
            why="they were not brought here, or not all ranks have received them",
            fix="publish again before generating",
        )
    missing = sorted(expected.of.keys() ^ found.of.keys()) if expected.of else []
    if missing:
        raise WeightError(
            f"{_listed(missing)} of version {expected.version} is on one side only",
            why="both sides hold the weights of the same model",
        )
    wrong = [name for name, digest in expected.of.items() if found.of[name] != digest]
    if wrong:
        raise WeightError(
            f"{_listed(wrong)} differs from what was published as version {expected.version}",
            why=f"its digest is {found.of[wrong[0]]:016x} and {expected.of[wrong[0]]:016x} was announced",
            fix="do not generate with it; publish again",
        )


def slice_digest(values: Tensor, box: Slice, dtype: torch.dtype) -> Tensor:
    """The part of a weight's digest that a box of it contributes, modulo 2^64: [] int64, where the box is.

    Nothing is waited for, so on an accelerator kernels of many boxes stand in line.

    Args:
        values: of the box, in its shape.
        box: where it lies in the weight.
        dtype: what the weight's elements are; other values are cast.
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
    """Slices by rank such that every element of a weight is one rank's of ``among``.

    Args:
        placement: where the weight lies.
        shape: of the weight.
        among: the ranks to choose from.
        turn: which one of the ranks with the same slice has it, counted round.

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
            why=f"it lies on ranks {list(placement.mesh.ranks)}, cut along {', '.join(placement.order)}",
        )
    return found


def _mixed(values: Tensor) -> Tensor:
    """The bits of every element, spread over 64 and no longer in proportion to them."""
    found = values.contiguous().view(_BITS[values.element_size()]).to(torch.int64, copy=True)
    found *= _signed(_FIRST)
    # The shift copies the sign, so n and ~n would become one; no two products of elements of up to 32 bits
    # are such a pair.
    found ^= found >> 29
    return found


def _row_keys(bounds: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """A key for every row of a box: the product of those of its places in all dims but the last."""
    found = torch.ones(1, dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(bounds):
        found = (found[:, None] * _keys(start, stop, _ROWS * (2 * dim + 1), device)).reshape(-1)
    return found


@lru_cache(maxsize=64)
def _keys(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """An odd number for every place from ``start`` to ``stop``: splitmix64 of it."""
    found = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * _signed(seed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        found ^= (found >> shift) & (2 ** (64 - shift) - 1)
        found *= _signed(factor)
    found ^= (found >> 31) & (2**33 - 1)
    return found | 1


def _signed(number: int) -> int:
    """The same 64 bits as torch's integers have them."""
    return (number + 2**63) % 2**64 - 2**63


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
