"""Quantised: a frozen linear layer's weight in 8 or 4 bits, with scales.

    reading    rows of W ── quantise ──> weight: integers; scale: float32                    by blocks of rows
    forward    dequantise ──> Ŵ ──> x Ŵᵀ + b ;  Ŵ is freed                                   a layer at a time
    backward   dequantise ──> Ŵ ──> ∂x = ∂y Ŵ ; Ŵ is recomputed

    int8   weight [out, in] int8        scale [out, 1], largest / 127 of a row  LLM.int8(), arXiv 2208.07339
    4bit   weight [out, in / 2] uint8   scale [out, in / 64], largest of a block  NF4, arXiv 2305.14314

A weight's dtype names its form. Blocks never cross rows. Weight and scale are ordinary parameters, so code
that splits, reads, moves or shards a model handles both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rillflow.errors import ModelError
from rillflow.models import nf4
from rillflow.models.lazy_weights import Index, Read, Source, not_finite

_MOST = 127
"""Largest integer of int8; the smallest is its negative, so that both signs have the same range."""
_BLOCK = 2**20
"""Numbers of a weight that are read at once."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to store a weight."""

    dtype: torch.dtype
    """Dtype of the stored integers."""
    packed: int
    """Numbers in one stored integer."""
    block: int | None
    """Numbers of a row that share a scale; None for the whole row."""
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Return integers [N, in / packed] and scales [N, blocks] of rows [N, in]."""
    dequantise: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    """Return [N, in] the rows that integers and scales represent."""

    def scales(self, inputs: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.block is None else inputs // self.block

    @property
    def per_number(self) -> float:
        """Bytes of a number, without the scales of whole rows."""
        scale = 0.0 if self.block is None else torch.float32.itemsize / self.block
        return self.dtype.itemsize / self.packed + scale


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 integers [N, in] and scales [N, 1] of rows [N, in]; rows of zeros have scale 0."""
    wide = rows.float()
    least, most = torch.aminmax(wide, dim=1, keepdim=True)
    scale = torch.maximum(most, -least) / _MOST
    whole = (wide / torch.where(scale == 0, 1, scale)).round_().clamp_(-_MOST, _MOST)
    return whole.to(torch.int8), scale


def _from_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_(scale)


FORMS: Mapping[str, Form] = {
    "int8": Form(dtype=torch.int8, packed=1, block=None, quantise=quantised, dequantise=_from_int8),
    "4bit": Form(
        dtype=torch.uint8, packed=2, block=nf4.BLOCK, quantise=nf4.quantised, dequantise=nf4.dequantised
    ),
}
"""Forms by their names in ``policy.model.adapter.base``."""
_BY_DTYPE = {form.dtype: form for form in FORMS.values()}


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that computes with a quantised weight."""

    scale: nn.Parameter
    """[out, blocks] float32 factors."""

    @property
    def form(self) -> Form:
        """Form of the weight."""
        return _BY_DTYPE[self.weight.dtype]

    @property
    def has_blocks(self) -> bool:
        """Whether scales belong to blocks of inputs; tensor parallelism then splits them with the inputs."""
        return self.form.block is not None

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
    """Return [..., out]: ``states`` [..., in] times a layer's weight, quantised or not, plus a bias."""
    if not isinstance(linear, QuantisedLinear):
        return nn.functional.linear(states, linear.weight, bias)
    if not torch.is_grad_enabled():  # plain operations, which the native engine can record
        return nn.functional.linear(states, dequantised(linear.weight, linear.scale, states.dtype), bias)
    found: Tensor = _Product.apply(states, linear.weight, linear.scale, bias)  # type: ignore[no-untyped-call]
    return found


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [out, in] the weight that integers and scales represent."""
    form = _BY_DTYPE[weight.dtype]
    if form.packed > 1 and isinstance(weight, DTensor):  # a shard has whole blocks, so it is one by itself
        assert isinstance(scale, DTensor)
        own = form.dequantise(weight.to_local(), scale.to_local(), dtype)
        return DTensor.from_local(own, weight.device_mesh, weight.placements, run_check=False)
    return form.dequantise(weight, scale, dtype)


def full_weight(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return [out, in] the weight of a layer, dequantised if it is quantised."""
    if isinstance(linear, QuantisedLinear):
        return dequantised(linear.weight, linear.scale, dtype)
    return linear.weight


def keep_quantised(linear: nn.Linear, form: Form, name: str = "a layer") -> None:
    """Turn a layer into a quantised layer, on the meta device until its weight is read.

    Args:
        linear: the layer.
        form: how to store its weight.
        name: the layer's name, for an error.

    Raises:
        ModelError: the form divides rows into blocks, and the layer's inputs are not whole blocks; or its
            library is not installed.
    """
    kind = type(linear)
    outputs, inputs = linear.weight.shape
    if form.block is not None:
        nf4.require_library()
        if inputs % form.block:
            raise ModelError(
                f'policy.model.adapter.base is "4bit", and {name} has {inputs} inputs on a rank',
                why=f"{form.block} numbers of a row share a scale, and a block never crosses rows",
                fix='set base = "int8", which has one scale per row, or a smaller tp',
            )
    how: dict[str, Any] = {"device": "meta"}
    weight = torch.empty(outputs, inputs // form.packed, dtype=form.dtype, **how)
    scale = torch.empty(outputs, form.scales(inputs), dtype=torch.float32, **how)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("scale", nn.Parameter(scale, requires_grad=False))
    linear.__class__ = (
        QuantisedLinear if kind is nn.Linear else type(kind.__name__, (kind, QuantisedLinear), {})
    )


def quantised_layers(module: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantisedLinear)}


def widened(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights by name with quantised ones dequantised, and without their scales."""
    whole = {name for name, weight in weights.items() if weight.dtype in _BY_DTYPE}
    scales = {name: f"{name.removesuffix('weight')}scale" for name in whole}
    left = weights.keys() - scales.values()
    return {
        name: dequantised(weight, weights[scales[name]], dtype) if name in whole else weight
        for name, weight in weights.items()
        if name in left
    }


def quantised_weights(module: nn.Module, base: Source) -> Source:
    """Return the weights of a module, with those of quantised layers quantised as they are read.

    Raises:
        ModelError: on reading, a weight has non-finite numbers.
    """
    layers = {f"{name}.weight": layer for name, layer in quantised_layers(module).items()}

    def source() -> Iterator[tuple[str, Read]]:
        for name, read in base():
            if name not in layers:
                yield name, read
                continue
            rows = _Rows(name, read, layers[name])
            yield name, rows.weight
            yield f"{name.removesuffix('weight')}scale", rows.scale

    return source


class _Rows:
    """Quantised rows of a weight; a row is quantised as a whole, whichever columns are read."""

    def __init__(self, name: str, read: Read, layer: QuantisedLinear) -> None:
        self._name, self._read, self._form = name, read, layer.form
        self._shape, self._scales = layer.weight.shape, layer.scale.shape[1]
        self._kept: dict[tuple[int, int], Tensor] = {}

    def weight(self, index: Index) -> Tensor:
        """Return the integers of a slice."""
        rows, columns = index or (slice(0, self._shape[0]), slice(None))
        count, wide = rows.stop - rows.start, len(range(*columns.indices(self._shape[1])))
        found = torch.empty(count, wide, dtype=self._form.dtype)
        scale = torch.empty(count, self._scales, dtype=torch.float32)
        size = max(1, _BLOCK // (self._shape[1] * self._form.packed))
        for start in range(rows.start, rows.stop, size):
            block = slice(start, min(start + size, rows.stop))
            here = slice(block.start - rows.start, block.stop - rows.start)
            whole, scale[here] = self._form.quantise(self._read((block, slice(None))))
            found[here] = whole[:, columns]
        if not scale.isfinite().all():
            raise not_finite(self._name)
        self._kept[rows.start, rows.stop] = scale
        return found

    def scale(self, index: Index) -> Tensor:
        """Return the scales of a slice."""
        rows, columns = index or (slice(0, self._shape[0]), slice(None))
        if (rows.start, rows.stop) not in self._kept:
            self.weight((rows, slice(0, 0)))
        return self._kept[rows.start, rows.stop][:, columns]
