"""The clipped policy loss of each token, and the weights that correct for where tokens came from.

Legend: N tokens; r = pi / old the probability ratio, A the advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rillflow.formulas.shapes import same_length


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """[N] minus the clipped objective of each token.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv
    2503.14476). Where A < 0, dual clip bounds the objective below by c A (arXiv 1912.09729). At r = 1 the
    gradient is that of -A log pi.

    Args:
        log_ratio: [N] log pi - log old.
        advantages: [N] no gradient flows into them.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: c, above 1; 0 for none.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("clipped_policy_loss", log_ratio=log_ratio, advantages=advantages)
    advantages = advantages.detach()
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    return -objective


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
    return (old_logprobs - sampler_logprobs).detach().exp().clamp_max(cap)
