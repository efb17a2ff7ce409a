"""Aggregation: combine token losses into one loss that is the same for any partition of the minibatch.

    loss mask ──> weight of every token, one denominator for the whole minibatch
    micro-batch or rank: sum(weight x loss of its tokens) ── added up ──> / denominator

The denominator is counted before the minibatch is split, so no part divides by a count of its own. A row
without a loss token counts in no aggregation.
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
    """Weights of a minibatch's loss: sum(values x token losses) / denominator."""

    values: Ragged
    """float64, aligned to the tokens; 0 where the policy did not sample."""
    denominator: float
    """Denominator of the whole minibatch; 0 if it has no loss token."""


def loss_weights(loss_mask: Ragged, aggregation: Aggregation, constant: int = 0) -> LossWeights:
    """Return the weights and the denominator of a minibatch.

    token_mean: weight 1, over the number of loss tokens (DAPO, arXiv 2503.14476). sequence_mean: weight 1 /
    |o|, over the number of rows with a loss token (GRPO, arXiv 2402.03300). constant: weight 1, over the
    number of such rows x constant (Dr.GRPO, arXiv 2503.20783).

    Args:
        loss_mask: bool, True where the policy sampled the token.
        aggregation: name of the aggregation.
        constant: divisor of a row; only for ``constant``.

    Raises:
        FormulaError: the aggregation is unknown, or ``constant`` is chosen without a positive divisor.
    """
    known("loss_weights", Aggregation, aggregation=aggregation)
    if aggregation == "constant" and constant < 1:
        raise FormulaError(
            f"loss_weights: constant is {constant}",
            why="the constant aggregation divides every row's sum by the constant",
            fix="set it to the longest answer's number of tokens",
        )
    weights, count = loss_mask.values.double(), loss_mask.sums()
    if aggregation == "token_mean":
        return LossWeights(values=loss_mask.with_values(weights), denominator=float(count.sum()))
    if aggregation == "sequence_mean":
        weights, constant = weights / loss_mask.expand(count.double()).clamp_min(1), 1
    total = float((count > 0).sum() * constant)
    return LossWeights(values=loss_mask.with_values(weights), denominator=total)
