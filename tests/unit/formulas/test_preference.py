"""The loss of pairs: golden values, and that only the difference of two scores counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.preference import bradley_terry, preference_accuracy

SCORES = st.lists(st.floats(-30, 30), min_size=4, max_size=4)


def test_by_hand() -> None:
    chosen = torch.tensor([0.0, 1.0, -1.0, 40.0, -40.0], dtype=torch.float64)
    rejected = torch.zeros(5, dtype=torch.float64)
    found = bradley_terry(chosen, rejected)
    expected = [math.log(2), math.log1p(math.exp(-1)), math.log1p(math.exp(1)), math.exp(-40), 40.0]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert preference_accuracy(chosen, rejected).tolist() == [False, True, False, True, False]


@settings(max_examples=50, deadline=None)
@given(chosen=SCORES, rejected=SCORES)
def test_the_two_probabilities_of_a_pair_add_up_and_a_shift_changes_nothing(
    chosen: list[float], rejected: list[float]
) -> None:
    one, other = torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64)
    both = (-bradley_terry(one, other)).exp() + (-bradley_terry(other, one)).exp()
    torch.testing.assert_close(both, torch.ones_like(both), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        bradley_terry(one + 7, other + 7), bradley_terry(one, other), rtol=1e-9, atol=1e-12
    )


def test_the_gradient_is_the_probability_of_the_wrong_answer() -> None:
    chosen = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.1, 1.0], dtype=torch.float64, requires_grad=True)
    bradley_terry(chosen, rejected).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    wrong = torch.sigmoid(rejected - chosen).detach()
    torch.testing.assert_close(chosen.grad, -wrong)
    torch.testing.assert_close(rejected.grad, wrong)


def test_shapes_are_checked() -> None:
    for formula in (bradley_terry, preference_accuracy):
        with pytest.raises(FormulaError, match=rf"{formula.__name__}: rejected has shape \[2\]"):
            formula(torch.zeros(3), torch.zeros(2))
