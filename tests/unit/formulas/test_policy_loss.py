"""The clipped loss: golden values, the on-policy law, and where gradients must not flow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rillflow.errors import FormulaError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.policy_loss import clipped_policy_loss, importance_weights

OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
BOUNDS = st.fixed_dictionaries(
    {
        "clip_low": st.sampled_from([0.0, 0.2, 0.9]),
        "clip_high": st.sampled_from([0.0, 0.2, 0.28, 5.0]),
        "dual_clip": st.sampled_from([0.0, 1.5, 3.0]),
    }
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "objective"),
    [
        (1.1, 2.0, {}, 2.2),
        (1.5, 2.0, {}, 2.4),
        (0.5, 2.0, {}, 1.0),
        (0.5, -2.0, {}, -1.6),
        (1.5, -2.0, {}, -3.0),
        (5.0, -2.0, {}, -6.0),
        (5.0, -2.0, {"dual_clip": 0.0}, -10.0),
        (5.0, 2.0, {"dual_clip": 1.5}, 2.4),
        (1.25, 2.0, {"clip_high": 0.28}, 2.5),
        (3.0, 0.0, {}, 0.0),
    ],
)
def test_golden_values(ratio: float, advantage: float, options: dict[str, float], objective: float) -> None:
    loss = clipped_policy_loss(
        torch.tensor([math.log(ratio)], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        **{**OPTIONS, **options},
    )
    assert float(loss) == pytest.approx(-objective, rel=1e-12, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(advantages=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8), bounds=BOUNDS)
def test_on_policy_gradient_is_that_of_a_log_pi(advantages: list[float], bounds: dict[str, float]) -> None:
    logprobs = torch.linspace(-3, -0.1, len(advantages), dtype=torch.float64, requires_grad=True)
    values = torch.tensor(advantages, dtype=torch.float64)
    clipped_policy_loss(logprobs - logprobs.detach(), values, **bounds).sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -values, rtol=1e-12, atol=0)


def test_where_the_clip_binds_there_is_no_gradient() -> None:
    log_ratio = torch.tensor([0.5, -0.5, -0.5, 0.5, 2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    clipped_policy_loss(log_ratio, advantages, **OPTIONS).sum().backward()
    assert log_ratio.grad is not None
    expected = [0.0, 0.0, -math.exp(-0.5), math.exp(0.5), 0.0]
    assert log_ratio.grad.tolist() == pytest.approx(expected, rel=1e-6)


def test_advantages_and_weights_carry_no_gradient() -> None:
    log_ratio = torch.zeros(2, requires_grad=True)
    advantages = torch.ones(2, requires_grad=True)
    old = torch.full((2,), -1.0, requires_grad=True)
    sampler = torch.full((2,), -1.5, requires_grad=True)
    weights = importance_weights(old, sampler, cap=2.0)
    (clipped_policy_loss(log_ratio, advantages, **OPTIONS) * weights).sum().backward()
    assert log_ratio.grad is not None and bool((log_ratio.grad != 0).all())
    assert advantages.grad is None and old.grad is None and sampler.grad is None


def test_importance_weights_are_ratios_up_to_the_cap() -> None:
    old, sampler = torch.tensor([-1.0, -1.0, -5.0]), torch.tensor([-1.0, -2.0, -1.0])
    found = importance_weights(old, sampler, cap=2.0)
    assert found.tolist() == pytest.approx([1.0, 2.0, math.exp(-4)], rel=1e-6)


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_a_dual_clip_that_would_bound_an_unchanged_policy_is_refused(bound: float) -> None:
    with pytest.raises(ValidationError, match=f"{bound:g} would bound"):
        PolicyLossConfig(dual_clip=bound)
    assert PolicyLossConfig(dual_clip=0).dual_clip == 0


def test_shapes_are_checked() -> None:
    with pytest.raises(FormulaError, match=r"advantages has shape \[2\] and log_ratio has \[3\]"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(2), **OPTIONS)
    with pytest.raises(FormulaError, match="importance_weights: sampler_logprobs"):
        importance_weights(torch.zeros(3), torch.zeros(2), cap=1.0)
