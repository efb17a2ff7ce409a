"""Advantages of tokens: what followed a token in its row, against what the critic expected.

    token_rewards, values ── loss tokens of scored rows, laid end to end ──> deltas [N]
    deltas [N] ── discounted sums within each row ──> advantages ── whitened ──> advantages
                                                          └── + values ──> returns

Prompt tokens and inserted tokens are skipped: the successor of a loss token is the row's next loss token, and
only loss tokens are discounted. The value of a token is the expectation given the tokens before it. After a
row's last loss token the expectation is 0, unless the row was cut off and ``bootstrapped_rewards`` pays the
value there. Results are aligned to the tokens, and 0 everywhere but at loss tokens of scored rows.

Legend: B rows, T tokens, N loss tokens of scored rows, L the most of them in one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.errors import FormulaError
from rillflow.formulas.advantages import EPSILON
from rillflow.formulas.penalty import ended
from rillflow.formulas.penalty import token_rewards as at_the_last
from rillflow.formulas.shapes import aligned

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.ragged import Ragged


def gae(
    token_rewards: Ragged, values: Ragged, loss_mask: Ragged, valid: Tensor, *, gamma: float, lam: float
) -> Ragged:
    """Return [T], generalised advantage estimates of the loss tokens.

    delta_t = R_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; GAE, arXiv 1506.02438,
    equations 16 to 18. lam = 1 with gamma = 1 is return minus value; lam = 0 is the error of one step.

    Args:
        token_rewards: float, the reward paid at each token.
        values: float, the critic's value before each token.
        loss_mask: bool, True where the policy sampled the token.
        valid: [B] bool; a row without a score gets 0.
        gamma: discount per token, in [0, 1].
        lam: weight per token of a later error, in [0, 1].

    Raises:
        FormulaError: rows differ in length, or ``gamma`` or ``lam`` is not in [0, 1].
    """
    aligned("gae", loss_mask=loss_mask, token_rewards=token_rewards, values=values, valid=valid)
    _share("gae", gamma=gamma, lam=lam)
    counted = _counted(loss_mask, valid)
    rewards, expected = token_rewards.where(counted), values.where(counted)
    following = expected.values.roll(-1).masked_fill(_left(expected) <= 1, 0)
    deltas = rewards.values + gamma * following - expected.values
    return _placed(_discounted_sums(rewards.with_values(deltas), gamma * lam), counted)


def bootstrapped_rewards(
    token_rewards: Ragged, loss_mask: Ragged, final_values: Tensor, finish: Tensor, *, gamma: float
) -> Ragged:
    """Return [T] token rewards; a row that was cut off also gets, at its last, the value of what follows.

    R_T + gamma V(s_{T+1}) if the row has no end: ``gae`` and ``lambda_returns`` of these continue into that
    value instead of treating the limit as an end (Pardo et al., arXiv 1712.00378).

    Args:
        token_rewards: float, the reward paid at each token.
        loss_mask: bool, True where the policy sampled the token.
        final_values: [B] the critic's value after each row's last token.
        finish: [B] reason for each row's end.
        gamma: discount per token, in [0, 1].

    Raises:
        FormulaError: rows differ in length, or ``gamma`` is not in [0, 1].
    """
    aligned("bootstrapped_rewards", loss_mask=loss_mask, token_rewards=token_rewards, finish=finish)
    _share("bootstrapped_rewards", gamma=gamma)
    ahead = at_the_last(gamma * final_values.masked_fill(ended(finish), 0), loss_mask)
    return token_rewards.with_values(token_rewards.values + ahead.values.to(token_rewards.values.dtype))


def returns_to_go(token_rewards: Ragged, loss_mask: Ragged, valid: Tensor, *, gamma: float) -> Ragged:
    """Return [T], the discounted rewards from each loss token to the end of its row.

    G_t = sum_{k >= 0} gamma^k R_{t+k}, over loss tokens; ``gae`` with lam = 1 and values of 0.

    Args:
        token_rewards: float, the reward paid at each token.
        loss_mask: bool, True where the policy sampled the token.
        valid: [B] bool; a row without a score gets 0.
        gamma: discount per token, in [0, 1].

    Raises:
        FormulaError: rows differ in length, or ``gamma`` is not in [0, 1].
    """
    aligned("returns_to_go", loss_mask=loss_mask, token_rewards=token_rewards, valid=valid)
    _share("returns_to_go", gamma=gamma)
    counted = _counted(loss_mask, valid)
    return _placed(_discounted_sums(token_rewards.where(counted), gamma), counted)


def value_targets(advantages: Ragged, values: Ragged, loss_mask: Ragged) -> Ragged:
    """Return [T], the critic's target before each loss token: advantage plus value.

    R_t = A_t + V_t (the lambda-return; PPO, arXiv 1707.06347). A row without a score has advantage 0, so
    its targets are its values.

    Args:
        advantages: float, from ``gae`` before they are whitened.
        values: float, the critic's value before each token.
        loss_mask: bool, True where the policy sampled the token.

    Raises:
        FormulaError: rows differ in length.
    """
    aligned("value_targets", loss_mask=loss_mask, advantages=advantages, values=values)
    targets = advantages.values + values.values
    return loss_mask.with_values(targets.masked_fill(~loss_mask.values, 0))


def lambda_returns(
    token_rewards: Ragged, values: Ragged, loss_mask: Ragged, valid: Tensor, *, gamma: float, lam: float
) -> Ragged:
    """Return [T], ``value_targets`` of the advantages from ``gae``: what a critic learns.

    Args and raises as in ``gae``; a row without a score has its values as targets.
    """
    found = gae(token_rewards, values, loss_mask, valid, gamma=gamma, lam=lam)
    return value_targets(found, values, loss_mask)


def whitened(advantages: Ragged, loss_mask: Ragged, valid: Tensor) -> Ragged:
    """Return [T] advantages with mean 0 and deviation 1 over the loss tokens of all scored rows.

    (A - mean) / (std + 1e-6), with the sample deviation (N - 1), summed in float64. Equal advantages, and a
    single one, give exactly 0.

    Args:
        advantages: float.
        loss_mask: bool, True where the policy sampled the token.
        valid: [B] bool; a row without a score gets 0 and does not count.

    Raises:
        FormulaError: rows differ in length.
    """
    aligned("whitened", loss_mask=loss_mask, advantages=advantages, valid=valid)
    counted = _counted(loss_mask, valid)
    chosen = advantages.where(counted).values.double()
    if chosen.numel():
        chosen = chosen - chosen.min()  # so that equal ones are exactly 0, whatever their mean rounds to
        chosen = chosen - chosen.mean()
        variance = chosen.square().sum() / max(chosen.numel() - 1, 1)
        chosen = chosen / (variance.sqrt() + EPSILON)
    return _placed(chosen.to(advantages.values.dtype), counted)


def whitened_returns(token_rewards: Ragged, loss_mask: Ragged, valid: Tensor, *, gamma: float) -> Ragged:
    """Return [T] discounted rewards to go, whitened over the batch: the advantages of REINFORCE++.

    A = whitened(G), G_t = sum_{k >= 0} gamma^k R_{t+k} of rewards that pay for divergence token by token
    (``penalised_token_rewards``); arXiv 2501.03262.

    Args:
        token_rewards: float, the reward paid at each token.
        loss_mask: bool, True where the policy sampled the token.
        valid: [B] bool; a row without a score gets 0 and does not count.
        gamma: discount per token, in [0, 1].

    Raises:
        FormulaError: rows differ in length, or ``gamma`` is not in [0, 1].
    """
    return whitened(returns_to_go(token_rewards, loss_mask, valid, gamma=gamma), loss_mask, valid)


def _share(formula: str, **options: float) -> None:
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise FormulaError(f"{formula}: {name} is {value}", why="it must be between 0 and 1")


def _counted(loss_mask: Ragged, valid: Tensor) -> Ragged:
    """Return a bool field, True at the loss tokens of scored rows."""
    return loss_mask.with_values(loss_mask.values & loss_mask.expand(valid))


def _placed(chosen: Tensor, counted: Ragged) -> Ragged:
    """Put entries [N] of the counted tokens back at their positions."""
    return counted.with_values(chosen.new_zeros(counted.values.shape).masked_scatter(counted.values, chosen))


def _left(rows: Ragged) -> Tensor:
    """Return [N] int64, the number of entries from each one to the end of its row, itself included."""
    return rows.expand(rows.lengths) - rows.positions


def _discounted_sums(rows: Ragged, discount: float) -> Tensor:
    """Return [N] sum_{k >= 0} discount^k x_{t+k} to the end of each row, in log2 L passes over all entries.

    The sum over the next 2 n entries is that over the next n, plus that over the n after them.
    """
    sums, left, reach = rows.values, _left(rows), 1
    longest = int(rows.lengths.max()) if len(rows) else 0
    while reach < longest:
        sums = sums + discount**reach * sums.roll(-reach).masked_fill(left <= reach, 0)
        reach *= 2
    return sums
