"""Group advantages: the definition, related formulas by reduction, and excluded outcomes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.advantages import EPSILON, group_advantages, penalised_group_advantages

REWARDS = st.floats(-100, 100, width=32)


def all_valid(groups: Tensor) -> Tensor:
    return torch.ones_like(groups, dtype=torch.bool)


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rewards, groups in any order, and valid."""
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    rewards = draw(st.lists(REWARDS, min_size=len(groups), max_size=len(groups)))
    valid = draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(valid)


@settings(max_examples=60, deadline=None)
@given(rows=scored(), scale=st.sampled_from(["std", "off"]))
def test_the_definition_group_by_group(rows: tuple[Tensor, Tensor, Tensor], scale: str) -> None:
    rewards, groups, valid = rows
    found = group_advantages(rewards, groups, valid, scale=scale)  # type: ignore[arg-type]
    for index in range(len(rewards)):
        mates = rewards[(groups == groups[index]) & valid]
        expected = 0.0
        if valid[index]:
            expected = float(rewards[index] - mates.mean())
            if scale == "std":
                expected /= float(mates.std() if len(mates) > 1 else 0.0) + EPSILON
        assert float(found[index]) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(reward=REWARDS, size=st.integers(1, 17), scale=st.sampled_from(["std", "off"]))
def test_equal_rewards_give_exactly_zero(reward: float, size: int, scale: str) -> None:
    rewards = torch.full((size + 2,), reward, dtype=torch.float32)
    rewards[-2:] = torch.tensor([reward, reward + 1])
    groups = torch.tensor([4] * size + [2, 2])
    found = group_advantages(rewards, groups, all_valid(groups), scale=scale)  # type: ignore[arg-type]
    assert found[:size].tolist() == [0.0] * size
    assert bool(found.isfinite().all())


@settings(max_examples=40, deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=9))
def test_rloo_is_grpo_without_deviation_times_g_over_g_minus_one(rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    size = len(values)
    leave_one_out = values - (values.sum() - values) / (size - 1)
    groups = torch.zeros(size, dtype=torch.int64)
    found = group_advantages(values, groups, all_valid(groups), scale="off") * size / (size - 1)
    torch.testing.assert_close(found, leave_one_out, rtol=1e-9, atol=1e-9)


def test_rows_without_a_score_get_nothing_and_count_for_nothing() -> None:
    rewards = torch.tensor([1.0, 3.0, -50.0, 7.0])
    groups = torch.tensor([0, 0, 0, 1])
    valid = torch.tensor([True, True, False, False])
    assert group_advantages(rewards, groups, valid, scale="off").tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_a_reward_of_an_invalid_row_is_never_read() -> None:
    rewards = torch.tensor([1.0, 3.0, float("nan"), float("inf")])
    groups = torch.zeros(4, dtype=torch.int64)
    valid = torch.tensor([True, True, False, False])
    found = group_advantages(rewards, groups, valid, scale="std")
    assert found[2:].tolist() == [0.0, 0.0]
    assert found[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_deviation_makes_the_scale_of_rewards_irrelevant() -> None:
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    small = group_advantages(rewards, groups, all_valid(groups), scale="std")
    large = group_advantages(1000 * rewards + 7, groups, all_valid(groups), scale="std")
    torch.testing.assert_close(small, large, rtol=1e-5, atol=0)


def test_shapes_and_options_are_checked() -> None:
    groups = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(FormulaError, match=r"groups has shape \[2\] and rewards has \[3\]"):
        group_advantages(torch.zeros(3), groups, all_valid(groups), scale="off")
    with pytest.raises(FormulaError, match=r"groups has shape \[2\] and rewards has \[3\]"):
        three = torch.zeros(3)
        penalised_group_advantages(three, three, groups, all_valid(three), scale="off")
    with pytest.raises(FormulaError, match=r"rewards has shape \[2, 1\]"):
        group_advantages(torch.zeros(2, 1), groups, all_valid(groups), scale="off")
    with pytest.raises(FormulaError, match=r"scale is 'sdt'.*\n.*did you mean 'std'"):
        group_advantages(torch.zeros(2), groups, all_valid(groups), scale="sdt")  # type: ignore[arg-type]


def test_a_flat_groups_penalties_are_not_made_as_large_as_a_reward() -> None:
    """Scores [1, 1, 1, 1] minus 0.001 per nat; divided by their own deviation they would be near 1."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    penalised = rewards - 1e-3 * torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    groups = torch.tensor([0] * 4 + [1] * 4)
    found = penalised_group_advantages(rewards, penalised, groups, all_valid(groups), scale="std")
    assert found[:4].tolist() == pytest.approx([1.5e-3, 0.5e-3, -0.5e-3, -1.5e-3])
    deviation = float(rewards[4:].std())
    expected = (penalised[4:] - penalised[4:].mean()) / (deviation + EPSILON)
    torch.testing.assert_close(found[4:], expected)


@settings(max_examples=40, deadline=None)
@given(rows=scored(), scale=st.sampled_from(["std", "off"]))
def test_without_a_penalty_it_is_the_plain_advantage(rows: tuple[Tensor, Tensor, Tensor], scale: str) -> None:
    rewards, groups, valid = rows
    plain = group_advantages(rewards, groups, valid, scale=scale)  # type: ignore[arg-type]
    same = penalised_group_advantages(rewards, rewards.clone(), groups, valid, scale=scale)  # type: ignore[arg-type]
    assert torch.equal(plain, same)
