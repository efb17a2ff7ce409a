"""Aggregation: how the losses of tokens become one loss that any partition computes alike.

    loss mask ──> weight of every token, one denominator for the whole minibatch
    micro-batch or rank: sum(weight x loss of its tokens) ── added up ──> / denominator

The denominator is counted before the minibatch is cut, so no part divides by a count of its own. A row
without a loss token counts in no aggregation: it is as if it were not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rillflow.errors import FormulaError
from rillflow.formulas.shapes import known
from rillflow.records.ragged import Ragged

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossWeights:
    """What a minibatch's loss is made of: sum(values x token losses) / denominator."""

    values: Ragged
    """float64, aligned to the tokens; 0 where the policy did not sample."""
    denominator: float
    """The whole minibatch's; 0 when it has no loss token."""


def loss_weights(loss_mask: Ragged, aggregation: Aggregation, constant: int = 0) -> LossWeights:
    """The weights and the denominator of a minibatch.

    token_mean: 1 and the number of loss tokens (DAPO, arXiv 2503.14476). sequence_mean: 1 / |o| and the
    number of rows with a loss token (GRPO, arXiv 2402.03300). constant: 1 and the same rows x constant
    (Dr.GRPO, arXiv 2503.20783).

    Args:
        loss_mask: bool, True where the policy sampled the token.
        aggregation: which of the three.
        constant: the divisor of a row; for ``constant`` alone.

    Raises:
        FormulaError: the aggregation is unknown, or ``constant`` is asked for without a positive one.
    """
    known("loss_weights", Aggregation, aggregation=aggregation)
    if aggregation == "constant" and constant < 1:
        raise FormulaError(
            f"loss_weights: constant is {constant}",
            why="the constant aggregation divides every row's sum by it",
            fix="give the longest answer's number of tokens",
        )
    weights, count = loss_mask.values.double(), loss_mask.sums()
    if aggregation == "token_mean":
        return LossWeights(values=loss_mask.with_values(weights), denominator=float(count.sum()))
    if aggregation == "sequence_mean":
        weights, constant = weights / loss_mask.expand(count.double()).clamp_min(1), 1
    total = float((count > 0).sum() * constant)
    return LossWeights(values=loss_mask.with_values(weights), denominator=total)
