"""Preferences: losses and rewards of a policy that learns from pairs or from labelled answers.

    totals [P] of the chosen and of the rejected, policy's and reference's ─ pair_loss ─> [P] losses
    totals [B] of held-out answers ─ implicit_rewards, logprob_rewards ─> rewards [B]

A total is the log probability of a whole answer, the sum over its tokens. With
h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected), l = log pi / |answer|, s the logistic function:

| kind | loss of a pair | source |
|---|---|---|
| dpo | -(1 - e) log s(beta h) - e log s(-beta h) | arXiv 2305.18290; e: its public code |
| ipo | (h - 1 / (2 beta))^2, h of token means | arXiv 2310.12036 |
| hinge | max(0, 1 - beta h) | arXiv 2305.10425, 2309.06657 |
| simpo | dpo's with beta (l_chosen - l_rejected) - gamma in place of beta h | arXiv 2405.14734 |
| orpo | -beta log s(log odds_chosen - log odds_rejected), odds = e^l / (1 - e^l) | arXiv 2403.07691 |

With ``by_length``, dpo and hinge also use h of token means: an answer's log ratio over its tokens. The term
nll x (-l_chosen) may be added to each, as RPO adds it to dpo (arXiv 2404.19733), and ORPO to its odds.

Legend: P pairs, B rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.formulas.config import PairLossConfig, UnpairedLossConfig
from rillflow.formulas.losses import TokenLosses
from rillflow.formulas.shapes import same_length

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged


@dataclass(frozen=True, eq=False)
class AnswerTotals:
    """Totals of one answer of each pair."""

    totals: Tensor
    """[P] log pi of the whole answer, with a gradient."""
    lengths: Tensor
    """[P] number of its tokens."""
    reference: Tensor | None = None
    """[P] log ref of the answer; None if a kind has no reference."""

    @property
    def ratios(self) -> Tensor:
        """[P] log pi - log ref; log pi if there is no reference."""
        return self.totals if self.reference is None else self.totals - self.reference.detach()

    @property
    def means(self) -> Tensor:
        """[P] mean log pi of a token."""
        return self.totals / self.lengths

    def rewards(self, config: PairLossConfig) -> Tensor:
        """Return [P], beta x the log ratio of the answer, or of its mean token."""
        return config.scale * (self.ratios / self.lengths if config.by_token else self.ratios)


def pair_loss(chosen: AnswerTotals, rejected: AnswerTotals, *, config: PairLossConfig) -> TokenLosses:
    """Return [P], the losses of pairs, from the table at the head of this module.

    Args:
        chosen: totals of the better answers.
        rejected: totals of the other answers.
        config: the kind and its settings.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("pair_loss", chosen=chosen.totals, rejected=rejected.totals)
    beta, kind = config.scale, config.kind
    rewards = [each.rewards(config) for each in (chosen, rejected)]
    margin = rewards[0] - rewards[1]
    if kind == "orpo":
        losses = beta * smoothed(log_odds(chosen.means) - log_odds(rejected.means), 0.0)
    elif kind == "ipo":
        losses = (margin / beta - 1 / (2 * beta)).square()
    elif kind == "hinge":
        losses = (1 - margin).clamp_min(0)
    else:
        losses = smoothed(margin - config.target_margin, config.label_smoothing)
    metrics = {
        "pairs/accuracy/mean": margin > 0,
        "pairs/margin/mean": margin,
        "pairs/chosen_reward/mean": rewards[0],
        "pairs/rejected_reward/mean": rewards[1],
        "pairs/chosen_logprob/mean": chosen.totals,
        "pairs/rejected_logprob/mean": rejected.totals,
    }
    if chosen.reference is not None:
        metrics["pairs/drift/mean"] = (chosen.ratios + rejected.ratios) / 2
    if config.nll_weight:
        metrics["pairs/nll/mean"] = -chosen.means
        losses = losses - config.nll_weight * chosen.means
    return TokenLosses(losses=losses, metrics={name: each.detach() for name, each in metrics.items()})


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


def smoothed(margin: Tensor, smoothing: float) -> Tensor:
    """Return [P] -(1 - e) log s(m) - e log s(-m): a label is wrong with probability e."""
    from torch.nn.functional import logsigmoid

    right = -logsigmoid(margin)
    return right if not smoothing else (1 - smoothing) * right - smoothing * logsigmoid(-margin)


def log_odds(logprobs: Tensor) -> Tensor:
    """Return [P] log p - log(1 - p) of log probabilities below 0, exact at both ends."""
    import torch

    below = logprobs.clamp_max(-1e-12)
    rest = torch.where(below > -math.log(2), (-below.expm1()).log(), (-below.exp()).log1p())
    return below - rest


def implicit_rewards(
    policy_totals: Tensor, reference_totals: Tensor, loss_mask: Ragged, *, config: PairLossConfig
) -> Tensor:
    """Return [B] beta (log pi - log ref): the reward that the policy maximises (arXiv 2305.18290, 5).

    Args:
        policy_totals: [B] log pi of whole answers.
        reference_totals: [B] log ref of whole answers.
        loss_mask: True at the answers' tokens.
        config: beta, and whether rewards are of token means.
    """
    same_length("implicit_rewards", policy_totals=policy_totals, reference_totals=reference_totals)
    return AnswerTotals(policy_totals, loss_mask.sums().clamp_min(1), reference_totals).rewards(config)


def logprob_rewards(policy_totals: Tensor, loss_mask: Ragged, *, config: PairLossConfig) -> Tensor:
    """Return [B] beta log pi / |answer|: the reward of kinds without a reference (arXiv 2405.14734, 3).

    Args:
        policy_totals: [B] log pi of whole answers.
        loss_mask: True at the answers' tokens.
        config: beta.
    """
    return AnswerTotals(policy_totals, loss_mask.sums().clamp_min(1)).rewards(config)
