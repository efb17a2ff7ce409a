"""Advantages of rows: how much better a row did than expected. Legend: B rows, G groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rillflow.errors import FormulaError
from rillflow.formulas.shapes import aligned, known, same_length

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.batch import Batch
    from rillflow.records.ragged import Ragged

Scale = Literal["std", "off"]
"""Division of advantages by their group's deviation, or none."""
EPSILON = 1e-6
"""Added to a deviation before the division."""


def group_advantages(rewards: Tensor, groups: Tensor, valid: Tensor, *, scale: Scale) -> Tensor:
    """Return [B], each row's reward minus the mean of its group, divided by the group's deviation if asked.

    A_i = (R_i - mean) / (std + 1e-6), with the sample deviation (G - 1); GRPO, arXiv 2402.03300. Without the
    division it is Dr.GRPO's (arXiv 2503.20783), and then G/(G-1) times it is RLOO's (``leave_one_out``).
    Equal rewards give exactly 0.

    Args:
        rewards: [B] float.
        groups: [B] int64; rows of one group share a number.
        valid: [B] bool; a row without a score gets 0 and does not count in its group.
        scale: ``std`` divides, ``off`` does not.

    Raises:
        FormulaError: shapes differ, or ``scale`` is unknown.
    """
    return penalised_group_advantages(rewards, rewards, groups, valid, scale=scale)


def penalised_group_advantages(
    rewards: Tensor, penalised: Tensor, groups: Tensor, valid: Tensor, *, scale: Scale
) -> Tensor:
    """Return [B], ``group_advantages`` of penalised rewards, divided by the deviation of plain rewards.

    A_i = (R'_i - mean') / (std(R) + 1e-6), R' the rewards less their penalty. If a group's rewards R are all
    equal, nothing is divided: differences between penalties are noise compared with those of rewards, and are
    not scaled up to them.

    Args:
        rewards: [B] float, before the penalty.
        penalised: [B] float, after it.
        groups: [B] int64; rows of one group share a number.
        valid: [B] bool; a row without a score gets 0 and does not count in its group.
        scale: ``std`` divides, ``off`` does not.

    Raises:
        FormulaError: shapes differ, or ``scale`` is unknown.
    """
    same_length("group_advantages", rewards=rewards, penalised=penalised, groups=groups, valid=valid)
    known("group_advantages", Scale, scale=scale)
    found = _centred(penalised, groups, valid)
    if scale == "off":
        return found.rewards
    deviation = _deviation(_centred(rewards, groups, valid))
    return found.rewards / (deviation + EPSILON).where(deviation > 0, 1)


def leave_one_out(rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Return [B], each row's reward minus the mean reward of the other rows of its group.

    A_i = R_i - sum_{j != i} R_j / (G - 1) = G / (G - 1) (R_i - mean), G the group's scored rows; RLOO,
    arXiv 2402.14740. Equal rewards, and a row with no other to compare with, give exactly 0.

    Args:
        rewards: [B] float.
        groups: [B] int64; rows of one group share a number.
        valid: [B] bool; a row without a score gets 0 and does not count in its group.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("leave_one_out", rewards=rewards, groups=groups, valid=valid)
    found = _centred(rewards, groups, valid)
    return found.rewards * (found.size / (found.size - 1).clamp_min(1))[found.group]


def over_greedy(rewards: Tensor, valid: Tensor, ids: Tensor, *, greedy: Batch) -> Tensor:
    """Return [B], each row's reward minus that of its prompt's greedy answer, which is in another batch.

    A_i = R(sample) - R(greedy); ReMax, arXiv 2310.10505.

    Args:
        rewards: [B] float.
        valid: [B] bool; a row gets 0 if it has no score, or its greedy answer has none.
        ids: [B, 3] int64 row ids; the first two, epoch and prompt, find the greedy answer.
        greedy: one row per prompt with ``rewards`` and ``valid``, in any order.

    Raises:
        FormulaError: a prompt has not exactly one greedy answer, or rewards and rows differ in number.
    """
    import torch

    prompts = torch.cat([greedy.ids[:, :2], ids[:, :2]])
    names, number = torch.unique(prompts, dim=0, return_inverse=True)
    answer, asked = number[: len(greedy)], number[len(greedy) :]
    if not torch.equal(torch.sort(answer).values, torch.arange(len(names))):
        raise FormulaError(
            f"over_greedy: {len(greedy)} greedy answers and {len(names)} prompts",
            why="every prompt needs exactly one greedy answer",
            fix="decode one answer greedily for each sampled prompt",
        )
    place = torch.empty_like(answer).scatter_(0, answer, torch.arange(len(greedy)))[asked]
    baseline, is_known = greedy.dense("rewards")[place], greedy.dense("valid")[place]
    same_length("over_greedy", rewards=rewards, greedy_rewards=baseline, valid=valid)
    return (rewards - baseline).masked_fill(~(valid & is_known), 0)


def varied_groups(rewards: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """Return [B] bool, True for every row of a group in which two scored rows have different rewards.

    DAPO trains on these groups and samples others in place of the rest (arXiv 2503.14476, equation 11). In
    the rest, ``group_advantages`` and ``leave_one_out`` are 0.

    Args:
        rewards: [B] float.
        valid: [B] bool; a row without a score does not count in its group.
        groups: [B] int64; rows of one group share a number.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("varied_groups", rewards=rewards, valid=valid, groups=groups)
    names, group = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    most = rewards.new_full((len(names),), -math.inf)
    most = most.scatter_reduce(0, group, rewards.masked_fill(~valid, -math.inf), "amax")
    return (most > _least(rewards, valid, group, len(names)))[group]


def lagrangian_advantages(reward_advantages: Ragged, cost_advantages: Ragged, multiplier: float) -> Ragged:
    """Return [T], the advantage of reward over cost at the multiplier's price.

    A = (A_R - lambda A_C) / (1 + lambda); Safe RLHF, arXiv 2310.12773.

    Args:
        reward_advantages: aligned to the tokens.
        cost_advantages: the same for the cost, high where an answer does harm.
        multiplier: lambda, the price of one unit of cost in units of reward; not negative.

    Raises:
        FormulaError: rows differ in length, or lambda is negative or not finite.
    """
    if not 0 <= multiplier < math.inf:
        raise FormulaError(
            f"lagrangian_advantages: multiplier is {multiplier}", why="it must be finite and not negative"
        )
    aligned("lagrangian_advantages", reward_advantages=reward_advantages, cost_advantages=cost_advantages)
    mixed = (reward_advantages.values - multiplier * cost_advantages.values) / (1 + multiplier)
    return reward_advantages.with_values(mixed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Centred:
    rewards: Tensor
    """[B] reward minus the mean of the group's scored rows; 0 for a row without a score."""
    group: Tensor
    """[B] int64 index of the row's group in ``size``."""
    size: Tensor
    """[G] float number of the group's scored rows, at least 1."""


def _centred(rewards: Tensor, groups: Tensor, valid: Tensor) -> _Centred:
    """Centre rewards in their groups, measured from the least one, so that equal rewards are exactly 0."""
    names, group = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    zeros = rewards.new_zeros(len(names))
    size = zeros.index_add(0, group, valid.to(rewards.dtype)).clamp_min(1)
    rise = (rewards - _least(rewards, valid, group, len(names))[group]).masked_fill(~valid, 0)
    mean = zeros.index_add(0, group, rise) / size
    return _Centred(rewards=(rise - mean[group]).masked_fill(~valid, 0), group=group, size=size)


def _deviation(found: _Centred) -> Tensor:
    """Return [B], the sample deviation of each row's group."""
    squares = found.size.new_zeros(found.size.shape).index_add(0, found.group, found.rewards.square())
    return (squares / (found.size - 1).clamp_min(1)).sqrt()[found.group]


def _least(rewards: Tensor, valid: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return [G], the smallest reward of each group's scored rows; infinity if there is none."""
    highest = rewards.new_full((num_groups,), math.inf)
    return highest.scatter_reduce(0, group, rewards.masked_fill(~valid, math.inf), "amin")
