"""Losses: what a minibatch's tokens cost, as terms that any partition adds up alike.

    minibatch ── prepare ──> checked fields, loss_weights, loss_denominator (one for all rows), loss_active
    [N] log probabilities + the part's fields at its loss tokens ── call ──> terms [N] ── sum / denominator

A loss sees loss tokens alone, laid end to end, and knows neither modules nor micro-batches.
Legend: N loss tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rillflow.errors import TrainingError
from rillflow.formulas.aggregation import Aggregation, loss_weights
from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.kl import LARGEST_LOG_RATIO, divergence
from rillflow.formulas.logprobs import TokenLogprobs
from rillflow.formulas.policy_loss import clipped_policy_loss, held, importance_weights, sequence_log_ratio
from rillflow.records.batch import Batch
from rillflow.records.metrics import Max, Mean, Metric
from rillflow.records.ragged import Ragged
from rillflow.train.guards import check_finite, loss_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class LossPart:
    """One micro-batch's share of a loss."""

    terms: Tensor
    """[N] weighted losses; their sum over all parts, divided by the denominator, is the loss."""
    metrics: Mapping[str, Metric]
    """Measurements of these tokens."""


class Loss(Protocol):
    """What the trainer asks of a loss."""

    name: str
    """The area of its metrics."""

    def prepare(self, minibatch: Batch) -> Batch:
        """The fields the loss reads, checked, with three more.

        ``loss_weights`` of the tokens; ``loss_denominator`` [B], the same number in every row;
        ``loss_active`` [B] bool, False where a row's terms have no gradient and it is only measured.

        Raises:
            TrainingError: a number is not finite, or there is no loss token.
        """
        ...

    def __call__(self, model: TokenLogprobs, part: Batch) -> LossPart:
        """The terms of one part; ``part`` holds the prepared fields at the loss tokens alone."""
        ...


class SupervisedLoss:
    """Cross entropy of the loss tokens, their mean: -log pi."""

    name = "supervised"

    def prepare(self, minibatch: Batch) -> Batch:
        """See Loss."""
        rows = minibatch.only("tokens", "loss_mask")
        return _weighted(rows, torch.ones(len(rows), dtype=torch.bool), "token_mean")

    def __call__(self, model: TokenLogprobs, part: Batch) -> LossPart:
        """See Loss."""
        measured = {"supervised/nll/mean": -model.logprobs, "supervised/accuracy/mean": model.likeliest}
        weights = part.ragged("loss_weights").values.to(model.logprobs.dtype)
        return LossPart(terms=-model.logprobs * weights, metrics=_measure(measured, {}))


class PolicyLoss:
    """The clipped policy loss with its companions.

    term = w (min(old / mu, cap) clip_loss(log pi - log old, A) + kl k(log pi - log ref) - entropy H)

    Rows carry ``advantages`` [B] or aligned to the tokens and, aligned to the tokens, ``sampler_logprobs``
    (mu), ``reference_logprobs`` (where the divergence is in the loss) and optionally ``old_logprobs``.
    Without those, old is pi itself: the ratio is 1, its gradient that of log pi.

    Args:
        config: the loss family's options.
        max_tokens: longest answer, the default of the constant aggregation.
    """

    name = "policy"

    def __init__(self, config: PolicyLossConfig, max_tokens: int = 0) -> None:
        self._config = config
        self._constant = config.constant or max_tokens
        self._with_reference = config.kl_paid == "loss"

    def prepare(self, minibatch: Batch) -> Batch:
        """See Loss."""
        names = ["advantages", "sampler_logprobs"]
        names += ["reference_logprobs"] if self._with_reference else []
        names += ["old_logprobs"] if "old_logprobs" in minibatch.fields else []
        rows = minibatch.only("tokens", "loss_mask", *names)
        check_finite(loss_tokens(rows), *names)
        active = _with_advantage(rows)
        if self._with_reference or self._config.entropy:
            active = torch.ones_like(active)
        return _weighted(rows, active, self._config.aggregation, self._constant)

    def __call__(self, model: TokenLogprobs, part: Batch) -> LossPart:
        """See Loss."""
        config, now = self._config, model.logprobs
        sampler = part.ragged("sampler_logprobs").values.to(now.dtype)
        old = now.detach()
        if "old_logprobs" in part.fields:
            old = part.ragged("old_logprobs").values.to(now.dtype)
        weights = part.ragged("loss_weights")
        advantages = _of_tokens(part, "advantages").to(now.dtype)
        log_ratio = now - old
        if config.ratio == "sequence":
            log_ratio = sequence_log_ratio(weights.with_values(log_ratio))
        losses = clipped_policy_loss(
            log_ratio,
            advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            surrogate=config.surrogate,
        )
        means = _policy_means(log_ratio.detach(), advantages, sampler - old, config)
        means["policy/entropy/mean"] = model.entropy.detach()
        clamped = _beyond(log_ratio) | _beyond(sampler - old)
        if config.importance_cap:
            correction = importance_weights(old, sampler, cap=config.importance_cap)
            means["mismatch/capped/share"] = correction >= config.importance_cap
            losses = losses * correction
        if self._with_reference:
            apart = now - part.ragged("reference_logprobs").values.to(now.dtype)
            distance, clamped = divergence(apart, config.estimator), clamped | _beyond(apart)
            means["policy/kl/mean"] = distance.detach()
            losses = losses + config.kl * distance
        if config.entropy:
            losses = losses - config.entropy * model.entropy
        means["policy/clamped/share"] = clamped
        largest = {
            "policy/ratio/max": means["policy/ratio/mean"],
            "mismatch/logprob_gap/max": (sampler - old).abs(),
        }
        return LossPart(terms=losses * weights.values.to(now.dtype), metrics=_measure(means, largest))


def _policy_means(
    log_ratio: Tensor, advantages: Tensor, mismatch: Tensor, config: PolicyLossConfig
) -> dict[str, Tensor]:
    """What is averaged over tokens; ``mismatch`` [N] is log mu - log old."""
    ratio, weighs = held(log_ratio).exp(), config.surrogate == "weight"
    low = ((advantages < 0) | weighs) & (ratio < 1 - config.clip_low)
    high = ((advantages > 0) | weighs) & (ratio > 1 + config.clip_high)
    return {
        "policy/ratio/mean": ratio,
        "policy/clipped/share": low | high,
        "policy/clipped_low/share": low,
        "policy/clipped_high/share": high,
        "policy/advantage/mean": advantages,
        "mismatch/kl/mean": divergence(mismatch, "k3"),
    }


def _beyond(log_ratio: Tensor) -> Tensor:
    """[N] bool, True where a log ratio is held at its bound before it is an exponent."""
    return log_ratio.detach().abs() > LARGEST_LOG_RATIO


def _with_advantage(rows: Batch) -> Tensor:
    """[B] bool, True where a loss token of the row has an advantage other than 0."""
    advantages = rows.field("advantages")
    if not isinstance(advantages, Ragged):
        return advantages != 0
    teaches = (advantages.values != 0) & rows.ragged("loss_mask").values
    return advantages.with_values(teaches).sums() > 0


def _of_tokens(part: Batch, name: str) -> Tensor:
    """[N] a field of the loss tokens, or of their rows and the same for all tokens of one."""
    field = part.field(name)
    return field.values if isinstance(field, Ragged) else part.ragged("loss_weights").expand(field)


def _weighted(rows: Batch, active: Tensor, aggregation: Aggregation, constant: int = 0) -> Batch:
    weights = loss_weights(rows.ragged("loss_mask"), aggregation, constant)
    if not weights.denominator:
        raise TrainingError(
            f"a minibatch of {len(rows)} rows has no loss token",
            why="there is nothing to learn from prompts alone",
            fix="check that answers are not empty and fit into the context",
        )
    denominator = torch.full((len(rows),), weights.denominator, dtype=torch.float64)
    return rows.with_fields(loss_weights=weights.values, loss_denominator=denominator, loss_active=active)


def _measure(means: Mapping[str, Tensor], largest: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Metrics of [N] values, fetched from the device at once."""
    count = float(next(iter(means.values())).numel())
    totals = [values.sum(dtype=torch.float64) for values in means.values()]
    tops = [values.max().double() for values in largest.values()]
    numbers = torch.stack(totals + tops).tolist()
    found: dict[str, Metric] = {
        name: Mean(total=total, count=count) for name, total in zip(means, numbers, strict=False)
    }
    found |= {name: Max(value=top) for name, top in zip(largest, numbers[len(means) :], strict=True)}
    return found
