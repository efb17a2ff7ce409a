"""Statistics of judgments over many prompts: win rates, length-controlled win rates, pass@k."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.interval import wilson
from rillflow.formulas.judging import length_controlled, pass_at, win_rate


def test_a_tie_counts_half_and_the_interval_is_wilson_s() -> None:
    rate, interval = win_rate([1.0, 1.0, 0.5, 0.0])
    assert rate == 0.625 and interval == wilson(2.5, 4)
    assert win_rate([0.5] * 10)[0] == 0.5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40))
def test_the_two_models_shares_add_up(outcomes: list[float]) -> None:
    rate, (low, high) = win_rate(outcomes)
    turned, (other_low, other_high) = win_rate([1 - each for each in outcomes])
    assert rate + turned == pytest.approx(1) and low + other_high == pytest.approx(1)
    assert 0 <= low <= rate <= high <= 1 and other_low <= other_high


def test_who_wins_by_length_alone_wins_half_at_equal_length() -> None:
    """The longer answer wins 90% of 200 prompts, and one model's answer is longer in three quarters."""
    longer = ([10.0] * 3 + [-10.0]) * 50
    outcomes = [float((number // 4 % 10 < 9) == (each > 0)) for number, each in enumerate(longer)]
    assert win_rate(outcomes)[0] == pytest.approx(0.7)
    assert length_controlled(outcomes, longer) == pytest.approx(0.5, abs=0.02)


def test_length_that_says_nothing_changes_nothing() -> None:
    outcomes = [1.0, 1.0, 1.0, 0.0] * 50
    longer = [5.0, -5.0] * 100
    even = [1.0] * 75 + [0.0] * 25
    assert length_controlled(even * 2, [5.0] * 100 + [-5.0] * 100) == pytest.approx(0.75, abs=1e-3)
    assert length_controlled(outcomes, [0.0] * 200) == pytest.approx(0.75, abs=1e-3), "all of one length"
    assert 0.5 < length_controlled(outcomes, longer) < 1


def test_it_is_where_the_likelihood_has_no_slope() -> None:
    """Compared with a search over both numbers, on data that a line separates by length."""
    outcomes, longer = [1.0, 1.0, 0.5, 0.0, 1.0, 0.0], [3.0, 2.0, 0.0, -1.0, -2.0, -4.0]
    spread = math.sqrt(sum(each * each for each in longer) / 6)

    def loss(a: float, b: float) -> float:
        found = (a * a + b * b) / 200
        for y, each in zip(outcomes, longer, strict=True):
            z = a + b * each / spread
            found += math.log1p(math.exp(-z)) * y + math.log1p(math.exp(z)) * (1 - y)
        return found

    grid = [(a / 50, b / 50) for a in range(-50, 100) for b in range(-50, 200)]
    best = min(grid, key=lambda each: loss(*each))
    assert length_controlled(outcomes, longer) == pytest.approx(1 / (1 + math.exp(-best[0])), abs=0.01)
    assert 0.98 < length_controlled([1.0] * 20, [float(n) for n in range(20)]) < 1, "finite where all are won"


@pytest.mark.parametrize(("count", "right", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(count: int, right: int, k: int) -> None:
    draws = list(combinations(range(count), k))
    assert pass_at(count, right, k) == pytest.approx(sum(min(draw) < right for draw in draws) / len(draws))


def test_what_cannot_be_is_refused() -> None:
    for wrong in ([], [1.5], [float("nan")]):
        with pytest.raises(FormulaError, match="win_rate"):
            win_rate(wrong)
    with pytest.raises(FormulaError, match="2 outcomes and 1 finite"):
        length_controlled([1.0, 0.0], [1.0])
    with pytest.raises(FormulaError, match="length_controlled"):
        length_controlled([1.0], [math.inf])
    for count, right, k in ((4, 5, 1), (4, 2, 0), (4, 2, 5)):
        with pytest.raises(FormulaError, match="pass_at"):
            pass_at(count, right, k)
