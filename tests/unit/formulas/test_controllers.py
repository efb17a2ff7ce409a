"""Controllers of loss weights: golden steps, fixed points, and bounds against divergence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import FormulaError
from rillflow.formulas.controllers import multiplier, next_kl_weight, next_log_multiplier


@pytest.mark.parametrize(
    ("observed", "expected"),
    [(6.0, 0.2), (6.6, 0.202), (30.0, 0.204), (5.4, 0.198), (0.0, 0.196), (-3.0, 0.196)],
)
def test_the_weight_of_divergence_by_hand(observed: float, expected: float) -> None:
    found = next_kl_weight(0.2, observed, target=6.0, horizon=1000.0, rows=100)  # K = 0.1
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_weight_brings_the_divergence_to_its_target() -> None:
    weight = 0.01
    for _ in range(2000):
        weight = next_kl_weight(weight, observed=1.0 / weight, target=5.0, horizon=640.0, rows=64)
    assert weight == pytest.approx(0.2, rel=1e-3)


@settings(max_examples=50, deadline=None)
@given(
    weight=st.floats(1e-6, 10),
    observed=st.floats(-5, 500),
    rows=st.integers(1, 400),
    target=st.floats(0.1, 50),
)
def test_one_step_moves_towards_the_target_and_keeps_the_weight_positive(
    weight: float, observed: float, rows: int, target: float
) -> None:
    found = next_kl_weight(weight, observed, target, horizon=100.0, rows=rows)
    assert found > 0
    assert (found - weight) * (observed - target) >= 0
    assert abs(found / weight - 1) <= 0.2 * rows / 100 + 1e-12


def test_half_the_rows_twice_make_about_one_step() -> None:
    once = next_kl_weight(1.0, 9.0, 6.0, 10_000.0, 256)
    twice = next_kl_weight(next_kl_weight(1.0, 9.0, 6.0, 10_000.0, 128), 9.0, 6.0, 10_000.0, 128)
    assert once == pytest.approx(twice, rel=1e-5)


@pytest.mark.parametrize(
    "bad", [{"target": 0.0}, {"horizon": -1.0}, {"observed": math.nan}, {"weight": math.inf}]
)
def test_numbers_that_no_weight_follows_are_refused(bad: dict[str, float]) -> None:
    numbers = {"weight": 0.1, "observed": 5.0, "target": 6.0, "horizon": 100.0, **bad}
    with pytest.raises(FormulaError, match=f"{next(iter(bad))} "):
        next_kl_weight(**numbers, rows=8)


def test_a_step_that_could_take_the_whole_weight_is_refused() -> None:
    with pytest.raises(
        FormulaError, match=r"512 rows per step and a horizon of 100(.|\n)*more than 102.4 rows"
    ):
        next_kl_weight(0.1, 0.0, 6.0, horizon=100.0, rows=512)


def test_the_multiplier_by_hand() -> None:
    assert next_log_multiplier(0.0, mean_cost=3.0, limit=1.0, lr=0.1) == pytest.approx(0.2)
    assert next_log_multiplier(math.log(2), mean_cost=0.5, limit=1.0, lr=0.1) == pytest.approx(
        math.log(2) - 0.1
    )
    assert next_log_multiplier(-1.5, mean_cost=1.0, limit=1.0, lr=0.1) == -1.5


@settings(max_examples=50, deadline=None)
@given(log=st.floats(-5, 2), cost=st.floats(-3, 3), lr=st.floats(1e-4, 0.5))
def test_it_is_ascent_of_lambda_times_the_excess_in_log_lambda(log: float, cost: float, lr: float) -> None:
    small = 1e-6
    slope = (math.exp(log + small) - math.exp(log - small)) / (2 * small) * (cost - 0.5)
    assert next_log_multiplier(log, cost, 0.5, lr) - log == pytest.approx(lr * slope, rel=1e-5, abs=1e-9)


def test_it_never_passes_its_highest_and_comes_back() -> None:
    log = 0.0
    for _ in range(50):
        log = next_log_multiplier(log, mean_cost=5.0, limit=0.0, lr=0.5, highest=8.0)
    assert log == math.log(8.0)
    assert next_log_multiplier(log, mean_cost=-1.0, limit=0.0, lr=0.1, highest=8.0) < log


def test_a_multiplier_that_has_run_away_is_refused() -> None:
    log = 0.0
    with pytest.raises(FormulaError, match=r"log_multiplier is .*(.|\n)*set a highest"):
        for _ in range(50):
            log = next_log_multiplier(log, mean_cost=5.0, limit=0.0, lr=0.5)
    for bad in ({"mean_cost": math.nan}, {"lr": 0.0}, {"highest": 0.0}):
        with pytest.raises(FormulaError, match=f"{next(iter(bad))} {next(iter(bad.values()))}"):
            next_log_multiplier(0.0, **{"mean_cost": 1.0, "limit": 0.0, "lr": 0.1, **bad})


def test_the_multiplier_begins_at_one_and_stays_positive() -> None:
    assert multiplier(0.0) == 1.0
    assert 0 < multiplier(-700.0) < multiplier(-1.0) < 1
