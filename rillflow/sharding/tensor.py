"""Tensor parallelism: a decoder's linear layers split over the ranks of tp by its own plan, and its tokens.

    [1, U, D] ── q, k, v: COLUMNS ──> heads of this rank ─ attention ─ o: ROWS ─ sum over tp ─> [1, U, D]
              └─ gate, up: COLUMNS ─> its hidden units ─────────── down: ROWS ─ sum over tp ─> [1, U, D]

Each split layer uses torch's own parallel style: a DTensor weight, plain tensors in and out. Replicated
parameters stay plain, except the bias of a ROWS layer, which torch makes a replicated DTensor.

Sequence parallelism: between a layer's matrix products, every tp rank keeps its part of the tokens.

    [1, U/t, D] ─ norm ─ join ─> [1, U, D] ─ attention, split by tp ─ own part ─ + ─> [1, U/t, D]
                       ─ norm ─ join ─> [1, U, D] ─ feed-forward, split by tp ─ own part ─ + ─> [1, U/t, D]

The replicated parts of a layer, its norms and sums, take 1 / t of the memory and of the work, and so do the
layers' inputs, which recomputation keeps. The first layer of a stage splits the tokens, the last one joins
them. Method of Megatron, arXiv 2205.05198, section 4.2.2; by hooks, so that the module's own code runs.

Legend: U packed tokens, a multiple of t with sequence parallelism; t ranks of tp; D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from rillflow.errors import ModelError
from rillflow.models.quantised import QuantisedLinear
from rillflow.models.tensor_plan import DIMS, Style
from rillflow.placement.mesh import divisors
from rillflow.workers.collectives import Ranks

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
        part, what = parts[name], "inputs" if dim else "outputs"
        length = part.weight.shape[dim]
        if dim and isinstance(part, QuantisedLinear) and part.has_blocks:
            length, what = part.scale.shape[dim], f"blocks of {part.form.block} inputs"
        if length % tp:
            raise ModelError(
                f"tp is {tp} and {name} has {length} {what}",
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
    if not isinstance(part, QuantisedLinear):
        return
    scale: Tensor = part.scale  # torch splits the outputs' scales, but not those of blocks of inputs
    if not isinstance(scale, DTensor):
        scale = distribute_tensor(scale, mesh, [Replicate()], src_data_rank=None)
    if part.has_blocks and DIMS[style] == 1:
        scale = scale.redistribute(placements=[Shard(1)])
    part.scale = nn.Parameter(scale.detach(), requires_grad=False)


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


def share_tokens(layers: Sequence[nn.Module], cut: Collection[nn.Module], tp: Ranks) -> set[int]:
    """Split the tokens over tp ranks in the layers of a stage.

    Args:
        layers: layers in the order of their calls. Their first argument, or ``hidden_states``, and their
            result, alone or first, is [1, U, D]; so it is for their submodules that are split.
        cut: modules whose weights tp splits.
        tp: the ranks that divide the tokens.

    Returns:
        Ids of the parameters used on this rank's tokens only: their gradients lack the other ranks' parts.
    """

    def own(states: Tensor) -> Tensor:
        return _Crossing.apply(states, tp, False)  # type: ignore[no-any-return,no-untyped-call]

    def join(states: Tensor) -> Tensor:
        return _Crossing.apply(states, tp, True)  # type: ignore[no-any-return,no-untyped-call]

    partial: set[int] = set()
    for layer in layers:
        partial |= {id(parameter) for parameter in layer.parameters()}
        for part in layer.children():
            if any(inner in cut for inner in part.modules()):
                partial -= {id(parameter) for parameter in part.parameters()}
                _wrap(part, before=join, after=own)
    _wrap(layers[0], before=own)
    _wrap(layers[-1], after=join)
    return partial


Change = Callable[[Tensor], Tensor]


def _wrap(part: nn.Module, *, before: Change | None = None, after: Change | None = None) -> None:
    """Hook a module to change its input states, its output states, or both."""

    def given(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        assert before is not None
        if arguments:
            return (before(arguments[0]), *arguments[1:]), named
        return arguments, named | {"hidden_states": before(named["hidden_states"])}

    def returned(_: nn.Module, __: Any, found: Any) -> Any:
        assert after is not None
        return (after(found[0]), *found[1:]) if isinstance(found, tuple) else after(found)

    if before is not None:
        part.register_forward_pre_hook(given, with_kwargs=True)
    if after is not None:
        part.register_forward_hook(returned)


class _Crossing(Function):
    """Map [1, U, D] of all ranks to this rank's [1, U/t, D], or back; gradients take the reverse way.

    Each rank has the whole gradient of joined states: modules split by tp sum it.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, tp: Ranks, joins: bool) -> Tensor:
        ctx.tp, ctx.joins = tp, joins
        return _joined(states, tp) if joins else _own(states, tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = _own if ctx.joins else _joined
        return back(gradients[0], ctx.tp), None, None


def _own(states: Tensor, tp: Ranks) -> Tensor:
    return states.chunk(tp.size, 1)[tp.rank].contiguous()


def _joined(states: Tensor, tp: Ranks) -> Tensor:
    return tp.stack(states[0]).flatten(0, 1)[None]
