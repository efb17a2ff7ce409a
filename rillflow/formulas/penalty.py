"""Paying for divergence in the reward instead of in the loss."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rillflow.formulas.kl import divergence
from rillflow.records.ragged import Ragged


def penalised_rewards(
    rewards: Tensor,
    sampler_logprobs: Ragged,
    reference_logprobs: Ragged,
    loss_mask: Ragged,
    *,
    weight: float,
    estimator: Literal["k1", "k2", "k3"],
) -> Tensor:
    """[B] each row's reward minus ``weight`` times its divergence from the reference, summed over its tokens.

    R' = R - weight * sum_t k(log mu_t - log ref_t), over the tokens the policy sampled (arXiv 2203.02155).

    Args:
        rewards: [B] float.
        sampler_logprobs: what the sampler gave each token.
        reference_logprobs: what the reference gives each token.
        loss_mask: True where the policy sampled the token.
        weight: the price of one nat.
        estimator: which estimator of the divergence.
    """
    ratio = sampler_logprobs.values - reference_logprobs.values
    paid = divergence(ratio, estimator) * loss_mask.values
    return rewards - weight * loss_mask.with_values(paid).sums().to(rewards.dtype)
