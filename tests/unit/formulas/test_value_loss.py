"""The critic's loss: golden values, and its gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.losses import value_loss

NUMBERS = st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    return value_loss(values, returns, clip=clip, old_values=old_values).losses


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # within the bound
        (0.5, 0.0, 1.0, 0.32, 0.0),  # past the bound and nearer: the bound's error, no gradient
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # past the bound and further off: its own error
        (3.0, 0.0, 1.0, 2.0, 2.0),  # overshot
        (0.0, 0.0, 1.0, 0.5, -1.0),  # not moved
    ],
)
def test_by_hand_with_a_bound_of_a_fifth(
    value: float, old: float, target: float, loss: float, slope: float
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([number], dtype=torch.float64, requires_grad=True) for number in (old, target)]
    found = clipped_value_loss(values, *others, clip=0.2)
    found.sum().backward()
    assert values.grad is not None
    assert float(found.detach()) == pytest.approx(loss, rel=1e-12)
    assert float(values.grad) == pytest.approx(slope, rel=1e-12)
    assert others[0].grad is None and others[1].grad is None


@settings(max_examples=60, deadline=None)
@given(values=NUMBERS, old=NUMBERS, returns=NUMBERS, clip=st.sampled_from([0.01, 0.2, 5.0]))
def test_the_bound_never_lowers_the_loss(
    values: list[float], old: list[float], returns: list[float], clip: float
) -> None:
    fields = [torch.tensor(column, dtype=torch.float64) for column in (values, old, returns)]
    free = clipped_value_loss(*fields, clip=0.0)
    torch.testing.assert_close(free, (fields[0] - fields[2]).square() / 2, rtol=0, atol=0)
    assert bool((clipped_value_loss(*fields, clip=clip) >= free).all())
    near = (fields[0] - fields[1]).abs() < clip
    bounded = clipped_value_loss(*fields, clip=clip)
    torch.testing.assert_close(bounded[near], free[near], rtol=1e-9, atol=1e-9)


def test_shapes_are_checked() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(FormulaError, match=r"value_loss: returns has shape \[2\]"):
        clipped_value_loss(three, three, two, clip=0.2)
