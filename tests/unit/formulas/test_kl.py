"""Divergence estimators compared with the divergence itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rillflow.errors import FormulaError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.losses import divergence
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


def pull(place: str, estimator: str, seed: int) -> float:
    """Return the cosine of a penalty's expected gradient with that of KL(pi || ref), over 8 tokens."""
    torch.manual_seed(seed)
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    logs = logits.log_softmax(0)
    ratio = logs - (logs + 0.5 * torch.randn(8, dtype=torch.float64)).detach().log_softmax(0)
    (true,) = torch.autograd.grad((logs.exp() * ratio).sum(), logits, retain_graph=True)
    cost = divergence(ratio, estimator)  # type: ignore[arg-type]
    paid = cost.detach() * logs if place == "reward" else cost
    (found,) = torch.autograd.grad((logs.detach().exp() * paid).sum(), logits)
    assert float(true.norm()) > 1e-2
    return float(found @ true / true.norm() / max(float(found.norm()), 1e-9))


SEEDS = range(30)


@pytest.mark.parametrize(("place", "estimator"), [("reward", "k1"), ("loss", "k2")])
def test_where_it_is_accepted_the_penalty_pulls_as_the_divergence_falls(place: str, estimator: str) -> None:
    assert [pull(place, estimator, seed) for seed in SEEDS] == pytest.approx([1.0] * len(SEEDS))


def test_k3_in_the_loss_pulls_nearly_so() -> None:
    assert min(pull("loss", "k3", seed) for seed in SEEDS) > 0.85


def test_k1_in_the_loss_pulls_nowhere_and_k2_and_k3_in_the_reward_often_away() -> None:
    assert max(abs(pull("loss", "k1", seed)) for seed in SEEDS) < 1e-6
    for estimator in ("k2", "k3"):
        assert sum(pull("reward", estimator, seed) < 0 for seed in SEEDS) > 5


@pytest.mark.parametrize(("place", "estimator"), [("loss", "k1"), ("reward", "k2"), ("reward", "k3")])
def test_a_pair_that_does_not_pull_back_is_refused_where_it_has_a_price(place: str, estimator: str) -> None:
    settings = {"kl_in": place, "kl_estimator": estimator}
    with pytest.raises(ValidationError, match=rf"kl is 0\.1 in the {place} and kl_estimator is {estimator}"):
        PolicyLossConfig.model_validate({"kl": 0.1, **settings})
    assert PolicyLossConfig.model_validate(settings).kl_paid is None


@pytest.mark.parametrize(("place", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_the_estimator_follows_the_place(place: str, estimator: str) -> None:
    config = PolicyLossConfig.model_validate({"kl": 0.1, "kl_in": place})
    assert (config.estimator, config.kl_paid) == (estimator, place)


def test_k3_far_below_the_reference_is_finite_and_keeps_a_gradient() -> None:
    ratio = torch.tensor([-95.0, -20.5, -3.0, 30.0, 95.0], requires_grad=True)
    found = divergence(ratio, "k3")
    found.sum().backward()
    assert ratio.grad is not None
    assert bool(found.isfinite().all())
    held = 1 - math.exp(20)
    assert ratio.grad.tolist() == pytest.approx([held, held, 1 - math.exp(3), 1.0, 1.0])


RATIOS = st.floats(-300, 300, allow_nan=False)
BOUNDS = st.floats(1.01, 4e8)


def bounded_k3(ratios: list[float], bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and gradients."""
    ratio = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    found = divergence(ratio, "k3", bound)
    (gradient,) = torch.autograd.grad(found.sum(), ratio)
    return found.detach(), gradient


@settings(max_examples=200, deadline=None)
@given(ratio=RATIOS, bound=BOUNDS)
def test_the_bounded_gradient_of_k3_is_one_minus_the_bounded_ratio(ratio: float, bound: float) -> None:
    value, gradient = bounded_k3([ratio], bound)
    ratio_to_policy = math.exp(min(-ratio, math.log(bound)))
    assert float(gradient) == pytest.approx(1 - ratio_to_policy, rel=1e-9, abs=1e-12)
    exact = math.expm1(-ratio) + ratio
    assert -1e-12 <= float(value) <= exact * (1 + 1e-9) + 1e-12, "the bound only ever lowers the estimate"


@settings(max_examples=200, deadline=None)
@given(ratio=RATIOS, bound=BOUNDS)
def test_within_the_bound_k3_and_its_gradient_keep_their_bits(ratio: float, bound: float) -> None:
    ratio = max(ratio, -math.log(bound) * (1 - 1e-12))
    plain = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    expected = (-plain).expm1() + plain
    (gradient,) = torch.autograd.grad(expected.sum(), plain)
    found = bounded_k3([ratio], bound)
    assert torch.equal(found[0], expected.detach()) and torch.equal(found[1], gradient)


@settings(max_examples=100, deadline=None)
@given(bound=BOUNDS, step=st.floats(1e-6, 1e-3))
def test_bounded_k3_has_no_jump_and_grows_away_from_the_reference(bound: float, step: float) -> None:
    edge = -math.log(bound)
    values, gradients = (each.tolist() for each in bounded_k3([edge - step, edge + step, edge - 10], bound))
    assert 0 < values[0] - values[1] < 2.01 * step * (bound - 1)
    assert abs(gradients[0] - gradients[1]) < 1.01 * step * bound
    assert values[2] > values[0] and gradients[2] == gradients[0]
