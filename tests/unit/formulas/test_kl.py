"""Estimators of a divergence, against the divergence itself."""

from __future__ import annotations

import pytest
import torch

from rillflow.errors import FormulaError
from rillflow.formulas.kl import divergence
from rillflow.formulas.penalty import penalised_rewards
from rillflow.records.ragged import Ragged


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    policy = torch.randn(50, dtype=torch.float64).log_softmax(0)
    reference = (policy + 0.3 * torch.randn(50, dtype=torch.float64)).log_softmax(0)
    return policy, reference


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    policy, reference = distributions()
    exact = float((policy.exp() * (policy - reference)).sum())
    mean = float((policy.exp() * divergence(policy - reference, estimator)).sum())  # type: ignore[arg-type]
    assert mean == pytest.approx(exact, rel=1e-12)
    assert exact > 0.01


def test_golden_values() -> None:
    ratio = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert divergence(ratio, "k1").tolist() == [0.0, 1.0, -1.0]
    assert divergence(ratio, "k2").tolist() == [0.0, 0.5, 0.5]
    expected = [0.0, 0.36787944117144233, 0.7182818284590451]
    assert divergence(ratio, "k3").tolist() == pytest.approx(expected, rel=1e-14)


def test_k2_and_k3_are_never_negative_and_agree_near_zero() -> None:
    ratio = torch.linspace(-3, 3, 101, dtype=torch.float64)
    assert float(divergence(ratio, "k2").min()) >= 0
    assert float(divergence(ratio, "k3").min()) >= 0
    small = ratio * 1e-4
    torch.testing.assert_close(divergence(small, "k2"), divergence(small, "k3"), rtol=1e-3, atol=1e-12)


def test_the_gradient_of_k2_points_to_the_reference() -> None:
    ratio = torch.tensor([2.0, -2.0], requires_grad=True)
    divergence(ratio, "k2").sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [2.0, -2.0]


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(FormulaError, match="'k4'"):
        divergence(torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_rewards_pay_for_the_divergence_of_sampled_tokens_alone() -> None:
    mask = Ragged.from_rows([[False, True, True], [False]], torch.bool)
    sampler = mask.with_values(torch.tensor([9.0, -1.0, -2.0, 9.0]))
    reference = mask.with_values(torch.tensor([0.0, -2.0, -2.5, 0.0]))
    rewards = torch.tensor([1.0, 2.0])
    found = penalised_rewards(rewards, sampler, reference, mask, weight=0.1, estimator="k1")
    assert found.tolist() == pytest.approx([1.0 - 0.1 * 1.5, 2.0])
