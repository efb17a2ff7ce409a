"""The clipped policy loss of each token, and the weights that correct for where tokens came from.

A log ratio is held within +-20 before its exponential: a ratio beyond e^20 is finite and has no gradient.

Legend: N tokens; r = pi / old the probability ratio, A the advantage, sg[] no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rillflow.errors import FormulaError, nearest
from rillflow.formulas.kl import LARGEST_LOG_RATIO
from rillflow.formulas.shapes import same_length
from rillflow.records.ragged import Ragged


def clipped_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    surrogate: Literal["clip", "weight"] = "clip",
) -> Tensor:
    """[N] minus the clipped objective of each token.

    clip: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; two bounds: DAPO,
    arXiv 2503.14476). Where A < 0, dual clip bounds the objective below by c A (arXiv 1912.09729).
    weight: -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log r, which is -sg[clip(r)] A log pi up to a
    constant (CISPO, arXiv 2506.13585): a token beyond a bound keeps a gradient, by the bound's weight.
    At r = 1 the gradient of either is that of -A log pi.

    Args:
        log_ratio: [N] log pi - log old, or ``sequence_log_ratio``.
        advantages: [N] no gradient flows into them.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: c, above 1; 0 for none; of the clip surrogate alone.
        surrogate: what the bounds are put on, the objective or the weight of log pi.

    Raises:
        FormulaError: shapes differ, or the surrogate is unknown.
    """
    same_length("clipped_policy_loss", log_ratio=log_ratio, advantages=advantages)
    if surrogate not in ("clip", "weight"):
        fix = nearest(surrogate, ("clip", "weight"))
        raise FormulaError(f"clipped_policy_loss: surrogate is {surrogate!r}", fix=fix)
    advantages, ratio = advantages.detach(), held(log_ratio).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "weight":
        return -bounded.detach() * advantages * log_ratio
    objective = torch.minimum(ratio * advantages, bounded * advantages)
    if dual_clip:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    return -objective


def held(log_ratio: Tensor) -> Tensor:
    """[N] the log ratio within +-20 nats; beyond them it has no gradient."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_log_ratio(log_ratio: Ragged) -> Tensor:
    """[N] the mean log ratio of each token's row, with the gradient of the token's own.

    log s + log pi - sg[log pi], s = exp(mean over the row's loss tokens of log r): every token of a row
    has the ratio s, and s A summed over its tokens, each by 1 / |o|, has the gradient of s A with A the
    row's (GSPO and GSPO-token, arXiv 2507.18071).

    Args:
        log_ratio: log pi - log old of the loss tokens alone, by row.
    """
    fixed = log_ratio.values.detach()
    mean = log_ratio.with_values(fixed).sums() / log_ratio.lengths.clamp_min(1)
    return log_ratio.expand(mean) + (log_ratio.values - fixed)


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float) -> Tensor:
    """[N] min(old / mu, cap), truncated importance sampling from the sampler mu; it carries no gradient.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.

    Args:
        old_logprobs: [N] the trainer's, before the update.
        sampler_logprobs: [N] those of the policy that sampled the tokens.
        cap: the largest weight.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("importance_weights", old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    return held((old_logprobs - sampler_logprobs).detach()).exp().clamp_max(cap)
