"""Ratios of policies, and corrections for tokens that another policy sampled.

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

Legend: N loss tokens of one micro-batch, B its rows, A the advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.formulas.config import PolicyLossConfig

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
