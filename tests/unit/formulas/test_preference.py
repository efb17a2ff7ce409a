"""The preference loss of pairs: golden values, and dependence only on the difference of scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.losses import margin_preference_loss, preference_loss

SCORES = st.lists(st.floats(-30, 30), min_size=4, max_size=4)


def test_by_hand() -> None:
    chosen = torch.tensor([0.0, 1.0, -1.0, 40.0, -40.0], dtype=torch.float64)
    rejected = torch.zeros(5, dtype=torch.float64)
    found = preference_loss(chosen, rejected)
    expected = [math.log(2), math.log1p(math.exp(-1)), math.log1p(math.exp(1)), math.exp(-40), 40.0]
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.metrics["preference/accuracy/mean"].tolist() == [False, True, False, True, False]


@settings(max_examples=50, deadline=None)
@given(chosen=SCORES, rejected=SCORES)
def test_the_two_probabilities_of_a_pair_add_up_and_a_shift_changes_nothing(
    chosen: list[float], rejected: list[float]
) -> None:
    one, other = torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64)
    both = (-preference_loss(one, other).losses).exp() + (-preference_loss(other, one).losses).exp()
    torch.testing.assert_close(both, torch.ones_like(both), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        preference_loss(one + 7, other + 7).losses, preference_loss(one, other).losses, rtol=1e-9, atol=1e-12
    )


def test_the_gradient_is_the_probability_of_the_wrong_answer() -> None:
    chosen = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.1, 1.0], dtype=torch.float64, requires_grad=True)
    preference_loss(chosen, rejected).losses.sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    wrong = torch.sigmoid(rejected - chosen).detach()
    torch.testing.assert_close(chosen.grad, -wrong)
    torch.testing.assert_close(rejected.grad, wrong)


def test_a_margin_is_taken_from_the_difference() -> None:
    """A pair that is better by 2 with margin 3 counts like a pair that is worse by 1."""
    chosen, rejected = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])
    found = margin_preference_loss(chosen, rejected, torch.tensor([3.0, 0.0]))
    assert found.losses.tolist() == pytest.approx([math.log1p(math.e), math.log(2)], rel=1e-6)
    assert found.metrics["preference/margin/mean"].tolist() == [2.0, 0.0], "what scores say, no margin taken"
    assert torch.equal(
        margin_preference_loss(chosen, rejected, torch.zeros(2)).losses,
        preference_loss(chosen, rejected).losses,
    )


def test_centring_draws_scores_to_0_and_leaves_their_difference() -> None:
    chosen = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    found = preference_loss(chosen, rejected, centring=0.1)
    assert found.losses.item() == pytest.approx(math.log1p(math.exp(-1)) + 0.1 * 25)
    assert found.metrics["preference/centre/mean"].tolist() == [2.5]
    found.losses.sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    wrong = 1 / (1 + math.e)
    assert float(chosen.grad) == pytest.approx(-wrong + 0.1 * 2 * 5)
    assert float(chosen.grad - rejected.grad) == pytest.approx(-2 * wrong), "as without it"


def test_shapes_are_checked() -> None:
    with pytest.raises(FormulaError, match="margin has shape"):
        margin_preference_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3))
    with pytest.raises(FormulaError, match=r"preference_loss: rejected has shape \[2\]"):
        preference_loss(torch.zeros(3), torch.zeros(2))
