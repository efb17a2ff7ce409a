"""The parts of a decoder that speak to other ranks when its weights are shared out; without gradients.

    RowsLinear       x_r ─> w_r x_r ─ sum ─> + bias, once
    GatheredLinear   x ─> w_r x + b_r ─ everyone's, side by side
    Lookup           token ─ foreign ones count as 0 ─> row ─ sum: one rank has it, the others add zeros
    OwnHeads         all heads ─ this rank's ─> the attention plan

A layer whose outputs stay shared out is a plain ``nn.Linear`` of the local sizes, and is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rillflow.cluster.ranks import Ranks
from rillflow.models.attention import AttentionPlan, causal
from rillflow.placement.slices import Interval


class RowsLinear(nn.Linear):
    """A linear layer whose inputs are shared out: outputs are added up, then the bias.

    Args:
        inputs: which ones are this rank's.
        outputs: how many.
        bias: whether it has one.
        split: whether it is given all inputs, and takes its own.
        ranks: those who share the inputs.
    """

    def __init__(self, inputs: Interval, outputs: int, bias: bool, split: bool, ranks: Ranks) -> None:
        super().__init__(inputs[1] - inputs[0], outputs, bias, device="meta")
        self._inputs = slice(*inputs) if split else None
        self._ranks = ranks

    def forward(self, states: Tensor) -> Tensor:
        """[..., outputs]."""
        if self._inputs is not None:
            states = states[..., self._inputs]
        total = nn.functional.linear(states, self.weight)
        self._ranks.sum_([total])
        return total if self.bias is None else total + self.bias


class GatheredLinear(nn.Linear):
    """A linear layer whose outputs are shared out and put side by side again.

    Args:
        inputs: how many.
        widths: outputs of every rank.
        bias: whether it has one.
        ranks: those who share the outputs.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], bias: bool, ranks: Ranks) -> None:
        super().__init__(inputs, widths[ranks.rank], bias, device="meta")
        self._widths = widths
        self._ranks = ranks

    def forward(self, states: Tensor) -> Tensor:
        """[..., outputs of all ranks]."""
        own = super().forward(states)
        filled = nn.functional.pad(own, (0, max(self._widths) - own.shape[-1]))
        everyone = self._ranks.stack(filled)
        return torch.cat([part[..., :width] for part, width in zip(everyone, self._widths, strict=True)], -1)


class Lookup:
    """Hooks around an embedding that has the rows of some tokens.

    Args:
        rows: which tokens are this rank's.
        ranks: those who share them.
    """

    def __init__(self, rows: Interval, ranks: Ranks) -> None:
        self._start, self._stop = rows
        self._ranks = ranks
        self._foreign: Tensor | None = None

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tokens as rows of this rank; foreign ones as its first."""
        (tokens,) = inputs
        self._foreign = (tokens < self._start) | (tokens >= self._stop)
        return (torch.where(self._foreign, 0, tokens - self._start),)

    def after(self, _: nn.Module, __: tuple[Tensor, ...], found: Tensor) -> Tensor:
        """[..., size] the rows, whoever has them."""
        assert self._foreign is not None  # ``before`` has run
        found = found.masked_fill(self._foreign[..., None], 0.0)
        self._foreign = None
        self._ranks.sum_([found])
        return found


class OwnHeads:
    """An attention plan that is given all heads in some layers and attends with this rank's.

    Args:
        plan: attends; None for plain causal attention.
        layers: those that give all heads.
        rank: which part is this rank's.
        size: how many parts there are.
    """

    def __init__(self, plan: AttentionPlan | None, layers: frozenset[int], rank: int, size: int) -> None:
        self._plan = plan
        self._layers = layers
        self._rank, self._size = rank, size

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """See AttentionPlan."""
        if layer in self._layers:
            query, key, value = (
                states.chunk(self._size, dim=1)[self._rank] for states in (query, key, value)
            )
        if self._plan is None:
            return causal(query, key, value, scaling, window).transpose(1, 2)
        return self._plan.attend(layer, query, key, value, scaling, window)
