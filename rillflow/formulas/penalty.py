"""Rewards shaped before they are advantages: spread over tokens, divergence paid, length paid.

    rewards [B] ── token_rewards ──> the last loss token's alone    [T]
                ── penalised_token_rewards ──> minus the divergence of every loss token    [T]
                ── penalised_rewards ──> minus their sum    [B]
                ── overlong_rewards ──> minus what an answer close to the limit costs    [B]
                ── missing_end_rewards ──> minus what a missing end costs    [B]
    costs [B]   ── token_costs ──> the last loss token's alone    [T]
                ── penalised_token_costs ──> plus the divergence of every loss token    [T]
                ── mean_cost ──> what a controller of their price observes
    divergence  ── mean_divergence ──> what a controller of its price observes

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
    """[B] each row's reward minus ``weight`` times its divergence from the reference, summed over its tokens.

    R' = R - weight * sum_t k(log mu_t - log ref_t), over the tokens the policy sampled (arXiv 2203.02155).

    Args:
        rewards: [B] float.
        sampler_logprobs: what the sampler gave each token.
        reference_logprobs: what the reference gives each token.
        loss_mask: True where the policy sampled the token.
        weight: the price of one nat.
        estimator: which estimator of the divergence.

    Raises:
        FormulaError: rows differ in length, or the estimator is unknown.
    """
    aligned("penalised_rewards", loss_mask=loss_mask, rewards=rewards)
    spent = _divergences("penalised_rewards", sampler_logprobs, reference_logprobs, loss_mask, estimator)
    return rewards - weight * spent.sums().to(rewards.dtype)


def token_rewards(rewards: Tensor, loss_mask: Ragged) -> Ragged:
    """[T] each row's reward at its last loss token, 0 at every other token.

    A row without a loss token has nowhere to be paid.

    Args:
        rewards: [B] float.
        loss_mask: True where the policy sampled the token.

    Raises:
        FormulaError: there is not one reward a row.
    """
    aligned("token_rewards", loss_mask=loss_mask, rewards=rewards)
    places = loss_mask.values.nonzero().squeeze(1)
    rows = loss_mask.row_of[places]
    last = rows.diff(append=rows.new_full((1,), -1)) != 0
    paid = rewards.new_zeros(loss_mask.values.shape)
    paid[places[last]] = rewards[rows[last]]
    return loss_mask.with_values(paid)


def token_costs(costs: Tensor, loss_mask: Ragged) -> Ragged:
    """[T] each row's cost at its last loss token; ``token_rewards`` of what is to be low.

    Args:
        costs: [B] float.
        loss_mask: True where the policy sampled the token.

    Raises:
        FormulaError: there is not one cost a row.
    """
    return token_rewards(costs, loss_mask)


def mean_cost(costs: Tensor, valid: Tensor, *, otherwise: float) -> float:
    """The mean cost of the rows that have one, which ``next_log_multiplier`` observes.

    Args:
        costs: [B] float.
        valid: [B] bool; a row without a cost does not count.
        otherwise: what is observed where no row has a cost; given the limit, the multiplier stays.

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
    """[T] what each token earns: its divergence from the reference costs, and the last is paid the reward.

    R_t = [t is the last] R - share weight k(log mu_t - log ref_t), at the tokens the policy sampled (Ziegler
    et al., arXiv 1909.08593, equation 2). Over a row they add up to ``penalised_rewards`` at share 1.

    Args:
        rewards: [B] float.
        sampler_logprobs: what the sampler gave each token.
        reference_logprobs: what the reference gives each token.
        loss_mask: True where the policy sampled the token.
        weight: the price of one nat.
        estimator: which estimator of the divergence.
        share: how much of that price is paid here.

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
    """[T] what each token costs: ``penalised_token_rewards`` of what is to be low, the divergence added.

    C_t = [t is the last] C + share weight k(log mu_t - log ref_t); Safe RLHF, arXiv 2310.12773, section 3.4.
    With share 1/2 in rewards and costs alike, ``lagrangian_advantages`` charges half the weight whatever
    the multiplier.

    Args and raises as ``penalised_token_rewards``, with costs for rewards.
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
    """The divergence of a row from the reference in nats, the mean over rows that have a loss token.

    What ``next_kl_weight`` observes: mean_rows sum_t k(log mu_t - log ref_t); 0 without such a row.

    Args:
        sampler_logprobs: what the sampler gave each token.
        reference_logprobs: what the reference gives each token.
        loss_mask: True where the policy sampled the token.
        estimator: which estimator of the divergence.

    Raises:
        FormulaError: rows differ in length, or the estimator is unknown.
    """
    spent = _divergences("mean_divergence", sampler_logprobs, reference_logprobs, loss_mask, estimator)
    return float(spent.values.double().sum()) / max(int((loss_mask.sums() > 0).sum()), 1)


def overlong_rewards(rewards: Tensor, loss_mask: Ragged, limits: Tensor, *, buffer: int) -> Tensor:
    """[B] each row's reward with the penalty of answers that come close to the limit.

    R' = R + min(0, max(-1, (limit - buffer - sampled tokens) / buffer)): nothing for a short answer, falling
    in a straight line to -1 over the last ``buffer`` tokens; DAPO, arXiv 2503.14476, equation 13.

    Args:
        rewards: [B] float.
        loss_mask: True where the policy sampled the token.
        limits: [B] the most tokens that could be sampled; there the whole penalty, 1, is paid.
        buffer: how many tokens before that it begins.

    Raises:
        FormulaError: there is not one reward and limit a row, or the buffer is not between 1 and the limit.
    """
    aligned("overlong_rewards", loss_mask=loss_mask, rewards=rewards, limits=limits)
    least = min(limits.tolist(), default=buffer)
    if not 1 <= buffer <= least:
        raise FormulaError(
            f"overlong_rewards: buffer is {buffer} and max_tokens {least}",
            why="the penalty begins that many tokens before the limit",
            fix="give a buffer between 1 and max_tokens",
        )
    penalty = ((limits - buffer - loss_mask.sums()).float() / buffer).clamp(-1, 0)
    return rewards + penalty.to(rewards.dtype)


def previous_logprobs(old_logprobs: Ragged) -> Ragged:
    """[T] what the policy gave each token before this update, as the reference of it.

    Args:
        old_logprobs: the policy's.
    """
    return old_logprobs


def previous_totals(policy_totals: Tensor) -> Tensor:
    """[B] what the policy gave each row before this update, as the reference of it.

    Args:
        policy_totals: the policy's.
    """
    return policy_totals


def kept_totals(reference_totals: Tensor) -> Tensor:
    """[B] what the reference gives each row, as a field of the rows that are collected.

    Args:
        reference_totals: the reference's.
    """
    return reference_totals


def ended(finish: Tensor) -> Tensor:
    """[B] bool, False where a row was cut off: it reached the limit of its tokens or of the context.

    Args:
        finish: [B] why each row ended (``records.rollout.Finish``).
    """
    from rillflow.records.rollout import Finish

    return finish != Finish.LENGTH


def missing_end_rewards(rewards: Tensor, finish: Tensor, *, penalty: float) -> Tensor:
    """[B] each row's reward, less the penalty where the row was cut off and has no end.

    Args:
        rewards: [B] float.
        finish: [B] why each row ended.
        penalty: what a missing end costs.

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
    """[T] each loss token's divergence, 0 elsewhere."""
    aligned(
        formula, loss_mask=loss_mask, sampler_logprobs=sampler_logprobs, reference_logprobs=reference_logprobs
    )
    ratio = sampler_logprobs.values - reference_logprobs.values
    return loss_mask.with_values(divergence(ratio, estimator).masked_fill(~loss_mask.values, 0))
