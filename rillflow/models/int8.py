"""Int8: a frozen linear layer's weight as 8-bit integers, with a scale for each output row.

    reading    rows of W ── largest / 127 ──> scale [out, 1] ── W / scale, rounded ──> q [out, in]   by blocks
    forward    q · scale = Ŵ ──> x Ŵᵀ + b ;  Ŵ is freed                                    a layer at a time
    backward   q · scale = Ŵ ──> ∂x = ∂y Ŵ ; Ŵ is recomputed from q and scale

A row's largest absolute weight determines its scale: the vector-wise quantisation of LLM.int8() (arXiv
2208.07339, section 2). ``scale`` is an ordinary parameter, so code that splits, reads, moves or shards a
model handles both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.models.lazy_weights import Index, Read, Source, not_finite

_MOST = 127
"""Largest integer used; the smallest is its negative, so that both signs have the same range."""
_BLOCK = 2**24
"""Numbers of a weight that are read at once."""


class Int8Linear(nn.Linear):
    """A frozen linear layer that computes with an int8 weight."""

    scale: nn.Parameter
    """[out, 1] float32 factor of each row's integers."""

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., out] for ``states`` [..., in]."""
        return product(self, states, self.bias)


class _Product(torch.autograd.Function):
    """x Ŵᵀ + b with a gradient for x only; the backward pass recomputes Ŵ."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return nn.functional.linear(states, dequantised(weight, scale, states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        return gradient @ dequantised(weight, scale, gradient.dtype), None, None, None


def product(linear: nn.Linear, states: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [..., out]: ``states`` [..., in] times a layer's weight, int8 or not, plus a bias."""
    if not isinstance(linear, Int8Linear):
        return nn.functional.linear(states, linear.weight, bias)
    if not torch.is_grad_enabled():  # plain operations, which the native engine can record
        return nn.functional.linear(states, dequantised(linear.weight, linear.scale, states.dtype), bias)
    found: Tensor = _Product.apply(states, linear.weight, linear.scale, bias)  # type: ignore[no-untyped-call]
    return found


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [out, in] the weight that the integers represent, rounded from a float32 product."""
    return weight.to(dtype).mul_(scale)


def full_weight(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return [out, in] the weight of a layer, dequantised if it is int8."""
    if isinstance(linear, Int8Linear):
        return dequantised(linear.weight, linear.scale, dtype)
    return linear.weight


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers [N, in] and scales [N, 1] of a weight's rows [N, in]; rows of zeros have scale 0."""
    wide = rows.float()
    least, most = torch.aminmax(wide, dim=1, keepdim=True)
    scale = torch.maximum(most, -least) / _MOST
    whole = (wide / torch.where(scale == 0, 1, scale)).round_().clamp_(-_MOST, _MOST)
    return whole.to(torch.int8), scale


def keep_in_int8(linear: nn.Linear) -> None:
    """Turn a layer into an int8 layer, on the meta device until its weight is read."""
    kind = type(linear)
    how: dict[str, Any] = {"device": "meta"}
    weight = torch.empty(linear.weight.shape, dtype=torch.int8, **how)
    scale = torch.empty(linear.weight.shape[0], 1, dtype=torch.float32, **how)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("scale", nn.Parameter(scale, requires_grad=False))
    linear.__class__ = Int8Linear if kind is nn.Linear else type(kind.__name__, (kind, Int8Linear), {})


def int8_layers(module: nn.Module) -> dict[str, Int8Linear]:
    """Return the int8 layers, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Int8Linear)}


def widened(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights by name with int8 ones dequantised, and without their scales."""
    whole = {name for name, weight in weights.items() if weight.dtype == torch.int8}
    scales = {name: f"{name.removesuffix('weight')}scale" for name in whole}
    left = weights.keys() - scales.values()
    return {
        name: dequantised(weight, weights[scales[name]], dtype) if name in whole else weight
        for name, weight in weights.items()
        if name in left
    }


def int8_weights(module: nn.Module, base: Source) -> Source:
    """Return the weights of a module, with those of int8 layers quantised as they are read.

    Raises:
        ModelError: on reading, a weight has non-finite numbers.
    """
    shapes = {f"{name}.weight": layer.weight.shape for name, layer in int8_layers(module).items()}

    def source() -> Iterator[tuple[str, Read]]:
        for name, read in base():
            if name not in shapes:
                yield name, read
                continue
            rows = _Rows(name, read, shapes[name])
            yield name, rows.weight
            yield f"{name.removesuffix('weight')}scale", rows.scale

    return source


class _Rows:
    """Quantised rows of a weight; a row's scale covers all its columns, whichever are read."""

    def __init__(self, name: str, read: Read, shape: torch.Size) -> None:
        self._name, self._read, self._shape = name, read, shape
        self._scales: dict[tuple[int, int], Tensor] = {}

    def weight(self, index: Index) -> Tensor:
        """Return the integers of a slice."""
        rows, columns = index or (slice(0, self._shape[0]), slice(None))
        found = torch.empty(
            rows.stop - rows.start, len(range(*columns.indices(self._shape[1]))), dtype=torch.int8
        )
        scale = torch.empty(rows.stop - rows.start, 1)
        size = max(1, _BLOCK // self._shape[1])
        for start in range(rows.start, rows.stop, size):
            block = slice(start, min(start + size, rows.stop))
            here = slice(block.start - rows.start, block.stop - rows.start)
            whole, scale[here] = quantised(self._read((block, slice(None))))
            found[here] = whole[:, columns]
        if not scale.isfinite().all():
            raise not_finite(self._name)
        self._scales[rows.start, rows.stop] = scale
        return found

    def scale(self, index: Index) -> Tensor:
        """Return the scales of a slice of rows."""
        rows = index[0] if index else slice(0, self._shape[0])
        if (rows.start, rows.stop) not in self._scales:
            self.weight((rows, slice(0, 0)))
        return self._scales[rows.start, rows.stop]
