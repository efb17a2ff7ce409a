"""Unpaired: the loss of single answers, each good or bad (Ethayarajh et al., arXiv 2402.01306).

    totals [B] of the answers, labels, the policy's overall drift ─ unpaired_loss ─> [B] losses

Legend: B answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rillflow.formulas.losses import TokenLosses
from rillflow.formulas.preferences import AnswerLossConfig, AnswerTotals
from rillflow.formulas.shapes import same_length

if TYPE_CHECKING:
    from torch import Tensor


class UnpairedLossConfig(AnswerLossConfig):
    """The loss of single answers; see docs/algorithms/preferences.md for the equation."""

    area: ClassVar[str] = "answers"
    has_divergence: ClassVar[bool] = True

    beta: float = Field(0.1, gt=0, description="Scale of the implicit reward.")
    good_weight: float = Field(1.0, ge=0, description="Weight of desirable answers (lambda_D in the paper).")
    bad_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of undesirable answers (lambda_U in the paper). The paper balances the total "
        "weight of both kinds.",
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that the loss is computed from."""
        return ("label", "reference_totals")

    def losses(self, answers: AnswerTotals, fields: Mapping[str, Tensor]) -> TokenLosses:
        """See AnswerLossConfig."""
        return unpaired_loss(answers, fields["label"].bool(), fields["divergence"], config=self)


def unpaired_loss(
    answers: AnswerTotals, is_good: Tensor, divergence: Tensor, *, config: UnpairedLossConfig
) -> TokenLosses:
    """Return [B], KTO's losses of single answers (arXiv 2402.01306, 7).

    They are w (1 - s(beta (d - z))) for good answers and w (1 - s(beta (z - d))) for bad ones, with
    d = log pi - log ref of the answer. The policy's overall drift z is the reward that counts as neither good
    nor bad. No gradient flows into z.

    Args:
        answers: totals of single answers.
        is_good: [B] bool.
        divergence: [B] z, not below 0.
        config: beta, and w for good and for bad answers.

    Raises:
        FormulaError: shapes differ.
    """
    import torch

    same_length("unpaired_loss", totals=answers.totals, is_good=is_good, divergence=divergence)
    ratios, apart = answers.ratios, divergence.detach()
    side = torch.where(is_good, 1.0, -1.0).to(ratios)
    weights = torch.where(is_good, config.good_weight, config.bad_weight).to(ratios)
    losses = weights * (1 - torch.sigmoid(config.beta * side * (ratios - apart)))
    rewards = config.beta * ratios.detach()
    metrics = {"answers/accuracy/mean": side * rewards > 0, "answers/divergence/mean": apart}
    for name, some in (("good", is_good), ("bad", ~is_good)):
        if some.any():
            metrics[f"answers/{name}_reward/mean"] = rewards[some]
            metrics[f"answers/{name}_logprob/mean"] = answers.totals.detach()[some]
    return TokenLosses(losses=losses, metrics=metrics)
