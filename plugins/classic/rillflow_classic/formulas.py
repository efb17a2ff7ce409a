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
    _aligned("gae", values, rewards=rewards, terminated=terminated, truncated=truncated, valid=valid)
    deltas = torch.where(valid, _errors(rewards, values, terminated, gamma), 0.0)
    return _accumulated(deltas, (gamma * lam) * _goes_on(values, terminated, truncated, valid))


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
    _aligned("v_trace", values, rewards=rewards, terminated=terminated, truncated=truncated, valid=valid)
    _aligned("v_trace", values, logprobs=logprobs, acted_logprobs=acted_logprobs)
    ratios = torch.exp(logprobs - acted_logprobs)
    rho, c = ratios.clamp(max=clip_rho), lam * ratios.clamp(max=clip_c)
    deltas = torch.where(valid, rho * _errors(rewards, values, terminated, gamma), 0.0)
    corrections = _accumulated(deltas, gamma * c * _goes_on(values, terminated, truncated, valid))
    targets = values[:-1] + corrections
    later = torch.cat([targets[1:], values[-1:]])
    advantages = rewards + gamma * torch.where(terminated, 0.0, later) - values[:-1]
    return Corrected(targets=targets, advantages=torch.where(valid, advantages, 0.0), weights=rho)


def moments(advantages: Tensor, valid: Tensor) -> Tensor:
    """Return [3]: number, sum and sum of squares of valid advantages, which add up over ranks."""
    kept = torch.where(valid, advantages, 0.0).double()
    return torch.stack([valid.sum().double(), kept.sum(), (kept * kept).sum()])


def scaled(advantages: Tensor, valid: Tensor, total: Tensor) -> Tensor:
    """Return advantages with mean 0 and deviation 1 over the valid rows of all ranks; 0 in the others.

    (A - mean) / (std + 1e-8), with the deviation of the population; ``total`` sums the ranks' moments.
    """
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


def _aligned(formula: str, values: Tensor, **steps: Tensor) -> None:
    """Refuse tensors that are not [T, N], for values [T + 1, N]."""
    for name, tensor in steps.items():
        if tensor.dim() != 2 or values.shape != (len(tensor) + 1, tensor.shape[1]):
            raise FormulaError(
                f"{formula}: {name} has shape {list(tensor.shape)}, and values {list(values.shape)}",
                why="a step has one row, and values have a row more: the value after the last step",
            )


def linear_baseline(observations: Tensor, starts: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """Return values [T + 1, N] of a least-squares fit to the returns [T, N] of valid rows.

    It is linear in the observation, its square, and three powers of the time in the episode (Duan et al.,
    arXiv 1604.06778).

    Args:
        observations: [T + 1, N, ...].
        starts: [T + 1, N] bool: first rows of episodes.
        returns: [T, N].
        valid: [T, N] bool.
    """
    numbers = torch.arange(len(starts))[:, None].expand(starts.shape)
    times = (numbers - torch.where(starts, numbers, 0).cummax(0).values)[..., None] / 100
    rows = observations.flatten(2).clamp(-10, 10)
    features = torch.cat((rows, rows**2, times, times**2, times**3, torch.ones_like(times)), -1).double()
    known = features[:-1][valid]
    ridge = 1e-5 * torch.eye(known.shape[1], dtype=torch.float64)
    fitted = torch.linalg.solve(known.T @ known + ridge, known.T @ returns[valid].double())
    values: Tensor = (features @ fitted).float()
    return values
