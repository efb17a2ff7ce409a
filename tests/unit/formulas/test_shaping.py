"""Reward normalisation: by hand, over any split into steps, and without effect on unscored rows."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.shaping import (
    bounded_rewards,
    next_reward_count,
    next_reward_mean,
    next_reward_squares,
    normalised_rewards,
    rescaled_rewards,
)
from rillflow.records.ragged import Ragged

YES = torch.tensor([True, True, False, True])


def test_a_step_s_rewards_have_mean_0_and_deviation_1_and_others_stay() -> None:
    found = normalised_rewards(torch.tensor([1.0, 3.0, 0.0, 5.0]), YES)
    deviation = math.sqrt(8 / 3)
    assert found.tolist() == pytest.approx([-2 / deviation, 0.0, 0.0, 2 / deviation])
    assert normalised_rewards(torch.tensor([2.0, 2.0]), torch.tensor([True, True])).tolist() == [0.0, 0.0]
    none = normalised_rewards(torch.tensor([7.0]), torch.tensor([False]))
    assert none.tolist() == [7.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-50, 50), max_size=6), min_size=1, max_size=6))
def test_running_numbers_are_those_of_all_scores_however_they_come(steps: list[list[float]]) -> None:
    count = mean = squares = 0.0
    for step in steps:
        rewards, valid = (
            torch.tensor([*step, 99.0], dtype=torch.float64),
            torch.tensor([True] * len(step) + [False]),
        )
        known = {"count": count, "mean": mean}
        squares = next_reward_squares(rewards, valid, **known, squares=squares)
        count, mean = next_reward_count(valid, count=count), next_reward_mean(rewards, valid, **known)
    every = [each for step in steps for each in step]
    assert count == len(every)
    if every:
        assert mean == pytest.approx(fmean(every), abs=1e-9)
        assert squares == pytest.approx(pstdev(every) ** 2 * len(every), abs=1e-6)


def test_later_steps_are_measured_by_all_before() -> None:
    numbers = {"count": 4.0, "mean": 2.0, "squares": 16.0}
    found = rescaled_rewards(torch.tensor([4.0, 0.0, 5.0, 2.0]), YES, **numbers)
    assert found.tolist() == pytest.approx([1.0, -1.0, 5.0, 0.0])


def test_scores_that_never_differed_are_divided_by_1e_8() -> None:
    equal = {"count": 4.0, "mean": 2.0, "squares": 0.0}
    found = rescaled_rewards(torch.tensor([2.0, 3.0]), torch.tensor([True, True]), **equal)
    assert found.tolist() == pytest.approx([0.0, 1e8])


def test_bounds_come_before_the_price_of_length() -> None:
    mask = Ragged.from_rows([[False, True], [True] * 3, [True], [False, False]], torch.bool)
    rewards = torch.tensor([9.0, -9.0, 4.0, 0.5])
    found = bounded_rewards(rewards, YES, mask, low=-1.0, high=2.0, price=0.1)
    assert found.tolist() == pytest.approx([1.9, -1.3, 4.0, 0.5])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(FormulaError, match="valid has shape"):
        normalised_rewards(torch.zeros(3), YES)
    mask = Ragged.from_rows([[True]] * 4, torch.bool)
    with pytest.raises(FormulaError, match="low is 2"):
        bounded_rewards(torch.zeros(4), YES, mask, low=2.0, high=1.0, price=0.0)
