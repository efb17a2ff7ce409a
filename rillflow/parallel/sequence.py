"""Sequence parallelism: between the products of a layer every tp rank keeps its share of the tokens.

    [1, U/t, D] ─ norm ─ join ─> [1, U, D] ─ attention, cut by tp ─ own share ─ + ─> [1, U/t, D]
                       ─ norm ─ join ─> [1, U, D] ─ feed-forward, cut by tp ─ own share ─ + ─> [1, U/t, D]

What tp leaves whole in a layer, its norms and sums, takes 1 / t of the memory and of the work, and so do the
layers' inputs, which are all that recomputation keeps. The first layer of a stage takes its share, the last
one joins. Megatron's, arXiv 2205.05198, section 4.2.2; by hooks, so that the module's own code runs.

Legend: U packed tokens, a multiple of t; t ranks of tp; D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from rillflow.cluster.ranks import Ranks


def share_tokens(layers: Sequence[nn.Module], cut: Collection[nn.Module], tp: Ranks) -> set[int]:
    """Let the layers of a stage share its tokens.

    Args:
        layers: in the order of their calls; what they are called with first, or as ``hidden_states``, and
            what they return, alone or first, is [1, U, D], and so it is with their parts that are cut.
        cut: the modules whose weights tp cuts.
        tp: the ranks that share.

    Returns:
        The ids of the parameters that see this rank's tokens alone: their gradients lack the others' shares.
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
    """Change the states that a module is called with, or those that it returns."""

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
    """Everyone's [1, U, D] to this rank's [1, U/t, D], or the other way; gradients go the way back.

    Each rank has the whole gradient of what was joined: what is cut by tp adds it up.
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
