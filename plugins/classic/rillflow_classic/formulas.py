"""Formulas of returns and advantages. Time comes first. Legend: T steps, N slots.

    A(t) = delta(t) + gamma lambda (1 - ended(t)) A(t + 1)
    delta(t) = r(t) + gamma (1 - terminated(t)) V(t + 1) - V(t)

``values`` has a row more than the steps: the last one is the bootstrap. Observation t + 1 is always the true
successor of step t (see ``fragment``), so a truncated episode bootstraps from its last observation and a
terminated one does not. Rows that only reset are no steps: their results are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rillflow.errors import FormulaError

EPSILON = 1e-8
"""Added to a deviation before the division."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Targets and advantages that V-trace corrects for the policy that acted."""

    targets: Tensor
    """[T, N] targets of the value function; the value itself in rows that only reset."""
    advantages: Tensor
    """[T, N] advantages of the policy that is trained."""
    weights: Tensor
    """[T, N] rho(t), the factors of the advantages in the policy gradient."""


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return [T, N], generalised advantage estimates (Schulman et al., arXiv 1506.02438, equation 16).

    A(t) = sum over l of (gamma lambda)^l delta(t + l), up to the end of the episode or of the fragment.

    Args:
        rewards: [T, N].
        values: [T + 1, N].
        terminated: [T, N] bool.
        truncated: [T, N] bool.
        valid: [T, N] bool.
        gamma: discount.
        lam: lambda; 0 gives the error of one step, 1 the return less the value.

    Raises:
        FormulaError: shapes differ.
    """
    _aligned("gae", rewards, values, terminated=terminated, truncated=truncated, valid=valid)
    deltas = torch.where(valid, _errors(rewards, values, terminated, gamma), 0.0)
    return _accumulated(deltas, (gamma * lam) * _goes_on(values, terminated, truncated, valid))


def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    *,
    gamma: float,
    n: int,
) -> Tensor:
    """Return [T, N], returns of n steps and the value after them (Sutton and Barto 2018, equation 7.1).

    G(t) = sum over i < n of gamma^i r(t + i) + gamma^n V(t + n); an episode's end and the fragment's end
    come first where they are nearer.

    Args:
        rewards: [T, N].
        values: [T + 1, N].
        terminated: [T, N] bool.
        truncated: [T, N] bool.
        valid: [T, N] bool.
        gamma: discount.
        n: number of steps, at least 1.

    Raises:
        FormulaError: shapes differ, or n is smaller than 1.
    """
    _aligned("n_step_returns", rewards, values, terminated=terminated, truncated=truncated, valid=valid)
    if n < 1:
        raise FormulaError(f"n_step_returns: n is {n}", why="a return has at least one step")
    one_step = rewards + gamma * torch.where(terminated, 0.0, values[1:])
    returns = one_step
    for _ in range(min(n, len(rewards)) - 1):
        later = torch.cat([returns[1:], values[-1:]])
        returns = torch.where(terminated | truncated, one_step, rewards + gamma * later)
    return torch.where(valid, returns, 0.0)


def v_trace(
    logprobs: Tensor,
    acted_logprobs: Tensor,
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    *,
    gamma: float,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> Corrected:
    """Return V-trace targets and advantages (Espeholt et al., arXiv 1802.01561, equation 1, section 4.2).

    v(t) = V(t) + rho(t) delta(t) + gamma c(t) (1 - ended(t)) (v(t + 1) - V(t + 1))
    A(t) = r(t) + gamma (1 - terminated(t)) v(t + 1) - V(t)
    rho = min(clip_rho, pi / mu), c = lambda min(clip_c, pi / mu); pi is trained, mu acted.

    The policy gradient is that of rho(t) A(t) log pi. The two come apart, because advantages are normalised
    before they are weighted: otherwise the shift would give rows of weight 0 a gradient.

    If pi = mu and lambda = 1, v is the return of all steps and A is ``gae`` with lambda = 1.

    Args:
        logprobs: [T, N] log pi of the actions.
        acted_logprobs: [T, N] log mu of the actions.
        rewards: [T, N].
        values: [T + 1, N] of pi.
        terminated: [T, N] bool.
        truncated: [T, N] bool.
        valid: [T, N] bool.
        gamma: discount.
        lam: lambda.
        clip_rho: largest rho; it sets which policy's value v is.
        clip_c: largest c; it sets the speed of contraction.

    Raises:
        FormulaError: shapes differ.
    """
    _aligned(
        "v_trace",
        rewards,
        values,
        logprobs=logprobs,
        acted_logprobs=acted_logprobs,
        terminated=terminated,
        truncated=truncated,
        valid=valid,
    )
    ratios = torch.exp(logprobs - acted_logprobs)
    rho, c = ratios.clamp(max=clip_rho), lam * ratios.clamp(max=clip_c)
    deltas = torch.where(valid, rho * _errors(rewards, values, terminated, gamma), 0.0)
    corrections = _accumulated(deltas, gamma * c * _goes_on(values, terminated, truncated, valid))
    targets = values[:-1] + corrections
    later = torch.cat([targets[1:], values[-1:]])
    advantages = rewards + gamma * torch.where(terminated, 0.0, later) - values[:-1]
    return Corrected(targets=targets, advantages=torch.where(valid, advantages, 0.0), weights=rho)


def normalised(advantages: Tensor, valid: Tensor) -> Tensor:
    """Return advantages with mean 0 and deviation 1 over the valid rows; 0 in the others.

    (A - mean) / (std + 1e-8), with the deviation of the population, so that parts can be summed over ranks.

    Raises:
        FormulaError: shapes differ.
    """
    if advantages.shape != valid.shape:
        raise FormulaError(f"normalised: valid has shape {list(valid.shape)}, not {list(advantages.shape)}")
    return scaled(advantages, valid, moments(advantages, valid))


def moments(advantages: Tensor, valid: Tensor) -> Tensor:
    """Return [3]: number, sum and sum of squares of valid advantages, which add up over ranks."""
    kept = torch.where(valid, advantages, 0.0).double()
    return torch.stack([valid.sum().double(), kept.sum(), (kept * kept).sum()])


def scaled(advantages: Tensor, valid: Tensor, total: Tensor) -> Tensor:
    """Return ``normalised`` advantages with the moments of all ranks."""
    count, sum_, squares = total.tolist()
    mean = sum_ / max(count, 1.0)
    deviation = max(squares / max(count, 1.0) - mean * mean, 0.0) ** 0.5
    return torch.where(valid, (advantages - mean) / (deviation + EPSILON), 0.0)


def _errors(rewards: Tensor, values: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Return [T, N], delta(t)."""
    return rewards + gamma * torch.where(terminated, 0.0, values[1:]) - values[:-1]


def _goes_on(values: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor) -> Tensor:
    """Return [T, N], 1 where the episode has a next step, else 0."""
    return (valid & ~(terminated | truncated)).to(values.dtype)


def _accumulated(deltas: Tensor, decays: Tensor) -> Tensor:
    """Return [T, N], x(t) = delta(t) + decay(t) x(t + 1), from the back."""
    result = torch.empty_like(deltas)
    last = torch.zeros_like(deltas[0])
    rows = zip(deltas.unbind(), decays.unbind(), result.unbind(), strict=True)
    for delta, decay, row in reversed(list(rows)):
        last = torch.addcmul(delta, decay, last, out=row)
    return result


def _aligned(formula: str, rewards: Tensor, values: Tensor, **others: Tensor) -> None:
    """Refuse rewards that are not [T, N], values that are not [T + 1, N], and others that are not [T, N]."""
    if rewards.dim() != 2:
        raise FormulaError(f"{formula}: rewards have shape {list(rewards.shape)}, not [T, N]")
    expected = (rewards.shape[0] + 1, rewards.shape[1])
    if tuple(values.shape) != expected:
        raise FormulaError(
            f"{formula}: values have shape {list(values.shape)}, not {list(expected)}",
            why="they have a row more than the rewards: the value after the last step",
        )
    for name, tensor in others.items():
        if tensor.shape != rewards.shape:
            raise FormulaError(
                f"{formula}: {name} has shape {list(tensor.shape)}, and rewards {list(rewards.shape)}"
            )
