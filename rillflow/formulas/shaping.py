"""Shaping: make rewards comparable before training.

    rewards [B] ─ normalised (this step's mean and deviation, or those of all steps so far)
                ─ bounded (clamped to a range) ─ less a price per token ─> rewards [B]

A row without a score enters no mean and stays unchanged: ``valid`` excludes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.errors import FormulaError
from rillflow.formulas.shapes import same_length

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged

LEAST = 1e-8
"""Added to a deviation, so that rewards that are all equal become 0."""


def normalised_rewards(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B] (r - mean) / deviation over the step's rows with a score.

    Args:
        rewards: [B] float.
        valid: [B] bool.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("normalised_rewards", rewards=rewards, valid=valid)
    count, mean, squares = _merged(rewards, valid, 0.0, 0.0, 0.0)
    return rescaled_rewards(rewards, valid, count=count, mean=mean, squares=squares)


def rescaled_rewards(rewards: Tensor, valid: Tensor, *, count: float, mean: float, squares: float) -> Tensor:
    """Return [B] (r - mean) / deviation, with numbers that earlier steps remembered.

    Args:
        rewards: [B] float.
        valid: [B] bool.
        count: number of scores so far.
        mean: mean of these scores.
        squares: sum of their squared distances from the mean.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("rescaled_rewards", rewards=rewards, valid=valid)
    deviation = (squares / count) ** 0.5 if count else 0.0
    shaped = (rewards.double() - mean) / (deviation + LEAST)
    return shaped.to(rewards.dtype).where(valid, rewards)


def next_reward_count(valid: Tensor, *, count: float) -> float:
    """Return the number of scores so far, those of a step included."""
    return count + float(valid.sum())


def next_reward_mean(rewards: Tensor, valid: Tensor, *, count: float, mean: float) -> float:
    """Return the mean of all scores so far, those of a step included (Chan, Golub and LeVeque 1979)."""
    return _merged(rewards, valid, count, mean, 0.0)[1]


def next_reward_squares(
    rewards: Tensor, valid: Tensor, *, count: float, mean: float, squares: float
) -> float:
    """Return the sum of squared distances of all scores so far from their mean, those of a step included."""
    return _merged(rewards, valid, count, mean, squares)[2]


def bounded_rewards(
    rewards: Tensor, valid: Tensor, loss_mask: Ragged, *, low: float, high: float, price: float
) -> Tensor:
    """Return [B] min(max(r, low), high) - price x sampled tokens.

    Args:
        rewards: [B] float.
        valid: [B] bool.
        loss_mask: [T] bool, True at the sampled tokens of each row.
        low: the least reward.
        high: the largest reward.
        price: price of a sampled token.

    Raises:
        FormulaError: shapes differ, or the bounds cross.
    """
    same_length("bounded_rewards", rewards=rewards, valid=valid)
    if not low <= high:
        raise FormulaError(
            f"bounded_rewards: low is {low} and high is {high}", why="low must not exceed high"
        )
    lengths = loss_mask.sums().to(rewards.dtype)
    return (rewards.clamp(low, high) - price * lengths).where(valid, rewards)


def _merged(
    rewards: Tensor, valid: Tensor, count: float, mean: float, squares: float
) -> tuple[float, float, float]:
    """Return count, mean and squares, updated with a step's scores."""
    same_length("next_reward_mean", rewards=rewards, valid=valid)
    found = rewards[valid].double()
    own = float(len(found))
    if not own:
        return count, mean, squares
    middle = float(found.mean())
    apart, total = middle - mean, count + own
    about = float((found - middle).square().sum()) + apart * apart * count * own / total
    return total, mean + apart * own / total, squares + about
