"""Cache: the keys and values of every layer, one slot a row.

    layer l     keys   [rows, K, length, D]        slots 0 .. n-1 run, so a pass reads
                values [rows, K, length, E]        keys[:n, :, :longest], a view: nothing is copied

Both sides grow by need, up to what the running rows can reach, and all is given back when no row
runs: between two calls the memory belongs to the trainer.

Memory is zeroed: a masked place is multiplied by an exact 0, and 0 times a stray NaN is NaN.

Legend: K key/value heads, D and E head sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rillflow.rollout.native.scheduler import Copy

_LEAST = 64
"""Positions of the smallest cache."""


@dataclass(kw_only=True, eq=False)
class Layer:
    """One layer's keys and values."""

    keys: Tensor
    """[rows, K, length, D]."""
    values: Tensor
    """[rows, K, length, E]."""


class Cache:
    """Keys and values of all layers; a layer is there from the moment it first shows its shape."""

    def __init__(self) -> None:
        self._layers: dict[int, Layer] = {}
        self._rows = 0
        self._length = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers.values())

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self._length

    def reserve(self, rows: int, length: int, longest: int) -> None:
        """Make room for ``rows`` slots of ``length`` positions, of which none will need more than ``longest``."""
        if rows <= self._rows and length <= self._length:
            return
        self._rows = max(rows, self._rows)
        if length > self._length:
            self._length = max(length, min(max(2 * length, _LEAST), longest))
        for layer in self._layers.values():
            layer.keys = self._regrown(layer.keys)
            layer.values = self._regrown(layer.values)

    def layer(self, index: int, key: Tensor, value: Tensor) -> Layer:
        """The layer of this index; ``key`` [T, K, D] and ``value`` [T, K, E] show its shape."""
        if index not in self._layers:
            self._layers[index] = Layer(keys=self._fresh(key), values=self._fresh(value))
        return self._layers[index]

    def copy(self, copies: Iterable[Copy]) -> None:
        """Take beginnings of rows over into other slots, one after the other."""
        for copy in copies:
            for layer in self._layers.values():
                for states in (layer.keys, layer.values):
                    states[copy.target, :, : copy.length].copy_(states[copy.source, :, : copy.length])

    def release(self) -> None:
        """Give all memory back."""
        self._layers.clear()
        self._rows = self._length = 0

    def _fresh(self, states: Tensor) -> Tensor:
        # A processor without bfloat16 arithmetic takes four times as long over it, one with it gains
        # a tenth, and the scores are more exact.
        dtype = torch.float32 if states.device.type == "cpu" else states.dtype
        shape = (self._rows, states.shape[1], self._length, states.shape[2])
        return torch.zeros(shape, dtype=dtype, device=states.device)

    def _regrown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._rows, old.shape[1], self._length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new
