"""Penalties: turn rewards and costs of rows into those of tokens, with prices on divergence and length.

    rewards [B] ── token_rewards ──> at the last loss token only    [T]
                ── penalised_token_rewards ──> minus the divergence of every loss token    [T]
                ── penalised_rewards ──> minus their sum    [B]
                ── overlong_rewards ──> minus the penalty of an answer close to the limit    [B]
                ── missing_end_rewards ──> minus the penalty of a missing end    [B]
    costs [B]   ── token_costs ──> at the last loss token only    [T]
                ── penalised_token_costs ──> plus the divergence of every loss token    [T]
                ── mean_cost ──> input of the controller of their price
    divergence  ── mean_divergence ──> input of the controller of its price

Legend: B rows, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.errors import FormulaError
from rillflow.formulas.config import Estimator
from rillflow.formulas.losses import divergence
from rillflow.formulas.shapes import aligned, same_length

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged


def penalised_rewards(
    rewards: Tensor,
    sampler_logprobs: Ragged,
    reference_logprobs: Ragged,
    loss_mask: Ragged,
    *,
    weight: float,
    estimator: Estimator,
) -> Tensor:
    """Return [B], each row's reward minus ``weight`` times the sum of its tokens' divergence.

    R' = R - weight * sum_t k(log mu_t - log ref_t), over the tokens the policy sampled (arXiv 2203.02155).

    Args:
        rewards: [B] float.
        sampler_logprobs: the sampler's log probability of each token.
        reference_logprobs: the reference's log probability of each token.
        loss_mask: True where the policy sampled the token.
        weight: the price of one nat.
        estimator: estimator of the divergence.

    Raises:
        FormulaError: rows differ in length, or the estimator is unknown.
    """
    aligned("penalised_rewards", loss_mask=loss_mask, rewards=rewards)
    spent = _divergences("penalised_rewards", sampler_logprobs, reference_logprobs, loss_mask, estimator)
    return rewards - weight * spent.sums().to(rewards.dtype)


def token_rewards(rewards: Tensor, loss_mask: Ragged) -> Ragged:
    """Return [T], each row's reward at its last loss token, 0 at every other token.

    A row without a loss token gets no reward.

    Args:
        rewards: [B] float.
        loss_mask: True where the policy sampled the token.

    Raises:
        FormulaError: rewards and rows differ in number.
    """
    aligned("token_rewards", loss_mask=loss_mask, rewards=rewards)
    places = loss_mask.values.nonzero().squeeze(1)
    rows = loss_mask.row_of[places]
    last = rows.diff(append=rows.new_full((1,), -1)) != 0
    paid = rewards.new_zeros(loss_mask.values.shape)
    paid[places[last]] = rewards[rows[last]]
    return loss_mask.with_values(paid)


def token_costs(costs: Tensor, loss_mask: Ragged) -> Ragged:
    """Return [T], each row's cost at its last loss token; the ``token_rewards`` of costs.

    Args:
        costs: [B] float.
        loss_mask: True where the policy sampled the token.

    Raises:
        FormulaError: costs and rows differ in number.
    """
    return token_rewards(costs, loss_mask)


def mean_cost(costs: Tensor, valid: Tensor, *, otherwise: float) -> float:
    """Return the mean cost of the rows that have one, for ``next_log_multiplier``.

    Args:
        costs: [B] float.
        valid: [B] bool; a row without a cost does not count.
        otherwise: result if no row has a cost; with the limit, the multiplier stays.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("mean_cost", costs=costs, valid=valid)
    return float(costs[valid].double().mean()) if bool(valid.any()) else otherwise


def penalised_token_rewards(
    rewards: Tensor,
    sampler_logprobs: Ragged,
    reference_logprobs: Ragged,
    loss_mask: Ragged,
    *,
    weight: float,
    estimator: Estimator,
    share: float = 1.0,
) -> Ragged:
    """Return [T], token rewards: the row's at its last token, less the price of each token's divergence.

    R_t = [t is the last] R - share weight k(log mu_t - log ref_t), at the tokens the policy sampled (Ziegler
    et al., arXiv 1909.08593, equation 2). With share 1 a row's sum is its ``penalised_rewards``.

    Args:
        rewards: [B] float.
        sampler_logprobs: the sampler's log probability of each token.
        reference_logprobs: the reference's log probability of each token.
        loss_mask: True where the policy sampled the token.
        weight: the price of one nat.
        estimator: estimator of the divergence.
        share: share of that price that is paid here.

    Raises:
        FormulaError: rows differ in length, or the estimator is unknown.
    """
    earned = token_rewards(rewards, loss_mask)
    paid = _divergences("penalised_token_rewards", sampler_logprobs, reference_logprobs, loss_mask, estimator)
    return earned.with_values(earned.values - share * weight * paid.values.to(rewards.dtype))


def penalised_token_costs(
    costs: Tensor,
    sampler_logprobs: Ragged,
    reference_logprobs: Ragged,
    loss_mask: Ragged,
    *,
    weight: float,
    estimator: Estimator,
    share: float = 1.0,
) -> Ragged:
    """Return [T], token costs: the row's at its last token, plus the price of each token's divergence.

    C_t = [t is the last] C + share weight k(log mu_t - log ref_t); Safe RLHF, arXiv 2310.12773, section 3.4.
    With share 1/2 in rewards and in costs, ``lagrangian_advantages`` charges half the weight at any
    multiplier.

    Args and raises as in ``penalised_token_rewards``, with costs for rewards.
    """
    price = {"weight": -weight, "share": share}
    return penalised_token_rewards(
        costs, sampler_logprobs, reference_logprobs, loss_mask, estimator=estimator, **price
    )


def mean_divergence(
    sampler_logprobs: Ragged,
    reference_logprobs: Ragged,
    loss_mask: Ragged,
    *,
    estimator: Estimator,
) -> float:
    """Return the divergence of a row from the reference in nats, the mean over rows with a loss token.

    ``next_kl_weight`` reads it: mean_rows sum_t k(log mu_t - log ref_t); 0 without such a row.

    Args:
        sampler_logprobs: the sampler's log probability of each token.
        reference_logprobs: the reference's log probability of each token.
        loss_mask: True where the policy sampled the token.
        estimator: estimator of the divergence.

    Raises:
        FormulaError: rows differ in length, or the estimator is unknown.
    """
    spent = _divergences("mean_divergence", sampler_logprobs, reference_logprobs, loss_mask, estimator)
    return float(spent.values.double().sum()) / max(int((loss_mask.sums() > 0).sum()), 1)


def overlong_rewards(rewards: Tensor, loss_mask: Ragged, limits: Tensor, *, buffer: int) -> Tensor:
    """Return [B], each row's reward with the penalty of answers that come close to the limit.

    R' = R + min(0, max(-1, (limit - buffer - sampled tokens) / buffer)): no penalty for a short answer, then
    a straight line to -1 over the last ``buffer`` tokens; DAPO, arXiv 2503.14476, equation 13.

    Args:
        rewards: [B] float.
        loss_mask: True where the policy sampled the token.
        limits: [B] most tokens that could be sampled; at that length the whole penalty, 1, is paid.
        buffer: number of tokens before the limit over which the penalty grows.

    Raises:
        FormulaError: rewards, limits and rows differ in number, or the buffer is not between 1 and the limit.
    """
    aligned("overlong_rewards", loss_mask=loss_mask, rewards=rewards, limits=limits)
    least = min(limits.tolist(), default=buffer)
    if not 1 <= buffer <= least:
        raise FormulaError(
            f"overlong_rewards: buffer is {buffer} and max_tokens {least}",
            why="the penalty begins buffer tokens before the limit",
            fix="set a buffer between 1 and max_tokens",
        )
    penalty = ((limits - buffer - loss_mask.sums()).float() / buffer).clamp(-1, 0)
    return rewards + penalty.to(rewards.dtype)


def previous_logprobs(old_logprobs: Ragged) -> Ragged:
    """Return [T], the policy's log probabilities before this update, which serve as its reference.

    Args:
        old_logprobs: the policy's log probabilities.
    """
    return old_logprobs


def previous_totals(policy_totals: Tensor) -> Tensor:
    """Return [B], the policy's totals before this update, which serve as its reference.

    Args:
        policy_totals: the policy's totals.
    """
    return policy_totals


def kept_totals(reference_totals: Tensor) -> Tensor:
    """Return [B], the reference's totals, as a field of the rows that are collected.

    Args:
        reference_totals: the reference's totals.
    """
    return reference_totals


def ended(finish: Tensor) -> Tensor:
    """Return [B] bool, False for a row that was cut off at the limit of its tokens or of the context.

    Args:
        finish: [B] reason for each row's end (``records.rollout.Finish``).
    """
    from rillflow.records.rollout import Finish

    return finish != Finish.LENGTH


def missing_end_rewards(rewards: Tensor, finish: Tensor, *, penalty: float) -> Tensor:
    """Return [B], each row's reward, less the penalty if the row was cut off and has no end.

    Args:
        rewards: [B] float.
        finish: [B] reason for each row's end.
        penalty: price of a missing end.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("missing_end_rewards", rewards=rewards, finish=finish)
    return rewards - penalty * (~ended(finish)).to(rewards.dtype)


def _divergences(
    formula: str,
    sampler_logprobs: Ragged,
    reference_logprobs: Ragged,
    loss_mask: Ragged,
    estimator: Estimator,
) -> Ragged:
    """Return [T], each loss token's divergence, 0 elsewhere."""
    aligned(
        formula, loss_mask=loss_mask, sampler_logprobs=sampler_logprobs, reference_logprobs=reference_logprobs
    )
    ratio = sampler_logprobs.values - reference_logprobs.values
    return loss_mask.with_values(divergence(ratio, estimator).masked_fill(~loss_mask.values, 0))
