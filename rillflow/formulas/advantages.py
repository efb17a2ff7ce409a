"""Advantages: how much better a row did than could be expected. Legend: B rows, G groups."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rillflow.errors import FormulaError, nearest
from rillflow.formulas.shapes import same_length

EPSILON = 1e-6
"""Added to a group's deviation."""


def group_advantages(
    rewards: Tensor, groups: Tensor, valid: Tensor, *, scale: Literal["std", "off"]
) -> Tensor:
    """[B] each row's reward minus the mean of its group, divided by the group's deviation if asked.

    A_i = (R_i - mean) / (std + 1e-6), the deviation that of a sample (G - 1); GRPO, arXiv 2402.03300.
    Without the division it is Dr.GRPO's (arXiv 2503.20783), and G/(G-1) times it is RLOO's
    (arXiv 2402.14740). Equal rewards give exactly 0.

    Args:
        rewards: [B] float.
        groups: [B] int64; rows of one group share a number.
        valid: [B] bool; a row without a score gets 0 and does not count in its group.
        scale: ``std`` divides, ``off`` does not.

    Raises:
        FormulaError: shapes differ, or ``scale`` is unknown.
    """
    same_length("group_advantages", rewards=rewards, groups=groups, valid=valid)
    if scale not in ("std", "off"):
        raise FormulaError(f"group_advantages: scale is {scale!r}", fix=nearest(scale, ("std", "off")))
    names, group = torch.unique(groups, return_inverse=True)
    zeros = rewards.new_zeros(len(names))
    size = zeros.index_add(0, group, valid.to(rewards.dtype)).clamp_min(1)
    # Measured from the least of their group, equal rewards are exactly 0 whatever their mean rounds to.
    least = torch.full_like(zeros, torch.inf).scatter_reduce(
        0, group, rewards.masked_fill(~valid, torch.inf), "amin"
    )
    rise = (rewards - least[group]).masked_fill(~valid, 0)
    mean = zeros.index_add(0, group, rise) / size
    centred = (rise - mean[group]).masked_fill(~valid, 0)
    if scale == "off":
        return centred
    variance = zeros.index_add(0, group, centred.square()) / (size - 1).clamp_min(1)
    return centred / (variance.sqrt()[group] + EPSILON)
