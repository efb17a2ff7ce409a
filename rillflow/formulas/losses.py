"""Losses: functions that an update minimises; their parameters name their inputs.

    outputs of the model ─────────────┐
    fields of the rows, at the tokens ┴─ loss(logprobs, advantages, ..., clip=0.2) ─> [N] losses

| parameter | value that a loss receives |
|---|---|
| ``logprobs``, ``entropy``, ``likeliest`` | a language model's output at each loss token: ``TokenLogprobs`` |
| ``values`` | a critic's value of the state before each loss token |
| ``chosen``, ``rejected`` | scores of the two answers of each pair, from a model that learns from pairs |
| ``old_logprobs``, ``old_values`` | the field; if no batch has it, the model's output without a gradient |
| ``row_lengths`` | [B] int64 number of loss tokens of each row |
| any other without a default | the field of that name: of tokens, or of rows, repeated for all their tokens |

A log ratio is clamped to +-20 before its exponential: a ratio beyond e^20 is finite and has no gradient.
Only the divergence keeps a gradient there, a bounded one: ``divergence``.

A correction weights tokens that another policy sampled:

    mu ────── sampled the tokens, perhaps some versions ago or in other arithmetic
     │   w = old / mu       the correction: a weight without a gradient on a token's loss
    old ───── the trainer's weights before the update: the proximal policy
     │   r = pi / old       the loss: clipped, with a gradient
     pi ───── the weights that are being changed

| correction | weight of a token, at the default bounds (low, high) | source |
|---|---|---|
| ``tis`` | clip(w, 0, 2): truncated importance sampling | Yao et al. 2025 (below); arXiv 2110.00641 |
| ``sequence_tis`` | clip(W, 0, 5), W the product of w over the token's row | the same by row |
| ``icepop`` | w where 0.5 <= w <= 5, else 0 | arXiv 2510.18855 |
| ``m2po`` | w where (log w)^2 is below the ``m2po_limit`` of 0.04, else 0 | arXiv 2510.01161 |
| ``topr`` | 1 where A >= 0, else clip(W, 0, 1) | arXiv 2503.14286 |

At w = 1 every weight is 1: rows of the present policy have the gradient of the plain loss. Yao et al. wrote
"Your efficient RL framework secretly brings you off-policy RL training". Decoupled PPO (arXiv 2110.00641;
arXiv 2505.24298, equation 5) is ``tis`` over the clipped loss, with an upper bound of 5.

Token losses are combined into one loss that is the same for any partition of the minibatch:

    loss mask ──> weight of every token, one denominator for the whole minibatch
    micro-batch or rank: sum(weight x loss of its tokens) ── added up ──> / denominator

The denominator is counted before the minibatch is split, so no part divides by a count of its own. A row
without a loss token counts in no aggregation.

Legend: N loss tokens of one micro-batch (pairs, if the model learns from pairs), B its rows;
r = pi / old the probability ratio, A the advantage, sg[] no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rillflow.errors import FormulaError
from rillflow.formulas.config import Estimator, PolicyLossConfig, Surrogate
from rillflow.formulas.shapes import known, same_length

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged


LARGEST_LOG_RATIO = 20.0
"""Nats at which a log ratio is clamped before its exponential, which overflows float32 above 88."""


def held(log_ratio: Tensor) -> Tensor:
    """Return [N], the log ratio clamped to +-20 nats; it has no gradient beyond."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_log_ratio(log_ratio: Ragged) -> Tensor:
    """Return [N], the mean log ratio of each token's row, with the gradient of the token's own.

    log s + log pi - sg[log pi], s = exp(mean over the row's loss tokens of log r). Every token of a row has
    the ratio s. The sum of s A over its tokens, each weighted by 1 / |o|, has the gradient of s A with the
    row's A (GSPO and GSPO-token, arXiv 2507.18071).

    Args:
        log_ratio: log pi - log old of the loss tokens only, by row.
    """
    fixed = log_ratio.values.detach()
    mean = log_ratio.with_values(fixed).sums() / log_ratio.lengths.clamp_min(1)
    return log_ratio.expand(mean) + (log_ratio.values - fixed)


def m2po_limit(log_weights: Tensor, *, bound: float) -> float:
    """Return the least (log w)^2 that M2PO leaves out; infinity if it keeps every token.

    The largest (log w)^2 are left out until the mean of the rest is below the bound. Equal ones are kept or
    left out together, so the choice depends on no order. The limit is computed for a whole minibatch, before
    it is split.

    Args:
        log_weights: [M] log old - log mu of every loss token of a minibatch.
        bound: upper bound of the mean of the squares.
    """
    squares = log_weights.double().square().sort().values
    means = squares.cumsum(0) / squares.new_ones(squares.shape).cumsum(0)
    over = (means >= bound).nonzero()
    return float(squares[over[0]]) if len(over) else float("inf")


def correction_weights(
    log_weights: Ragged, advantages: Tensor, config: PolicyLossConfig, is_kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return [N] the weights of a recipe's correction, and [N] bool where they are not w (of a row W) itself.

    Args:
        log_weights: log old - log mu of the loss tokens only, by row.
        advantages: [N] A.
        config: names the correction and its bounds.
        is_kept: [N] bool, the tokens below m2po's limit; None: every token.
    """
    known, (low, high) = log_weights.values.detach(), config.bounds
    if config.correction in ("sequence_tis", "topr"):
        known = log_weights.expand(log_weights.with_values(known).sums())
    plain = held(known).exp()
    weights = plain.clamp(low, high)
    match config.correction:
        case "icepop":
            weights = plain * ((plain >= low) & (plain <= high))
        case "m2po":
            weights = plain * (1 if is_kept is None else is_kept)
        case "topr":
            weights = weights.where(advantages < 0, 1.0)
    return weights, weights != plain


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """Losses and their metrics; a loss without metrics returns the tensor alone."""

    losses: Tensor
    """[N] with a gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] numbers by metric. The last word of a name selects the reduction: ``max``, ``variance``,
    ``histogram`` (of log ratios), ``largest_share`` (of one token in their weighted sum); any other word,
    such as ``mean`` and ``share``, is the mean.
    """


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    sampler_logprobs: Tensor,
    old_logprobs: Tensor,
    row_lengths: Tensor,
    *,
    config: PolicyLossConfig,
    reference_logprobs: Tensor | None = None,
    versions_behind: Tensor | None = None,
    is_kept: Tensor | None = None,
) -> TokenLosses:
    """Return [N] correction(old / mu) clip_loss(log pi - log old, A) - entropy H: ``clipped_policy_loss``.

    Args:
        logprobs: [N] log pi.
        entropy: [N] H.
        advantages: [N] A.
        sampler_logprobs: [N] log mu, of the policy that sampled the tokens.
        old_logprobs: [N] log old, of the policy before the update.
        row_lengths: [B].
        config: settings of the loss.
        reference_logprobs: [N] log ref, if the divergence is paid in the loss: + kl k(log pi - log ref).
        versions_behind: [N] age of each token, if one may be old; adds metrics of log mu.
        is_kept: [N] bool, the tokens of the minibatch that m2po keeps; None: all.
    """
    from rillflow.records.ragged import Ragged

    log_ratio, mismatch = logprobs - old_logprobs, sampler_logprobs - old_logprobs
    if config.ratio == "sequence":
        log_ratio = sequence_log_ratio(Ragged(values=log_ratio, lengths=row_lengths))
    losses = clipped_policy_loss(
        log_ratio,
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        surrogate=config.surrogate,
    )
    metrics = _policy_metrics(log_ratio.detach(), advantages, mismatch, config)
    clamped = (log_ratio.detach().abs() > LARGEST_LOG_RATIO) | (mismatch.abs() > LARGEST_LOG_RATIO)
    if config.correction != "none":
        moved = Ragged(values=old_logprobs - sampler_logprobs, lengths=row_lengths)
        weights, is_bounded = correction_weights(moved, advantages, config, is_kept)
        metrics |= {"mismatch/weight/mean": weights, "mismatch/bounded/share": is_bounded}
        losses = losses * weights
    if reference_logprobs is not None:
        apart = logprobs - reference_logprobs
        metrics |= _divergence_metrics(apart.detach(), config)
        clamped = clamped | ((config.estimator == "k3") & (apart.detach() < -math.log(config.kl_bound)))
        losses = losses + config.kl * divergence(apart, config.estimator, config.kl_bound)
    if config.entropy:
        losses = losses - config.entropy * entropy
    metrics |= {"policy/clamped/share": clamped, "policy/entropy/mean": entropy.detach()}
    if config.correction != "none" or versions_behind is not None:
        metrics["mismatch/log_ratio/histogram"] = -mismatch
    if versions_behind is not None:
        metrics["staleness/kl/mean"] = divergence(sampler_logprobs - logprobs.detach(), "k3")
    return TokenLosses(losses=losses, metrics=metrics)


def clipped_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    surrogate: Surrogate = "clip",
) -> Tensor:
    """Return [N], minus the clipped objective of each token.

    clip: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; two bounds: DAPO,
    arXiv 2503.14476). If A < 0, dual clip bounds the objective below by c A (arXiv 1912.09729).
    weight: -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log r, which is -sg[clip(r)] A log pi up to a
    constant (CISPO, arXiv 2506.13585): a token beyond a bound keeps a gradient, with the bound's weight.
    At r = 1 both have the gradient of -A log pi.

    Args:
        log_ratio: [N] log pi - log old, or ``sequence_log_ratio``.
        advantages: [N]; no gradient flows into them.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: c, above 1; 0 for none; only for the clip surrogate.
        surrogate: what is clipped: the objective, or the weight of log pi.

    Raises:
        FormulaError: shapes differ, or the surrogate is unknown.
    """
    same_length("clipped_policy_loss", log_ratio=log_ratio, advantages=advantages)
    known("clipped_policy_loss", Surrogate, surrogate=surrogate)
    advantages, ratio = advantages.detach(), held(log_ratio).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "weight":
        return -bounded.detach() * advantages * log_ratio
    objective = (ratio * advantages).minimum(bounded * advantages)
    if dual_clip:
        floor = (dual_clip * advantages).where(advantages < 0, -math.inf)
        objective = objective.maximum(floor)
    return -objective


def cross_entropy(logprobs: Tensor, likeliest: Tensor) -> TokenLosses:
    """Return [N] -log pi, the loss of demonstrations.

    Args:
        logprobs: [N] log pi.
        likeliest: [N] bool, True where no token is likelier.
    """
    metrics = {"supervised/nll/mean": -logprobs.detach(), "supervised/accuracy/mean": likeliest}
    return TokenLosses(losses=-logprobs, metrics=metrics)


def value_loss(
    values: Tensor, returns: Tensor, *, clip: float = 0.0, old_values: Tensor | None = None
) -> TokenLosses:
    """Return [N], half the squared error of each value or of its clipped value, whichever is larger.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 (PPO's value loss: arXiv 2005.12729,
    section 3; halved, so that at V = V_old the gradient is V - R). A value that moved further than ``clip``
    and is closer to its return than the bound has no gradient.

    Args:
        values: [N] V, the critic's values; gradients flow into them.
        returns: [N] R, the targets of the values; no gradient flows into them.
        clip: how far a value may move from the old one; 0 for no bound.
        old_values: [N] V_old, before the update, if there is a bound; no gradient flows into them.

    Raises:
        FormulaError: shapes differ.
    """
    old = (values if old_values is None else old_values).detach()
    same_length("value_loss", values=values, old_values=old, returns=returns)
    returns = returns.detach()
    losses = (values - returns).square()
    if clip:
        bounded = old + (values - old).clamp(-clip, clip)
        losses = losses.maximum((bounded - returns).square())
    losses, errors = losses / 2, (values.detach() - returns).square()
    metrics = {
        "critic/value/mean": values.detach(),
        "critic/return/mean": returns,
        "critic/return/variance": returns,
        "critic/squared_error/mean": errors,
        "critic/clipped/share": losses.detach() > errors / 2,
    }
    return TokenLosses(losses=losses, metrics=metrics)


def preference_loss(chosen: Tensor, rejected: Tensor, centring: float = 0.0) -> TokenLosses:
    """Return [N], minus the log probability that the preferred answer of each pair is preferred, in nats.

    -log sigmoid(s_chosen - s_rejected); R. A. Bradley and M. E. Terry, Biometrika 1952; as a reward model's
    loss: InstructGPT, arXiv 2203.02155, equation 1. A pair does not determine the level of scores; centring
    adds centring x (s_chosen + s_rejected)^2, which pulls scores to 0 (arXiv 2312.09244). The metrics are how
    often the preferred answer has the higher score, by how much, and the mean score.

    Args:
        chosen: [N] scores of the preferred answers.
        rejected: [N] scores of the others.
        centring: weight of the squared sum of a pair's scores.

    Raises:
        FormulaError: shapes differ.
    """
    return margin_preference_loss(chosen, rejected, 0 * chosen.detach(), centring)


def margin_preference_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float = 0.0
) -> TokenLosses:
    """Return [N], ``preference_loss`` with a margin by which the better answer should be better.

    -log sigmoid(s_chosen - s_rejected - margin): Llama 2, arXiv 2307.09288, equation 2.

    Args:
        chosen: [N] scores of the preferred answers.
        rejected: [N] scores of the others.
        margin: [N] wanted difference of scores; 0 if it is unknown.
        centring: see ``preference_loss``.

    Raises:
        FormulaError: shapes differ.
    """
    from torch.nn.functional import logsigmoid

    same_length("preference_loss", chosen=chosen, rejected=rejected, margin=margin)
    apart, total = chosen - rejected, chosen + rejected
    metrics = {
        "preference/accuracy/mean": chosen > rejected,
        "preference/margin/mean": apart.detach(),
        "preference/centre/mean": total.detach() / 2,
    }
    losses = -logsigmoid(apart - margin)
    return TokenLosses(losses=losses + centring * total.square() if centring else losses, metrics=metrics)


def label_loss(logprobs: Tensor, likeliest: Tensor) -> TokenLosses:
    """Return [N], minus the log probability of the label that names the better answer, in nats.

    The pairwise preference model of RLHF Workflow, arXiv 2405.07863, section 2.

    Args:
        logprobs: [N] log probability of the right label.
        likeliest: [N] bool, True where no token is likelier.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("label_loss", logprobs=logprobs, likeliest=likeliest)
    metrics = {"judge/nll/mean": -logprobs.detach(), "judge/accuracy/mean": likeliest}
    return TokenLosses(losses=-logprobs, metrics=metrics)


def _policy_metrics(
    log_ratio: Tensor, advantages: Tensor, mismatch: Tensor, config: PolicyLossConfig
) -> dict[str, Tensor]:
    """Return the metrics of the two ratios; ``mismatch`` [N] is log mu - log old."""
    ratio, weighs = held(log_ratio).exp(), config.surrogate == "weight"
    low = ((advantages < 0) | weighs) & (ratio < 1 - config.clip_low)
    high = ((advantages > 0) | weighs) & (ratio > 1 + config.clip_high)
    return {
        "policy/ratio/mean": ratio,
        "policy/ratio/max": ratio,
        "policy/clipped/share": low | high,
        "policy/clipped_low/share": low,
        "policy/clipped_high/share": high,
        "policy/advantage/mean": advantages,
        "mismatch/kl/mean": divergence(mismatch, "k3"),
        "mismatch/logprob_gap/max": mismatch.abs(),
    }


def _divergence_metrics(log_ratio: Tensor, config: PolicyLossConfig) -> dict[str, Tensor]:
    """Return metrics of the divergence: its mean, and the terms of the loss."""
    paid = divergence(log_ratio, config.estimator, config.kl_bound).clamp_min(0)  # rounding may give k3 < 0
    return {"policy/kl/mean": divergence(log_ratio, config.estimator), "policy/kl/largest_share": paid}


def divergence(log_ratio: Tensor, estimator: Estimator, bound: float = math.inf) -> Tensor:
    """Return [N], an estimate of KL(pi || ref) from each token, d = log pi - log ref its log ratio.

    k1 = d; k2 = d^2 / 2; k3 = e^-d - 1 + d (J. Schulman, "Approximating KL divergence", 2020). On tokens
    of pi the means of k1 and k3 are the divergence; k2 and k3 are never negative.

    The gradient of k3 is 1 - ref / pi. It grows exponentially with -d, so one token could dominate a step.
    Where ref / pi is above ``bound``, or above e^20, k3 continues along its tangent: the gradient stays
    1 - bound, and still pulls the token back.

    The place where an estimate is paid decides which one has the right gradient, over tokens of pi:

        in the reward   E[k1 grad log pi]                    is that of KL(pi || ref); k2's and k3's are not
        in the loss     E[grad k2], exactly; E[grad k3]      is that of KL(ref || pi), the same at pi = ref
                        E[grad k1] = E[grad log pi] = 0      independent of the reference

    Args:
        log_ratio: [N] float.
        estimator: name of the estimator.
        bound: the largest ref / pi in the gradient of k3, above 1.

    Raises:
        FormulaError: the estimator is unknown.
    """
    known("divergence", Estimator, estimator=estimator)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    least = -min(math.log(bound), LARGEST_LOG_RATIO)
    inside = log_ratio.clamp_min(least)
    exact, slope = (-inside).expm1() + inside, -math.expm1(-least)
    return exact.where(log_ratio >= least, exact.detach() + slope * (log_ratio - least))


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
