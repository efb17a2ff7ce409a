"""Row baselines other than the group's mean: definitions, and reductions to each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.advantages import (
    group_advantages,
    lagrangian_advantages,
    leave_one_out,
    over_greedy,
    varied_groups,
)
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged

REWARDS = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, 1.0]))


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rewards, groups in any order, and valid."""
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    rewards = draw(st.lists(REWARDS, min_size=len(groups), max_size=len(groups)))
    valid = draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(valid)


def everyone(rewards: Tensor) -> Tensor:
    return torch.ones(len(rewards), dtype=torch.bool)


def over(rewards: Tensor, greedy: Tensor, valid: Tensor, greedy_valid: Tensor) -> list[float]:
    """Return advantages of one row per prompt over the prompt's greedy answer."""
    ids = torch.tensor([[0, prompt, 0] for prompt in range(len(greedy))])
    answers = Batch(ids=ids, fields={"rewards": greedy, "valid": greedy_valid})
    found: list[float] = over_greedy(rewards, valid, ids, greedy=answers).tolist()
    return found


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 0.5, 2.0])
    groups = torch.tensor([7, 7, 3, 7, 3])
    found = leave_one_out(rewards, groups, everyone(rewards))
    assert found.tolist() == pytest.approx([0.75, -0.75, 3.0, 0.0, -3.0])


@settings(max_examples=60, deadline=None)
@given(rows=scored())
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    rewards, groups, valid = rows
    found = leave_one_out(*rows)
    for index in range(len(rewards)):
        others = (groups == groups[index]) & valid
        others[index] = False
        expected = 0.0
        if valid[index] and bool(others.any()):
            expected = float(rewards[index] - rewards[others].mean())
        assert float(found[index]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=9))
def test_rloo_is_g_over_g_minus_one_times_grpo_without_deviation(rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    groups, size = torch.zeros(len(values), dtype=torch.int64), len(values)
    grpo = group_advantages(values, groups, everyone(values), scale="off")
    torch.testing.assert_close(
        leave_one_out(values, groups, everyone(values)), grpo * size / (size - 1), rtol=1e-14, atol=0
    )


@settings(max_examples=40, deadline=None)
@given(reward=REWARDS, size=st.integers(1, 17))
def test_equal_rewards_are_exactly_zero_and_not_varied(reward: float, size: int) -> None:
    rewards = torch.full((size,), reward, dtype=torch.float32)
    groups = torch.zeros(size, dtype=torch.int64)
    assert leave_one_out(rewards, groups, everyone(rewards)).tolist() == [0.0] * size
    assert varied_groups(rewards, everyone(rewards), groups).tolist() == [False] * size


@settings(max_examples=60, deadline=None)
@given(rows=scored())
def test_varied_groups_are_those_with_two_different_scores(rows: tuple[Tensor, Tensor, Tensor]) -> None:
    rewards, groups, valid = rows
    found = varied_groups(rewards, valid, groups)
    for index in range(len(rewards)):
        mates = rewards[(groups == groups[index]) & valid].tolist()
        assert bool(found[index]) == (len(set(mates)) > 1)
    assert not bool(leave_one_out(rewards, groups, valid)[~found].any())
    assert not bool(group_advantages(rewards, groups, valid, scale="std")[~found].any())


@settings(max_examples=40, deadline=None)
@given(rows=scored(), data=st.data())
def test_the_order_of_rows_changes_nothing(rows: tuple[Tensor, Tensor, Tensor], data: st.DataObject) -> None:
    rewards, groups, valid = rows
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    again = leave_one_out(rewards[order], groups[order], valid[order])
    torch.testing.assert_close(again, leave_one_out(*rows)[order], rtol=1e-9, atol=1e-9)
    varied = varied_groups(rewards[order], valid[order], groups[order])
    assert torch.equal(varied, varied_groups(rewards, valid, groups)[order])


def test_a_reward_of_an_invalid_row_is_never_read() -> None:
    rewards = torch.tensor([1.0, 3.0, math.nan, math.inf, -math.inf])
    groups = torch.tensor([0, 0, 0, 0, 1])
    valid = torch.tensor([True, True, False, False, False])
    assert leave_one_out(rewards, groups, valid).tolist() == [-2.0, 2.0, 0.0, 0.0, 0.0]
    assert varied_groups(rewards, valid, groups).tolist() == [True, True, True, True, False]
    greedy = torch.tensor([0.5, math.nan, 0.0, 0.0, 0.0])
    greedy_valid = torch.tensor([True, False, True, True, True])
    assert over(rewards, greedy, valid, greedy_valid) == [0.5, 0.0, 0.0, 0.0, 0.0]


def test_the_greedy_answer_itself_has_no_advantage_and_a_shift_of_rewards_none_either() -> None:
    rewards, greedy = torch.tensor([1.0, 0.0, 0.25]), torch.tensor([0.5, 0.5, 0.25])
    both = everyone(rewards)
    assert over(rewards, greedy, both, both) == [0.5, -0.5, 0.0]
    assert over(rewards + 8, greedy + 8, both, both) == [0.5, -0.5, 0.0]


def test_reward_over_cost_by_hand_and_at_its_ends() -> None:
    reward = Ragged.from_rows([[1.0, -2.0], [0.0]], torch.float32)
    cost = reward.with_values(torch.tensor([3.0, 1.0, 0.0]))
    found = lagrangian_advantages(reward, cost, 0.5)
    assert torch.equal(found.lengths, reward.lengths)
    assert found.values.tolist() == pytest.approx([-1 / 3, -5 / 3, 0.0])
    assert torch.equal(lagrangian_advantages(reward, cost, 0.0).values, reward.values)
    torch.testing.assert_close(lagrangian_advantages(reward, cost, 1e9).values, -cost.values)


def test_shapes_and_prices_are_checked() -> None:
    three, two = torch.zeros(3), torch.zeros(2)
    groups = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(FormulaError, match=r"leave_one_out: valid has shape \[2\]"):
        leave_one_out(three, groups, everyone(two))
    with pytest.raises(FormulaError, match=r"varied_groups: groups has shape \[3\]"):
        varied_groups(two, everyone(two), groups)
    with pytest.raises(FormulaError, match=r"over_greedy: greedy_rewards has shape \[2\]"):
        over(three, two, everyone(three), everyone(two))
    with pytest.raises(FormulaError, match="row 1 has 2 entries of cost_advantages and 1 of reward_adv"):
        lagrangian_advantages(
            Ragged.from_rows([[0.0], [0.0]], torch.float32),
            Ragged.from_rows([[0.0], [0.0, 0.0]], torch.float32),
            1.0,
        )
    ragged = Ragged.from_rows([[0.0], [0.0]], torch.float32)
    for price in (-1.0, math.inf, math.nan):
        with pytest.raises(FormulaError, match=f"multiplier is {price}"):
            lagrangian_advantages(ragged, ragged, price)


def test_greedy_answers_are_found_by_prompt_whatever_their_order_and_sample() -> None:
    ids = torch.tensor([[0, 7, 0], [0, 7, 1], [1, 7, 0], [0, 2, 0]])
    rewards, valid = torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([True, True, True, False])
    greedy = Batch(
        ids=torch.tensor([[1, 7, -1], [0, 2, -1], [0, 7, -1]]),
        fields={"rewards": torch.tensor([0.5, 1.0, 0.25]), "valid": torch.ones(3, dtype=torch.bool)},
    )
    assert over_greedy(rewards, valid, ids, greedy=greedy).tolist() == [0.75, -0.25, 0.0, 0.0]
    for wrong in ([0, 1], [0, 1, 2, 2], [0, 1, 1]):
        with pytest.raises(FormulaError, match=r"over_greedy: \d greedy answers and 3 prompts"):
            over_greedy(rewards, valid, ids, greedy=greedy.select(wrong))


def test_a_group_varies_where_two_of_its_rewards_differ() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1])
    assert varied_groups(rewards, everyone(rewards), groups).tolist() == [False] * 3
    some = torch.tensor([1.0, 0.5, 0.0])
    assert varied_groups(some, everyone(some), groups).tolist() == [True, True, False]
