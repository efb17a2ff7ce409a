"""Confidence intervals: published values, and properties of every interval of a share or a mean."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.interval import calibration_error, half_width, mean_interval, student_t, wilson


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


@pytest.mark.parametrize(
    ("freedom", "values"),
    [
        (1, (3.078, 6.314, 12.706, 31.821, 63.657, 636.619)),
        (2, (1.886, 2.920, 4.303, 6.965, 9.925, 31.599)),
        (3, (1.638, 2.353, 3.182, 4.541, 5.841, 12.924)),
        (4, (1.533, 2.132, 2.776, 3.747, 4.604, 8.610)),
        (9, (1.383, 1.833, 2.262, 2.821, 3.250, 4.781)),
        (10, (1.372, 1.812, 2.228, 2.764, 3.169, 4.587)),
        (19, (1.328, 1.729, 2.093, 2.539, 2.861, 3.883)),
        (30, (1.310, 1.697, 2.042, 2.457, 2.750, 3.646)),
        (60, (1.296, 1.671, 2.000, 2.390, 2.660, 3.460)),
        (120, (1.289, 1.658, 1.980, 2.358, 2.617, 3.373)),
    ],
)
def test_student_has_the_values_of_the_printed_tables(freedom: int, values: tuple[float, ...]) -> None:
    levels = (0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
    assert [student_t(freedom, level) for level in levels] == pytest.approx(values, abs=5e-4)


@settings(max_examples=60, deadline=None)
@given(level=st.floats(0.01, 0.9999))
def test_student_of_one_and_two_degrees_has_a_closed_form(level: float) -> None:
    assert student_t(1, level) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-9)
    assert student_t(2, level) == pytest.approx(level * math.sqrt(2 / (1 - level * level)), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(freedom=st.integers(1, 500), level=st.floats(0.01, 0.9999))
def test_student_falls_towards_the_normal_quantile(freedom: int, level: float) -> None:
    normal = NormalDist().inv_cdf((1 + level) / 2)
    assert normal < student_t(freedom + 1, level) < student_t(freedom, level)
    assert student_t(5_000, level) == pytest.approx(normal, rel=1e-3)


@pytest.mark.parametrize(("freedom", "level"), [(0, 0.95), (-1, 0.95), (3, 1.0), (3, 0.0)])
def test_student_takes_a_degree_of_freedom_and_a_level(freedom: int, level: float) -> None:
    with pytest.raises(FormulaError, match=f"{freedom} degrees of freedom, level {level}"):
        student_t(freedom, level)


def test_an_interval_of_a_mean_by_hand() -> None:
    """For .1 .4 .5 .9: mean 0.475, s 0.3304, t of 3 degrees 3.182."""
    values = [0.1, 0.4, 0.5, 0.9]
    assert half_width(values) == pytest.approx(0.5257, abs=1e-4)
    assert mean_interval(values) == pytest.approx((-0.0507, 1.0007), abs=1e-4)
    assert mean_interval(values, (0, 1)) == (0, 1)
    assert mean_interval([0.5, 0.5]) is mean_interval([0.5]) is mean_interval([]) is None


def test_calibration_error_by_hand() -> None:
    """Four pairs judged with 0.9, of which three are right; two judged with 0.6 the wrong way."""
    likely = [0.9, 0.9, 0.9, 0.1, 0.4, 0.4]
    assert calibration_error(likely) == pytest.approx(4 / 6 * abs(0.75 - 0.9) + 2 / 6 * 0.6)
    assert calibration_error([0.5] * 7) == 0, "who says nothing is never wrong"
    assert calibration_error([1.0, 1.0]) == 0 and calibration_error([0.0, 1.0]) == 0.5


@pytest.mark.parametrize("likely", [[], [1.2], [float("nan")]])
def test_calibration_takes_probabilities(likely: list[float]) -> None:
    with pytest.raises(FormulaError, match="calibration_error"):
        calibration_error(likely)
