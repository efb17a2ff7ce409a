"""Advantages and returns: golden loops in float64, and identities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow_classic.formulas import gae, moments, scaled, v_trace

GAMMA = 0.9


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Random steps with resets after every end."""

    rewards: Tensor
    values: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The formulas' arguments, in order."""
        return self.rewards, self.values, self.terminated, self.truncated, self.valid


def steps(seed: int, length: int = 12, slots: int = 3) -> Steps:
    random = np.random.default_rng(seed)
    terminated = np.zeros((length, slots), bool)
    truncated, valid = terminated.copy(), ~terminated
    for slot in range(slots):
        for t in range(length):
            if t and (terminated | truncated)[t - 1, slot]:
                valid[t, slot] = False
            elif random.random() < 0.3:
                (terminated if random.random() < 0.5 else truncated)[t, slot] = True
    return Steps(
        rewards=torch.from_numpy(random.normal(size=(length, slots)) * valid),
        values=torch.from_numpy(random.normal(size=(length + 1, slots))),
        terminated=torch.from_numpy(terminated),
        truncated=torch.from_numpy(truncated),
        valid=torch.from_numpy(valid),
    )


def episode_return(given: Steps, t: int, slot: int) -> float:
    """Sum discounted rewards to the episode's or the fragment's end; bootstrap unless terminated."""
    total, discount = 0.0, 1.0
    while t < len(given.rewards):
        total += discount * float(given.rewards[t, slot])
        discount *= GAMMA
        t += 1
        if given.terminated[t - 1, slot]:
            return total
        if given.truncated[t - 1, slot]:
            break
    return total + discount * float(given.values[t, slot])


def n_step_returns(given: Steps, n: int) -> Tensor:
    """G(t) of Sutton and Barto (2018), equation 7.1, up to the end of the episode or the fragment."""
    one_step = given.rewards + GAMMA * torch.where(given.terminated, 0.0, given.values[1:])
    returns = one_step
    for _ in range(n - 1):
        later = torch.cat([returns[1:], given.values[-1:]])
        returns = torch.where(given.terminated | given.truncated, one_step, given.rewards + GAMMA * later)
    return returns


seeds = st.integers(0, 10_000)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_gae_with_lambda_1_is_the_return_less_the_value(seed: int) -> None:
    given_ = steps(seed)
    advantages = gae(*given_.arguments, gamma=GAMMA, lam=1.0)
    for t, slot in given_.valid.nonzero().tolist():
        expected = episode_return(given_, t, slot) - float(given_.values[t, slot])
        assert float(advantages[t, slot]) == pytest.approx(expected)
    assert not advantages[~given_.valid].any()


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_gae_with_lambda_0_is_the_one_step_error(seed: int) -> None:
    given_ = steps(seed)
    expected = n_step_returns(given_, 1) - given_.values[:-1]
    advantages = gae(*given_.arguments, gamma=GAMMA, lam=0.0)
    torch.testing.assert_close(advantages[given_.valid], expected[given_.valid])


@settings(max_examples=30, deadline=None)
@given(seed=seeds, lam=st.floats(0, 1))
def test_gae_is_the_weighted_mean_of_n_step_returns(seed: int, lam: float) -> None:
    given_ = steps(seed)
    returns = [n_step_returns(given_, n) for n in range(1, 13)]
    weights = [(1 - lam) * lam**index for index in range(11)]
    mixed = sum(weight * each for weight, each in zip([*weights, lam**11], returns, strict=True))
    advantages = gae(*given_.arguments, gamma=GAMMA, lam=lam)
    torch.testing.assert_close(advantages[given_.valid], (mixed - given_.values[:-1])[given_.valid])


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_what_follows_a_reset_changes_nothing_before_it(seed: int) -> None:
    given_ = steps(seed)
    changed = given_.rewards.clone()
    ends = (~given_.valid).nonzero().tolist()
    for t, slot in ends:
        changed[t:, slot] += 100
    before = gae(*given_.arguments, gamma=GAMMA, lam=0.7)
    after = gae(changed, *given_.arguments[1:], gamma=GAMMA, lam=0.7)
    for slot in range(3):
        first = min((t for t, s in ends if s == slot), default=12)
        torch.testing.assert_close(before[:first, slot], after[:first, slot])


def test_a_truncated_step_bootstraps_and_a_terminated_one_does_not() -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    values = torch.tensor([[0.0, 0.0], [10.0, 10.0]], dtype=torch.float64)
    terminated = torch.tensor([[True, False]])
    advantages = gae(one, values, terminated, ~terminated, terminated | True, gamma=GAMMA, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 10.0]], dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_v_trace_on_policy_is_gae_with_lambda_1(seed: int) -> None:
    given_ = steps(seed)
    logprobs = torch.full_like(given_.rewards, -1.5)
    corrected = v_trace(logprobs, logprobs, *given_.arguments, gamma=GAMMA)
    advantages = gae(*given_.arguments, gamma=GAMMA, lam=1.0)
    torch.testing.assert_close(corrected.advantages, advantages)
    returns = n_step_returns(given_, 12)
    torch.testing.assert_close(corrected.targets[given_.valid], returns[given_.valid])


@settings(max_examples=30, deadline=None)
@given(seed=seeds, lam=st.floats(0, 1), clip_rho=st.floats(0.5, 2), clip_c=st.floats(0.5, 2))
def test_v_trace_is_the_paper_s_sum(seed: int, lam: float, clip_rho: float, clip_c: float) -> None:
    given_ = steps(seed)
    random = np.random.default_rng(seed)
    log_ratios = torch.from_numpy(random.normal(size=given_.rewards.shape))
    zero = torch.zeros_like(log_ratios)
    corrected = v_trace(
        log_ratios, zero, *given_.arguments, gamma=GAMMA, lam=lam, clip_rho=clip_rho, clip_c=clip_c
    )
    ratios, ended = log_ratios.exp(), given_.terminated | given_.truncated
    for s, slot in given_.valid.nonzero().tolist():
        target, product = float(given_.values[s, slot]), 1.0
        for t in range(s, len(ratios)):
            after = 0.0 if given_.terminated[t, slot] else float(given_.values[t + 1, slot])
            error = float(given_.rewards[t, slot]) + GAMMA * after - float(given_.values[t, slot])
            target += GAMMA ** (t - s) * product * min(clip_rho, float(ratios[t, slot])) * error
            product *= lam * min(clip_c, float(ratios[t, slot]))
            if ended[t, slot]:
                break
        assert float(corrected.targets[s, slot]) == pytest.approx(target)


def test_normalised_advantages_ignore_rows_that_reset() -> None:
    random = torch.Generator().manual_seed(0)
    advantages = torch.randn(20, 4, generator=random) * 3 + 5
    valid = torch.rand(20, 4, generator=random) < 0.7
    advantages = torch.where(valid, advantages, 1e6)
    result = scaled(advantages, valid, moments(advantages, valid))
    assert float(result[valid].mean()) == pytest.approx(0, abs=1e-6)
    assert float(result[valid].std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert not result[~valid].any()


def test_equal_advantages_become_zero() -> None:
    advantages, valid = torch.full((3, 2), 0.25), torch.ones(3, 2, dtype=torch.bool)
    result = scaled(advantages, valid, moments(advantages, valid))
    assert not result.any()


def test_wrong_shapes_are_named() -> None:
    given_ = steps(0)
    with pytest.raises(FormulaError, match=r"rewards has shape \[12, 3\], and values \[12, 3\]"):
        gae(given_.rewards, given_.values[1:], *given_.arguments[2:], gamma=GAMMA, lam=1)
    with pytest.raises(FormulaError, match=r"valid has shape \[12\]"):
        gae(*given_.arguments[:-1], given_.valid[:, 0], gamma=GAMMA, lam=1)
