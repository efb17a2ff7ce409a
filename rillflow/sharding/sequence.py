"""Sequence parallelism: between a layer's matrix products, every tp rank keeps its part of the tokens.

    [1, U/t, D] ─ norm ─ join ─> [1, U, D] ─ attention, split by tp ─ own part ─ + ─> [1, U/t, D]
                       ─ norm ─ join ─> [1, U, D] ─ feed-forward, split by tp ─ own part ─ + ─> [1, U/t, D]

The replicated parts of a layer, its norms and sums, take 1 / t of the memory and of the work, and so do the
layers' inputs, which recomputation keeps. The first layer of a stage splits the tokens, the last one joins
them. Method of Megatron, arXiv 2205.05198, section 4.2.2; by hooks, so that the module's own code runs.

Legend: U packed tokens, a multiple of t; t ranks of tp; D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from rillflow.workers.collectives import Ranks


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
