"""Token advantages: the recursion by hand and row by row, limits by reduction, and values never read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.advantages import group_advantages
from rillflow.formulas.penalty import token_rewards
from rillflow.formulas.token_advantages import (
    bootstrapped_rewards,
    gae,
    lambda_returns,
    returns_to_go,
    value_targets,
    whitened,
    whitened_returns,
)
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish

NUMBERS = st.floats(-10, 10, width=32)
SHARES = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Fields of some rows."""

    rewards: Ragged
    values: Ragged
    mask: Ragged
    valid: Tensor

    def gae(self, gamma: float, lam: float) -> Ragged:
        return gae(self.rewards, self.values, self.mask, self.valid, gamma=gamma, lam=lam)

    def changed(self, change: Callable[[Ragged], Ragged], valid: Tensor) -> Rows:
        return Rows(
            rewards=change(self.rewards), values=change(self.values), mask=change(self.mask), valid=valid
        )


@st.composite
def rows(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Rows:
    """Draw up to six rows of up to nine tokens, with any loss tokens or none."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=6))
    mask = Ragged.from_rows(masks, torch.bool)
    total = len(mask.values)
    columns = [draw(st.lists(NUMBERS, min_size=total, max_size=total)) for _ in range(2)]
    valid = draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks)))
    rewards, values = (mask.with_values(torch.tensor(column, dtype=dtype)) for column in columns)
    return Rows(rewards=rewards, values=values, mask=mask, valid=torch.tensor(valid))


def row_by_row(found: Rows, gamma: float, lam: float) -> list[float]:
    """Compute the recursion as written, token by token from the last."""
    result = [0.0] * len(found.mask.values)
    bounds = found.mask.bounds.tolist()
    for row in range(len(found.mask)):
        following = advantage = 0.0
        for token in reversed(range(bounds[row], bounds[row + 1])):
            if found.mask.values[token] and found.valid[row]:
                value = float(found.values.values[token])
                delta = float(found.rewards.values[token]) + gamma * following - value
                advantage = delta + gamma * lam * advantage
                following, result[token] = value, advantage
    return result


def one_row() -> Rows:
    """Return a prompt token, two loss tokens, an inserted one, and the last loss token with the reward."""
    mask = Ragged.from_rows([[False, True, True, False, True]], torch.bool)
    return Rows(
        rewards=mask.with_values(torch.tensor([9.0, 0.0, -0.5, 9.0, 1.0])),
        values=mask.with_values(torch.tensor([9.0, 0.25, 0.5, 9.0, 0.75])),
        mask=mask,
        valid=torch.tensor([True]),
    )


def test_gae_by_hand() -> None:
    # deltas: 0 + .5 * .5 - .25 = 0; -.5 + .5 * .75 - .5 = -.625; 1 - .75 = .25; discount .5 * .5
    found = one_row().gae(gamma=0.5, lam=0.5)
    assert found.values.tolist() == [0.0, -0.140625, -0.5625, 0.0, 0.25]


@settings(max_examples=100, deadline=None)
@given(found=rows(), gamma=SHARES, lam=SHARES)
def test_gae_is_the_recursion_from_loss_token_to_loss_token(found: Rows, gamma: float, lam: float) -> None:
    assert found.gae(gamma, lam).values.tolist() == pytest.approx(row_by_row(found, gamma, lam), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(found=rows(), gamma=SHARES)
def test_with_lam_zero_it_is_the_error_of_one_step(found: Rows, gamma: float) -> None:
    advantages = found.gae(gamma, 0.0).values
    kept = found.mask.values & found.mask.expand(found.valid)
    places, row = kept.nonzero().squeeze(1).tolist(), found.mask.row_of.tolist()
    for order, here in enumerate(places):
        after = places[order + 1] if order + 1 < len(places) else None
        same = after is not None and row[here] == row[after]
        following = found.values.values[after] if same else 0.0
        expected = found.rewards.values[here] + gamma * following - found.values.values[here]
        assert float(advantages[here]) == pytest.approx(float(expected), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(found=rows(), gamma=SHARES)
def test_with_lam_one_it_is_the_return_minus_the_value(found: Rows, gamma: float) -> None:
    returns = returns_to_go(found.rewards, found.mask, found.valid, gamma=gamma)
    kept = found.mask.values & found.mask.expand(found.valid)
    expected = (returns.values - found.values.values).masked_fill(~kept, 0)
    torch.testing.assert_close(found.gae(gamma, 1.0).values, expected, rtol=0, atol=1e-9)


def test_without_values_and_discounts_every_token_of_a_row_has_its_reward() -> None:
    """PPO without a critic is the policy gradient of the row's reward."""
    mask = Ragged.from_rows([[False, True, True, True], [False, True]], torch.bool)
    rewards, valid = torch.tensor([2.0, -1.0]), torch.tensor([True, True])
    spread = token_rewards(rewards, mask)
    nothing = mask.with_values(torch.zeros(6))
    found = gae(spread, nothing, mask, valid, gamma=1.0, lam=1.0)
    assert found.values.tolist() == [0.0, 2.0, 2.0, 2.0, 0.0, -1.0]
    assert torch.equal(found.values, returns_to_go(spread, mask, valid, gamma=1.0).values)


def test_a_long_row_keeps_its_precision() -> None:
    count = 5000
    mask = Ragged.from_rows([[True] * count], torch.bool)
    rewards = mask.with_values(torch.full((count,), 0.1))
    found = returns_to_go(rewards, mask, torch.tensor([True]), gamma=0.999)
    exact = [0.1 * (1 - 0.999**left) / 0.001 for left in range(count, 0, -1)]
    torch.testing.assert_close(found.values.double(), torch.tensor(exact).double(), rtol=2e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(found=rows(torch.float32), gamma=SHARES, lam=SHARES, data=st.data())
def test_neither_the_order_of_rows_nor_other_tokens_change_a_bit(
    found: Rows, gamma: float, lam: float, data: st.DataObject
) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(found.mask)))))
    shuffled = found.changed(lambda field: field.select(order), found.valid[order])
    expected = found.gae(gamma, lam)
    assert torch.equal(shuffled.gae(gamma, lam).values, expected.select(order).values)

    cuts = data.draw(st.lists(st.integers(0, 9), min_size=len(found.mask), max_size=len(found.mask)))
    width = data.draw(st.integers(1, 3))

    def longer(field: Ragged) -> Ragged:
        """Insert tokens that are no loss tokens into every row, with NaN values that must not be read."""
        fill = False if field.values.dtype == torch.bool else math.nan
        extra = torch.full((width,), fill, dtype=field.values.dtype)
        parts = [
            torch.cat((row[:cut], extra, row[cut:])) for row, cut in zip(field.rows(), cuts, strict=True)
        ]
        return Ragged(values=torch.cat(parts), lengths=field.lengths + width)

    wide = found.changed(longer, found.valid)
    padded = wide.gae(gamma, lam)
    assert torch.equal(padded.values[wide.mask.values], expected.values[found.mask.values])
    assert not bool(padded.values[~wide.mask.values].any())


def test_rows_without_a_score_are_never_read() -> None:
    mask = Ragged.from_rows([[False, True, True], [False, True]], torch.bool)
    bad = mask.with_values(torch.tensor([0.0, 1.0, 3.0, math.nan, math.inf]))
    valid = torch.tensor([True, False])
    nothing = mask.with_values(torch.zeros(5))
    assert gae(bad, nothing, mask, valid, gamma=1.0, lam=1.0).values.tolist() == [0.0, 4.0, 3.0, 0.0, 0.0]
    assert returns_to_go(bad, mask, valid, gamma=1.0).values.tolist() == [0.0, 4.0, 3.0, 0.0, 0.0]
    half = math.sqrt(0.5)
    assert whitened(bad, mask, valid).values.tolist() == pytest.approx([0, -half, half, 0, 0], abs=1e-5)


def test_targets_are_advantages_plus_values_at_loss_tokens() -> None:
    row = one_row()
    advantages = row.gae(gamma=1.0, lam=1.0)
    assert value_targets(advantages, row.values, row.mask).values.tolist() == [0.0, 0.5, 0.5, 0.0, 1.0]
    step = row.gae(gamma=1.0, lam=0.0)
    assert value_targets(step, row.values, row.mask).values.tolist() == [0.0, 0.5, 0.25, 0.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(found=rows())
def test_whitened_by_its_definition_over_the_counted_tokens(found: Rows) -> None:
    kept = found.mask.values & found.mask.expand(found.valid)
    numbers = found.rewards.values[kept]
    result = whitened(found.rewards, found.mask, found.valid).values
    assert not bool(result[~kept].any())
    if len(numbers) > 1:
        expected = (numbers - numbers.mean()) / (numbers.std() + 1e-6)
        torch.testing.assert_close(result[kept], expected, rtol=1e-9, atol=1e-9)
    else:
        assert not bool(result.any())


@settings(max_examples=40, deadline=None)
@given(found=rows(), data=st.data())
def test_whitening_sees_neither_the_order_of_rows_nor_a_shift(found: Rows, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(found.mask)))))
    expected = whitened(found.rewards, found.mask, found.valid)
    shifted = found.rewards.with_values(found.rewards.values + 3)
    again = whitened(shifted.select(order), found.mask.select(order), found.valid[order])
    torch.testing.assert_close(again.values, expected.select(order).values, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(reward=st.one_of(st.floats(-100, 100), st.just(0.1)), count=st.integers(0, 40))
def test_equal_advantages_or_one_or_none_are_exactly_zero(reward: float, count: int) -> None:
    mask = Ragged.from_rows([[True]] * count + [[]], torch.bool)
    field = mask.with_values(torch.full((count,), reward, dtype=torch.float64))
    found = whitened(field, mask, torch.ones(len(mask), dtype=torch.bool))
    assert found.values.tolist() == [0.0] * count


def test_whitened_returns_on_rows_of_one_token_are_the_group_advantages_of_one_group() -> None:
    """REINFORCE++ is GRPO with the whole batch as its group."""
    rewards, valid = torch.tensor([1.0, 0.0, 0.0, 2.5]), torch.tensor([True, True, False, True])
    mask = Ragged.from_rows([[False, True]] * 4, torch.bool)
    found = whitened_returns(token_rewards(rewards, mask), mask, valid, gamma=0.9)
    expected = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), valid, scale="std")
    torch.testing.assert_close(found.values[1::2], expected)


def test_whitened_returns_discount_before_they_whiten() -> None:
    mask = Ragged.from_rows([[True, True], [True]], torch.bool)
    rewards = mask.with_values(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))  # to go: 2, 2, 0
    found = whitened_returns(rewards, mask, torch.tensor([True, True]), gamma=0.5)
    deviation = math.sqrt((2 * (2 / 3) ** 2 + (4 / 3) ** 2) / 2)
    assert found.values.tolist() == pytest.approx([2 / 3 / deviation, 2 / 3 / deviation, -4 / 3 / deviation])


def test_no_rows_are_no_trouble() -> None:
    empty = Ragged.from_rows([], torch.float32)
    mask, valid = Ragged.from_rows([], torch.bool), torch.zeros(0, dtype=torch.bool)
    assert gae(empty, empty, mask, valid, gamma=1.0, lam=1.0).values.shape == (0,)
    assert whitened_returns(empty, mask, valid, gamma=1.0).values.shape == (0,)


def test_shapes_and_discounts_are_checked() -> None:
    row = one_row()
    short = Ragged.from_rows([[0.0] * 4], torch.float32)
    with pytest.raises(FormulaError, match="gae: row 0 has 4 entries of values and 5 of loss_mask"):
        gae(row.rewards, short, row.mask, row.valid, gamma=1.0, lam=1.0)
    with pytest.raises(FormulaError, match=r"gae: valid has shape \[2\] and loss_mask has \[1\]"):
        gae(row.rewards, row.values, row.mask, torch.tensor([True, False]), gamma=1.0, lam=1.0)
    with pytest.raises(FormulaError, match="returns_to_go: row 0 has 4 entries of token_rewards"):
        returns_to_go(short, row.mask, row.valid, gamma=1.0)
    with pytest.raises(FormulaError, match="value_targets: row 0 has 4 entries of advantages"):
        value_targets(short, row.values, row.mask)
    with pytest.raises(FormulaError, match="whitened: row 0 has 4 entries of advantages"):
        whitened(short, row.mask, row.valid)
    with pytest.raises(FormulaError, match=r"whitened: valid has shape \[2\] and loss_mask has \[1\]"):
        whitened(row.values, row.mask, torch.tensor([True, False]))
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(FormulaError, match=f"gae: lam is {wrong}"):
            row.gae(gamma=1.0, lam=wrong)
        with pytest.raises(FormulaError, match=f"returns_to_go: gamma is {wrong}"):
            returns_to_go(row.rewards, row.mask, row.valid, gamma=wrong)


@settings(max_examples=40, deadline=None)
@given(rows=rows(), gamma=SHARES, lam=SHARES)
def test_lambda_returns_are_the_targets_of_the_advantages(rows: Rows, gamma: float, lam: float) -> None:
    found = lambda_returns(rows.rewards, rows.values, rows.mask, rows.valid, gamma=gamma, lam=lam)
    assert torch.equal(found.values, value_targets(rows.gae(gamma, lam), rows.values, rows.mask).values)


@settings(max_examples=40, deadline=None)
@given(seen=rows(), gamma=SHARES, lam=SHARES, data=st.data())
def test_a_row_that_was_cut_off_goes_on_into_the_critics_value(
    seen: Rows, gamma: float, lam: float, data: st.DataObject
) -> None:
    """delta_T = R_T + gamma V(s_{T+1}) - V_T for truncated rows, computed by a separate recursion."""
    count = len(seen.mask)
    cut = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    final = torch.tensor(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=torch.float64)
    finish = torch.tensor([Finish.LENGTH if each else Finish.STOP for each in cut], dtype=torch.int8)
    paid = bootstrapped_rewards(seen.rewards, seen.mask, final, finish, gamma=gamma)
    found = gae(paid, seen.values, seen.mask, seen.valid, gamma=gamma, lam=lam)
    columns = (seen.rewards.rows(), seen.values.rows(), seen.mask.rows(), found.rows())
    for row, (rewards, values, mask, advantages) in enumerate(zip(*columns, strict=True)):
        ahead, after = 0.0, float(final[row]) if cut[row] else 0.0
        for place in reversed(mask.nonzero().flatten().tolist()):
            ahead = float(rewards[place] + gamma * after - values[place]) + gamma * lam * ahead
            after = float(values[place])
            expected = ahead if seen.valid[row] else 0.0
            assert float(advantages[place]) == pytest.approx(expected, rel=1e-9, abs=1e-9)
