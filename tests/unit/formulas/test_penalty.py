"""Rewards spread over tokens, and penalties on divergence and length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.advantages import lagrangian_advantages
from rillflow.formulas.controllers import next_log_multiplier
from rillflow.formulas.penalty import (
    ended,
    mean_cost,
    mean_divergence,
    missing_end_rewards,
    overlong_rewards,
    penalised_rewards,
    penalised_token_costs,
    penalised_token_rewards,
    token_costs,
    token_rewards,
)
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish

MASKS = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6)


def test_the_reward_is_paid_at_the_last_loss_token() -> None:
    mask = Ragged.from_rows(
        [[False, True, True, False], [False], [], [True], [False, True, False, True]], torch.bool
    )
    found = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask)
    assert found.values.tolist() == [0, 0, 1, 0, 0, 4, 0, 0, 0, 5]
    assert found.values.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(masks=MASKS, data=st.data())
def test_a_rows_tokens_are_paid_its_reward_where_it_has_any(
    masks: list[list[bool]], data: st.DataObject
) -> None:
    mask = Ragged.from_rows(masks, torch.bool)
    numbers = st.floats(-5, 5, width=32)
    rewards = torch.tensor(data.draw(st.lists(numbers, min_size=len(mask), max_size=len(mask))))
    found = token_rewards(rewards, mask)
    expected = rewards.where(mask.sums() > 0, 0)
    assert torch.equal(found.sums(), expected)
    assert not bool(found.values[~mask.values].any())
    assert int((found.values != 0).sum()) == int((expected != 0).sum())


def test_each_token_pays_for_its_divergence_by_hand() -> None:
    mask = Ragged.from_rows([[False, True, True], [False, True]], torch.bool)
    sampler = mask.with_values(torch.tensor([9.0, -1.0, -2.0, math.nan, -0.5]))
    reference = mask.with_values(torch.tensor([0.0, -2.0, -2.5, 0.0, -0.25]))
    rewards = torch.tensor([1.0, -1.0])
    found = penalised_token_rewards(rewards, sampler, reference, mask, weight=0.1, estimator="k1")
    assert found.values.tolist() == pytest.approx([0.0, -0.1, 1.0 - 0.05, 0.0, -1.0 + 0.025])
    squared = penalised_token_rewards(rewards, sampler, reference, mask, weight=2.0, estimator="k2")
    assert squared.values.tolist() == pytest.approx([0.0, -1.0, 1.0 - 0.25, 0.0, -1.0 - 0.0625])
    free = penalised_token_rewards(rewards, sampler, reference, mask, weight=0.0, estimator="k3")
    assert torch.equal(free.values, token_rewards(rewards, mask).values)


@settings(max_examples=60, deadline=None)
@given(masks=MASKS, estimator=st.sampled_from(["k1", "k2", "k3"]), seed=st.integers(0, 99))
def test_a_rows_tokens_earn_its_penalised_reward(masks: list[list[bool]], estimator: str, seed: int) -> None:
    mask = Ragged.from_rows([[False, *row, True] for row in masks], torch.bool)
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(len(mask.values), generator=generator, dtype=torch.float64) for _ in range(2)]
    fields = [mask.with_values(column) for column in numbers]
    rewards = torch.randn(len(mask), generator=generator, dtype=torch.float64)
    options = {"weight": 0.3, "estimator": estimator}
    found = penalised_token_rewards(rewards, *fields, mask, **options)  # type: ignore[arg-type]
    expected = penalised_rewards(rewards, *fields, mask, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found.sums(), expected, rtol=0, atol=1e-12)


def test_the_mean_divergence_is_that_of_rows() -> None:
    mask = Ragged.from_rows([[False, True, True], [False, True], [False]], torch.bool)
    sampler = mask.with_values(torch.tensor([math.nan, -1.0, -2.0, 0.0, -0.5, 0.0]))
    reference = mask.with_values(torch.tensor([0.0, -2.0, -2.5, 0.0, -0.25, 0.0]))
    assert mean_divergence(sampler, reference, mask, estimator="k1") == pytest.approx((1.5 - 0.25) / 2)
    nothing = mask.with_values(torch.zeros(6, dtype=torch.bool))
    assert mean_divergence(sampler, reference, nothing, estimator="k3") == 0.0
    paid = penalised_rewards(torch.zeros(3), sampler, reference, mask, weight=1.0, estimator="k2")
    assert mean_divergence(sampler, reference, mask, estimator="k2") == pytest.approx(float(-paid.sum()) / 2)


def test_a_prompts_log_probabilities_are_never_read() -> None:
    mask = Ragged.from_rows([[False, True]], torch.bool)
    broken = mask.with_values(torch.tensor([math.nan, -1.0]))
    found = penalised_rewards(torch.tensor([1.0]), broken, broken, mask, weight=1.0, estimator="k3")
    assert found.tolist() == [1.0]


def overlong(lengths: list[int], limits: list[int], buffer: int) -> list[float]:
    """Return the length penalties of rows with these numbers of sampled tokens."""
    mask = Ragged.from_rows([[True] * length for length in lengths], torch.bool)
    found: list[float] = overlong_rewards(
        torch.zeros(len(lengths)), mask, torch.tensor(limits), buffer=buffer
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (140, -1.0)]
)
def test_the_overlong_penalty_is_a_straight_line_in_the_buffer(length: int, penalty: float) -> None:
    assert overlong([length], [100], 20) == [penalty]


def test_a_buffer_of_the_whole_length_charges_every_token() -> None:
    assert overlong([0, 1, 2, 4, 5], [4] * 5, 4) == [0.0, -0.25, -0.5, -1.0, -1.0]


def test_overlong_rewards_count_sampled_tokens_alone() -> None:
    mask = Ragged.from_rows([[False] * 9 + [True] * 2, [False, True, True, True, True], []], torch.bool)
    found = overlong_rewards(torch.tensor([1.0, 1.0, 0.5]), mask, torch.full((3,), 4), buffer=2)
    assert found.tolist() == [1.0, 0.0, 0.5]


def test_shapes_and_buffers_are_checked() -> None:
    mask = Ragged.from_rows([[True], [True]], torch.bool)
    field = mask.with_values(torch.zeros(2))
    other = Ragged.from_rows([[0.0, 0.0], []], torch.float32)
    with pytest.raises(FormulaError, match=r"token_rewards: rewards has shape \[1\] and loss_mask has \[2\]"):
        token_rewards(torch.zeros(1), mask)
    with pytest.raises(FormulaError, match="penalised_rewards: row 0 has 2 entries of reference_logprobs"):
        penalised_rewards(torch.zeros(2), field, other, mask, weight=1.0, estimator="k1")
    with pytest.raises(
        FormulaError, match="penalised_token_rewards: row 0 has 2 entries of sampler_logprobs"
    ):
        penalised_token_rewards(torch.zeros(2), other, field, mask, weight=1.0, estimator="k1")
    for buffer in (0, 11):
        with pytest.raises(FormulaError, match=f"buffer is {buffer} and max_tokens 10"):
            overlong_rewards(torch.zeros(2), mask, torch.full((2,), 10), buffer=buffer)
    with pytest.raises(FormulaError, match="buffer is 5 and max_tokens 3"):
        overlong_rewards(torch.zeros(2), mask, torch.tensor([10, 3]), buffer=5)
    with pytest.raises(FormulaError, match=r"overlong_rewards: limits has shape \[1\]"):
        overlong_rewards(torch.zeros(2), mask, torch.tensor([10]), buffer=5)


def test_costs_are_spread_as_rewards_are() -> None:
    mask, costs = Ragged.from_rows([[False, True, True], [True]], torch.bool), torch.tensor([2.0, 3.0])
    assert torch.equal(token_costs(costs, mask).values, token_rewards(costs, mask).values)


def test_the_mean_cost_counts_rows_that_have_one() -> None:
    costs = torch.tensor([1.0, 2.0, math.nan])
    assert mean_cost(costs, torch.tensor([True, True, False]), otherwise=9.0) == 1.5


def test_where_no_row_has_a_cost_the_multiplier_stays() -> None:
    costs, limit = torch.tensor([math.nan, math.nan]), 0.05
    observed = mean_cost(costs, torch.zeros(2, dtype=torch.bool), otherwise=limit)
    assert next_log_multiplier(0.7, observed, limit, lr=2.0) == 0.7


@settings(max_examples=40, deadline=None)
@given(multiplier=st.floats(0, 50), weight=st.floats(0.001, 1), seed=st.integers(0, 99))
def test_paid_half_in_reward_and_half_in_cost_divergence_weighs_the_same_at_any_multiplier(
    multiplier: float, weight: float, seed: int
) -> None:
    """Safe RLHF: [(r - b/2 k) - l (c + b/2 k)] / (1 + l) = (r - l c) / (1 + l) - b/2 k."""
    generator = torch.Generator().manual_seed(seed)
    mask = Ragged.from_rows([[False, True, True, True], [True, False]], torch.bool)
    rewards, costs = (torch.randn(2, dtype=torch.float64, generator=generator) for _ in range(2))
    sampler, reference = (
        mask.with_values(torch.randn(6, dtype=torch.float64, generator=generator)) for _ in range(2)
    )
    price = {"weight": weight, "estimator": "k1", "share": 0.5}
    earned = penalised_token_rewards(rewards, sampler, reference, mask, **price)  # type: ignore[arg-type]
    spent = penalised_token_costs(costs, sampler, reference, mask, **price)  # type: ignore[arg-type]
    mixed = lagrangian_advantages(earned, spent, multiplier)
    plain = lagrangian_advantages(token_rewards(rewards, mask), token_costs(costs, mask), multiplier)
    assert isinstance(mixed, Ragged) and isinstance(plain, Ragged)
    nats = torch.where(mask.values, sampler.values - reference.values, 0.0)
    torch.testing.assert_close(mixed.values, plain.values - weight / 2 * nats, rtol=1e-9, atol=1e-12)


def test_a_missing_end_costs_its_penalty() -> None:
    finish = torch.tensor([Finish.STOP, Finish.LENGTH, Finish.LENGTH], dtype=torch.int8)
    rewards = torch.tensor([1.0, 1.0, 0.0])
    assert missing_end_rewards(rewards, finish, penalty=0.5).tolist() == [1.0, 0.5, -0.5]
    assert ended(finish).tolist() == [True, False, False]
    with pytest.raises(FormulaError, match="missing_end_rewards: finish has shape"):
        missing_end_rewards(rewards, finish[:2], penalty=0.5)


def test_no_row_pays_no_penalty_for_length() -> None:
    assert overlong([], [], 2) == []


def test_the_overlong_penalty_follows_the_limit_of_each_row() -> None:
    assert overlong([9, 9], [10, 20], 2) == [-0.5, 0.0]
