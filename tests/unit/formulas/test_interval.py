"""The Wilson interval: published values, and what any interval of a share must be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.interval import calibration_error, wilson


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_newcombe_1998_table(correct: int, count: int, low: float, high: float) -> None:
    assert wilson(correct, count) == pytest.approx((low, high), abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 2000), data=st.data())
def test_it_holds_the_share_and_is_symmetric(count: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, count))
    low, high = wilson(correct, count)
    assert 0 <= low <= correct / count <= high <= 1
    mirrored = wilson(count - correct, count)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_without_a_trial_nothing_is_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("correct", "count"), [(3, 2), (-1, 2), (0, -1)])
def test_impossible_counts_are_named(correct: int, count: int) -> None:
    with pytest.raises(FormulaError, match=f"{correct} of {count}"):
        wilson(correct, count)


def test_calibration_error_by_hand() -> None:
    """Four pairs said with 0.9, of which three are right; two said with 0.6 the wrong way."""
    likely = [0.9, 0.9, 0.9, 0.1, 0.4, 0.4]
    assert calibration_error(likely) == pytest.approx(4 / 6 * abs(0.75 - 0.9) + 2 / 6 * 0.6)
    assert calibration_error([0.5] * 7) == 0, "who says nothing is never wrong"
    assert calibration_error([1.0, 1.0]) == 0 and calibration_error([0.0, 1.0]) == 0.5


@pytest.mark.parametrize("likely", [[], [1.2], [float("nan")]])
def test_calibration_takes_probabilities(likely: list[float]) -> None:
    with pytest.raises(FormulaError, match="calibration_error"):
        calibration_error(likely)
