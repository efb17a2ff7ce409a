"""Cache: the keys and values of every layer, by buckets (see layout).

    layer l, bucket b     keys   [rows, K, length, D]        rows 0 .. n-1 run, so a pass reads
                        values [rows, K, length, E]        keys[:n, :, :longest], a view: nothing is copied

A bucket is reallocated, one layer after the other, when the layout changes its length or its number of rows.
All memory is freed when no row runs, so that the trainer can use it between two calls.

On a CPU the cache of a module in a narrower type is float32: a batched product in bfloat16 takes 1.1 times as
long on a processor with bfloat16 instructions, and 4 times without.

Memory is zeroed, because masked places are multiplied by 0, and 0 times a stray NaN is NaN.

Legend: K key/value heads, D and E head sizes of keys and values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rillflow.rollout.native.cache_layout import CacheRow, Copy, LengthBucket

_AT_ONCE = 64
"""Rows that are copied together; the copy temporarily holds them a second time."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape of one layer's keys and values."""

    heads: int
    """K."""
    key_size: int
    """D."""
    value_size: int
    """E."""


class Layer(NamedTuple):
    """One layer's keys and values in one bucket."""

    keys: Tensor
    """[rows, K, length, D]."""
    values: Tensor
    """[rows, K, length, E]."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    def until(self, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first ``length`` positions."""
        return self.keys[:, :, :length], self.values[:, :, :length]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """Copies from rows of one bucket to rows of one bucket."""

    source: int
    """The bucket to read."""
    target: int
    """The bucket to write."""
    sources: Tensor
    """[n] int64 rows to read."""
    targets: Tensor
    """[n] int64 rows to write."""
    length: int
    """Positions of the longest copy."""


class Cache:
    """Keys and values of all layers.

    Args:
        shapes: shapes of the layers, by index.
        device: the module's device.
        dtype: the module's dtype.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._device = device
        self._dtype = torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype
        self.layers: dict[int, dict[int, Layer]] = {index: {} for index in shapes}
        """Layers by index, then by name of the bucket."""
        self.peak_bytes = 0
        """Most bytes ever held at once, including both copies of a layer during reallocation."""

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values, unused rows included."""
        return sum(bucket.nbytes for layer in self.layers.values() for bucket in layer.values())

    @property
    def position_bytes(self) -> list[int]:
        """Bytes of one position in each layer."""
        sizes = (shape.heads * (shape.key_size + shape.value_size) for shape in self._shapes.values())
        return [size * self._dtype.itemsize for size in sizes]

    @property
    def budget_bytes(self) -> int:
        """Most bytes of one position in all layers; the largest layer counts twice, for its reallocation."""
        return sum(self.position_bytes) + max(self.position_bytes)

    def release(self) -> None:
        """Free all memory."""
        self.layers = {index: {} for index in self._shapes}

    def arrange(self, buckets: Sequence[LengthBucket[Any]], copies: Sequence[Copy] = ()) -> None:
        """Allocate exactly these buckets; rows keep their contents.

        All copies happen at once: they read the contents from before the call. A copy may extend beyond its
        row's valid positions, to the length of the longest one; a row reads no position before it has written
        it.
        """
        some = next(iter(self.layers.values()))
        shapes = {name: (bucket.keys.shape[0], bucket.keys.shape[2]) for name, bucket in some.items()}
        if not copies and shapes == {bucket.name: (bucket.rows, bucket.length) for bucket in buckets}:
            return
        parts = self._parts(copies)
        for index, shape in self._shapes.items():
            before = self.layers[index]
            after = {bucket.name: self._sized(before.get(bucket.name), shape, bucket) for bucket in buckets}
            self.layers[index] = after
            twice = sum(each.nbytes for name, each in before.items() if after.get(name) is not each)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes + twice)
            for part in parts:
                taken = [
                    [states[each.sources] for states in before[each.source].until(each.length)]
                    for each in part
                ]
                for each, found in zip(part, taken, strict=True):
                    for states, new in zip(after[each.target].until(each.length), found, strict=True):
                        states[each.targets] = new
            del before

    def read(self, row: CacheRow, length: int) -> Tensor:
        """Return [length, W] keys and values of a row's first positions in all layers, in host memory."""
        states = (part[row.row, :, :length] for layer in self._layers_of(row) for part in layer)
        return torch.cat([each.transpose(0, 1).flatten(1) for each in states], dim=1).cpu()

    def write(self, row: CacheRow, states: Tensor) -> None:
        """Write what ``read`` returned to a row's first positions."""
        parts = [part[row.row, :, : len(states)] for layer in self._layers_of(row) for part in layer]
        widths = [part.shape[0] * part.shape[2] for part in parts]
        for part, own in zip(parts, torch.split(states.to(self._device), widths, dim=1), strict=True):
            part.copy_(own.view(len(states), part.shape[0], part.shape[2]).transpose(0, 1))

    def _layers_of(self, row: CacheRow) -> list[Layer]:
        return [self.layers[index][row.bucket] for index in self._shapes]

    def _parts(self, copies: Sequence[Copy]) -> list[list[_Group]]:
        """Return the copies that run together: all of them if some read rows that others write."""
        by_buckets = defaultdict(list)
        for copy in copies:
            by_buckets[copy.source.bucket, copy.target.bucket].append(copy)
        at_once = _AT_ONCE
        if {copy.source for copy in copies} & {copy.target for copy in copies}:
            at_once = len(copies)
        groups = [
            self._group(some[first : first + at_once])
            for some in by_buckets.values()
            for first in range(0, len(some), at_once)
        ]
        return [groups] if at_once == len(copies) else [[group] for group in groups]

    def _group(self, copies: Sequence[Copy]) -> _Group:
        rows = torch.tensor([(copy.source.row, copy.target.row) for copy in copies], device=self._device)
        return _Group(
            source=copies[0].source.bucket,
            target=copies[0].target.bucket,
            sources=rows[:, 0],
            targets=rows[:, 1],
            length=max(copy.length for copy in copies),
        )

    def _sized(self, old: Layer | None, shape: LayerShape, bucket: LengthBucket[Any]) -> Layer:
        """Return the layer of a bucket: unchanged if the size fits, else a new one with the old contents."""
        if old is not None and (old.keys.shape[0], old.keys.shape[2]) == (bucket.rows, bucket.length):
            return old
        new = Layer(
            *(
                torch.zeros(
                    bucket.rows, shape.heads, bucket.length, size, dtype=self._dtype, device=self._device
                )
                for size in (shape.key_size, shape.value_size)
            )
        )
        if old is not None:
            rows, length = min(old.keys.shape[0], bucket.rows), min(old.keys.shape[2], bucket.length)
            new.keys[:rows, :, :length] = old.keys[:rows, :, :length]
            new.values[:rows, :, :length] = old.values[:rows, :, :length]
        return new
