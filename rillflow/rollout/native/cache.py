"""Cache: the keys and values of every layer, one slot a row.

    layer l     keys   [rows, K, length, D]        slots 0 .. n-1 run, so a pass reads
                values [rows, K, length, E]        keys[:n, :, :longest], a view: nothing is copied

Both sides grow by need, up to what the running rows can reach, and all is given back when no row
runs: between two calls the memory belongs to the trainer.

On a CPU the cache of a narrower module is float32: a batched product in bfloat16 takes 1.1 times
as long where the processor has instructions for it, and 4 times where it has none.

Memory is zeroed, because a masked place counts as an exact 0, and 0 times a stray NaN is NaN.

Legend: K key/value heads, D and E head sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rillflow.rollout.native.scheduler import Copy

PLACES = 16
"""Positions come in multiples of this, so that every row begins where a cache line does."""
_AT_ONCE = 64
"""Rows that are copied together; what they hold is in memory a second time meanwhile."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What one layer keeps of a token."""

    heads: int
    """K."""
    key_size: int
    """D."""
    value_size: int
    """E."""


@dataclass(kw_only=True, eq=False)
class Layer:
    """One layer's keys and values."""

    keys: Tensor
    """[rows, K, length, D]."""
    values: Tensor
    """[rows, K, length, E]."""


class Cache:
    """Keys and values of all layers.

    Args:
        shapes: of the layers, by index.
        device: of the module.
        dtype: of the module.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._device = device
        self._dtype = torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype
        self.release()

    @property
    def held_bytes(self) -> int:
        """What keys and values take, empty slots with them."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def release(self) -> None:
        """Give all memory back."""
        self._rows = self._length = 0
        self.layers = {index: self._fresh(shape) for index, shape in self._shapes.items()}
        """The layers by index."""

    def reserve(self, rows: int, length: int, longest: int) -> None:
        """Make room for slots 0 to ``rows`` - 1 of ``length`` positions.

        A cache that grows takes twice what it must, so that it grows seldom, but no more than
        ``longest``, which no row exceeds.
        """
        if rows <= self._rows and length <= self._length:
            return
        self._rows = max(rows, self._rows)
        if length > self._length:
            wanted = max(length, min(2 * length, longest))
            self._length = -(-wanted // PLACES) * PLACES
        for index, old in self.layers.items():
            new = self._fresh(self._shapes[index])
            kept_rows, kept_length = old.keys.shape[0], old.keys.shape[2]
            new.keys[:kept_rows, :, :kept_length] = old.keys
            new.values[:kept_rows, :, :kept_length] = old.values
            self.layers[index] = new

    def copy(self, copies: Sequence[Copy]) -> None:
        """Take beginnings of rows over into other slots, as if one after the other.

        All at once: what is copied from a slot that is itself copied to comes from where that came from. A
        row may be given more than its beginning; it reads no place before it has written it.
        """
        if not copies:
            return
        origins: dict[int, int] = {}
        for copy in copies:
            origins[copy.target] = origins.get(copy.source, copy.source)
        length = max(copy.length for copy in copies)
        targets, sources = torch.tensor([*origins.items()], device=self._device).T
        parts = list(zip(targets.split(_AT_ONCE), sources.split(_AT_ONCE), strict=True))
        for layer in self.layers.values():
            for states in (layer.keys[:, :, :length], layer.values[:, :, :length]):
                for part, origin in parts:
                    states[part] = states[origin]

    def _fresh(self, shape: LayerShape) -> Layer:
        keys, values = (
            torch.zeros(self._rows, shape.heads, self._length, size, dtype=self._dtype, device=self._device)
            for size in (shape.key_size, shape.value_size)
        )
        return Layer(keys=keys, values=values)
