"""Controllers: weights that adapt to measurements, as pure functions from one step's weight to the next.

No torch here: an algorithm's controller may hold such a weight without loading it.
"""

from __future__ import annotations

import math

from rillflow.errors import FormulaError

ERROR_BOUND = 0.2
"""Largest relative error of a measured divergence that moves the weight."""
LARGEST_LOGARITHM = 700.0
"""Exponent above which an exponential leaves the range of float64."""


def next_kl_weight(weight: float, observed: float, target: float, horizon: float, rows: int) -> float:
    """Return the KL weight after a step, moved so that the divergence approaches the target.

    weight' = weight (1 + e rows / horizon), e = clip(observed / target - 1, -0.2, 0.2); Ziegler et al.,
    arXiv 1909.08593, section 2.2, where rows / horizon is K = 0.1.

    Args:
        weight: the present price of one nat.
        observed: the step's divergence of a row, in nats.
        target: the wanted divergence of a row, in nats.
        horizon: rows over which an error of 1 would double the weight.
        rows: rows of the step.

    Raises:
        FormulaError: a number is not finite, ``target`` or ``horizon`` is not positive, or one step could
            make the weight negative.
    """
    if not (target > 0 and horizon > 0 and math.isfinite(weight) and math.isfinite(observed)):
        raise FormulaError(
            f"next_kl_weight: weight is {weight}, observed {observed}, target {target}, horizon {horizon}",
            why="all must be finite, and target and horizon positive",
        )
    pace = rows / horizon
    if ERROR_BOUND * pace >= 1:
        raise FormulaError(
            f"next_kl_weight: {rows} rows per step and a horizon of {horizon:g}",
            why="one step could reduce the weight to 0",
            fix=f"set a horizon of more than {ERROR_BOUND * rows:g} rows, usually ten times those of a step",
        )
    error = min(max(observed / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return weight * (1 + error * pace)


def multiplier(log_multiplier: float) -> float:
    """Return lambda, the price whose logarithm ``next_log_multiplier`` moves."""
    return math.exp(log_multiplier)


def next_log_multiplier(
    log_multiplier: float, mean_cost: float, limit: float, lr: float, *, highest: float = math.inf
) -> float:
    """Return the logarithm of a constraint's price after a step, raised while the cost is above its limit.

    log lambda' = log lambda + lr lambda (mean_cost - limit): gradient ascent on lambda (E[C] - limit) in
    log lambda, so that lambda stays positive; Safe RLHF, arXiv 2310.12773.

    Args:
        log_multiplier: the present log lambda.
        mean_cost: the step's mean cost of a row.
        limit: the allowed cost of a row.
        lr: size of the step in log lambda, for lambda = 1 and a cost one above the limit.
        highest: upper bound of lambda; a cost that cannot be lowered would send it to infinity.

    Raises:
        FormulaError: a number is not finite, ``lr`` or ``highest`` is not positive, or lambda has left the
            range of numbers.
    """
    finite = all(math.isfinite(number) for number in (log_multiplier, mean_cost, limit, lr))
    if not (finite and lr > 0 and highest > 0 and log_multiplier < LARGEST_LOGARITHM):
        raise FormulaError(
            f"next_log_multiplier: log_multiplier is {log_multiplier}, mean_cost {mean_cost}, "
            f"limit {limit}, lr {lr}, highest {highest}",
            why=f"all must be finite, lr and highest > 0, and log_multiplier < {LARGEST_LOGARITHM:g}",
            fix="set a highest lambda if the cost cannot fall below its limit",
        )
    moved = log_multiplier + lr * math.exp(log_multiplier) * (mean_cost - limit)
    return min(moved, math.log(highest))
