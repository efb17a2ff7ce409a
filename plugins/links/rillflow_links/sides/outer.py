"""Outer step: move the global weights by the sides' pseudo-gradients, with Nesterov momentum.

    g = sum_i share_i (base_i - local_i)      pseudo-gradient; share_i = tokens_i / all tokens
    m = momentum m + g
    weights = weights - lr (g + momentum m)   as torch.optim.SGD(nesterov=True)

DiLoCo (Douillard et al., arXiv 2311.08105), algorithm 1. All sums are float64, in the order of sides' names;
products and sums are separate operations, so that every machine computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """Settings of the outer step."""

    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum; 0 with ``lr`` 1 is the average of the sides' weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OuterState:
    """One tensor of the global model and its momentum, of equal shape and dtype."""

    weights: Tensor
    """The weights."""
    momentum: Tensor
    """Sum of earlier pseudo-gradients; zeros at the start."""


def shares_of(tokens: Sequence[int]) -> list[float]:
    """Return each contribution's share of the tokens; equal shares if nobody counted any."""
    total = sum(tokens)
    return [each / total for each in tokens] if total else [1 / len(tokens)] * len(tokens)


def outer_step(
    state: OuterState, gradients: Sequence[Tensor], shares: Sequence[float], settings: OuterSettings
) -> OuterState:
    """Return the next version of one tensor.

    Args:
        state: the newest version.
        gradients: pseudo-gradients of its shape, in the order of sides' names.
        shares: weight of each pseudo-gradient.
        settings: rate and momentum.
    """
    total = torch.zeros_like(state.weights, dtype=torch.float64)
    for gradient, share in zip(gradients, shares, strict=True):
        total += gradient.double() * share
    momentum = state.momentum.double() * settings.momentum + total
    step = total + momentum * settings.momentum
    weights = state.weights.double() - step * settings.lr
    dtype = state.weights.dtype
    return OuterState(weights=weights.to(dtype), momentum=momentum.to(dtype))
