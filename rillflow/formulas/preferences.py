"""Preferences: losses of whole answers, those of pairs among them, and the rewards that they imply.

    totals [B] of answers, policy's and reference's ─ AnswerLossConfig.losses ─> a loss of each unit
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

Legend: P pairs, B answers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from rillflow.formulas.losses import TokenLosses
from rillflow.formulas.shapes import same_length
from rillflow.graph.loss import LossSection

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged


@dataclass(frozen=True, eq=False)
class AnswerTotals:
    """Totals of answers; those of one unit are neighbours, in the order of their places."""

    totals: Tensor
    """[B] log pi of the whole answer, with a gradient."""
    lengths: Tensor
    """[B] number of its tokens."""
    reference: Tensor | None = None
    """[B] log ref of the answer; None if a loss has no reference."""

    def places(self, unit: int) -> list[AnswerTotals]:
        """Return the first answers of all units of ``unit`` answers, then the second ones, and so on."""
        columns = [self.totals, self.lengths, *([] if self.reference is None else [self.reference])]
        both = zip(*(each.view(-1, unit).unbind(1) for each in columns), strict=True)
        return [AnswerTotals(*each) for each in both]

    @property
    def ratios(self) -> Tensor:
        """[B] log pi - log ref; log pi if there is no reference."""
        return self.totals if self.reference is None else self.totals - self.reference.detach()

    @property
    def means(self) -> Tensor:
        """[B] mean log pi of a token."""
        return self.totals / self.lengths

    def rewards(self, config: PairLossConfig) -> Tensor:
        """Return [B], beta x the log ratio of the answer, or of its mean token."""
        return config.scale * (self.ratios / self.lengths if config.by_token else self.ratios)


class AnswerLossConfig(LossSection):
    """A loss of whole answers, whose totals a policy's log probabilities sum to.

    Answers to one prompt form a unit with one loss: sample k is its answer at place k.

    Example:
        class ListConfig(AnswerLossConfig):
            area: ClassVar[str] = "lists"
            unit: ClassVar[int] = 4

            def losses(self, answers, fields): ...
    """

    loss_kind: ClassVar[str] = "answers"
    area: ClassVar[str]
    """Area of its metrics."""
    unit: ClassVar[int] = 1
    """Number of answers of a unit."""
    has_divergence: ClassVar[bool] = False
    """Whether samples from ``unit`` on are not trained: they measure the field ``divergence``, which is
    max(0, mean of log pi - log ref) over all of them in the minibatch, at the weights before the step.
    """

    @property
    def rows_together(self) -> int:
        """Rows of one prompt: the answers of a unit, and one more if it measures the divergence."""
        return self.unit + self.has_divergence

    @abstractmethod
    def losses(self, answers: AnswerTotals, fields: Mapping[str, Tensor]) -> TokenLosses:
        """Return the losses of units, [B / unit].

        Args:
            answers: totals of B answers.
            fields: [B] the fields that the section reads, and ``divergence`` if it has one.
        """


PairKind = Literal["dpo", "ipo", "hinge", "simpo", "orpo"]
"""Losses of pairs: ``formulas.preferences``."""
_SCALES: dict[PairKind, float] = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "simpo": 2.0, "orpo": 0.1}
"""Default beta of each kind, from its paper or its own page."""


class PairLossConfig(AnswerLossConfig):
    """The loss of pairs of answers; see docs/algorithms/preferences.md for the equations."""

    area: ClassVar[str] = "pairs"
    unit: ClassVar[int] = 2

    kind: PairKind = Field("dpo", description="Preference loss; simpo and orpo need no reference.")
    beta: float | None = Field(
        None,
        gt=0,
        description="Scale of the implicit reward; for orpo, the weight of the odds ratio. Left out, the "
        "paper's value.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed probability that a pair's label is wrong; for dpo and simpo."
    )
    nll: float | None = Field(
        None,
        ge=0,
        description="Weight of the chosen answers' mean token loss; left out, 1 for orpo and 0 for the "
        "others.",
    )
    gamma: float | None = Field(None, ge=0, description="Target margin of simpo; left out, 1.")
    by_length: bool | None = Field(
        None,
        description="Whether dpo, ipo and hinge compare token means instead of sums; left out, only ipo "
        "does.",
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that the loss is computed from."""
        return ("reference_totals",) if self.has_reference else ()

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with a reference."""
        return self.kind not in ("simpo", "orpo")

    @property
    def scale(self) -> float:
        """Beta: the configured value, else the kind's default."""
        return _SCALES[self.kind] if self.beta is None else self.beta

    @property
    def by_token(self) -> bool:
        """Whether answers are compared by their means over tokens."""
        return self.kind not in ("dpo", "hinge") if self.by_length is None else self.by_length

    @property
    def nll_weight(self) -> float:
        """Weight of the chosen answers' own loss."""
        return float(self.kind == "orpo") if self.nll is None else self.nll

    @property
    def target_margin(self) -> float:
        """Margin that is subtracted before the loss."""
        return 0.0 if self.kind != "simpo" else 1.0 if self.gamma is None else self.gamma

    def losses(self, answers: AnswerTotals, fields: Mapping[str, Tensor]) -> TokenLosses:
        """See AnswerLossConfig."""
        del fields
        return pair_loss(*answers.places(self.unit), config=self)

    @model_validator(mode="after")
    def _is_read(self) -> PairLossConfig:
        if self.gamma is not None and self.kind != "simpo":
            raise ValueError(
                f"gamma is {self.gamma:g} and kind is {self.kind}: only simpo has a target margin"
            )
        if self.by_length is False and not self.has_reference:
            raise ValueError(f"by_length is false and kind is {self.kind}, which uses token means")
        if self.label_smoothing and self.kind not in ("dpo", "simpo"):
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g} and kind is {self.kind}: "
                "it applies only to dpo and simpo"
            )
        return self


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
