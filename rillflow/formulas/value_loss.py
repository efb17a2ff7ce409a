"""The critic's loss of each token. Legend: N loss tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rillflow.formulas.shapes import same_length


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """[N] half the squared error of each value, the larger of the value's and the clipped value's.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 (PPO's value loss: arXiv 2005.12729,
    section 3; halved, so that at V = V_old the gradient is V - R). A value that moved further
    than ``clip`` and is nearer to its return than the bound has no gradient.

    Args:
        values: [N] the critic's, which gradients flow into.
        old_values: [N] the critic's before the update; no gradient flows into them.
        returns: [N] what the values should be; no gradient flows into them.
        clip: how far a value may move from the old one; 0 for no bound.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("clipped_value_loss", values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    losses = (values - returns).square()
    if clip:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (bounded - returns).square())
    return losses / 2
