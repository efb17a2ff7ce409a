"""Tensor parallelism: a decoder's linear layers split over the ranks of tp by its own plan.

    [1, U, D] ── q, k, v: COLUMNS ──> heads of this rank ─ attention ─ o: ROWS ─ sum over tp ─> [1, U, D]
              └─ gate, up: COLUMNS ─> its hidden units ─────────── down: ROWS ─ sum over tp ─> [1, U, D]

Each split layer uses torch's own parallel style: a DTensor weight, plain tensors in and out. Replicated
parameters stay plain, except the bias of a ROWS layer, which torch makes a replicated DTensor.

Legend: U packed tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from rillflow.errors import ModelError
from rillflow.models.int8 import Int8Linear
from rillflow.models.tensor_plan import Style
from rillflow.placement.mesh import divisors

_EVEN = {Style.COLUMNS: 0, Style.ROWS: 1, Style.SPLIT_ROWS: 1}
"""Dim that tp must divide, because one layer's output slice is the next one's input slice."""


def cut_tensors(module: nn.Module, plan: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Split the module's weights in place; before, every rank has the same whole weights.

    Args:
        module: a decoder.
        plan: see ``models.tensor_plan``.
        mesh: the tp axis.

    Raises:
        ModelError: a layer's outputs or inputs cannot be split evenly.
    """
    require_even(module, plan, mesh.size())
    parts = dict(module.named_modules())
    twins = _twins(parts[name] for name in plan if plan[name] is not Style.SUMMED)
    for name, style in plan.items():
        if style is not Style.SUMMED:
            _cut(parts[name], style, mesh)
    for one, other in twins:
        other.weight = one.weight


def require_even(module: nn.Module, plan: Mapping[str, Style], tp: int) -> None:
    """Refuse a size of tp that does not divide a layer's split dim.

    A head's outputs and an embedding's tokens may be split unevenly.

    Raises:
        ModelError: it shows the division.
    """
    parts = dict(module.named_modules())
    for name, style in plan.items():
        if style not in _EVEN:
            continue
        dim = _EVEN[style]
        length = parts[name].weight.shape[dim]
        if length % tp:
            raise ModelError(
                f"tp is {tp} and {name} has {length} {'inputs' if dim else 'outputs'}",
                why=f"every rank needs the same number; {length} / {tp} leaves {length % tp}",
                fix=f"choose tp among {', '.join(map(str, divisors(length)))}",
            )


def own(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory, without a gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the tensors; the CPU if there are none."""
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter's gradient, split like the parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return gradient


def _cut(part: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    parallelize_module(part, mesh, _style(style), src_data_rank=None)
    if isinstance(part, Int8Linear) and not isinstance(part.scale, DTensor):  # torch splits no scales
        whole = distribute_tensor(part.scale, mesh, [Replicate()], src_data_rank=None)
        part.scale = nn.Parameter(whole, requires_grad=False)


def _style(style: Style) -> ParallelStyle:
    whole = Replicate()
    if style is Style.COLUMNS:
        return ColwiseParallel()
    if style is Style.GATHERED:
        return ColwiseParallel(output_layouts=whole)
    if style is Style.ROWS:
        return RowwiseParallel()
    return RowwiseParallel(input_layouts=whole)


def _twins(parts: Iterable[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """Return pairs of modules that share a weight."""
    found: dict[int, nn.Module] = {}
    return [
        (found[id(part.weight)], part)
        for part in parts
        if found.setdefault(id(part.weight), part) is not part
    ]
