"""Workload: lengths agree with themselves, are drawn alike, and refuse what cannot be."""

from __future__ import annotations

import math
import re
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

lognormal = st.builds(
    Lengths,
    kind=st.just("lognormal"),
    limit=st.integers(64, 32768),
    median=st.floats(8, 20000),
    sigma=st.floats(0, 1.5),
)
measured = st.lists(st.integers(0, 500), min_size=1, max_size=60).map(
    lambda values: Lengths(kind="measured", limit=500, values=tuple(sorted(values)))
)
fixed = st.integers(1, 10000).map(lambda limit: Lengths(kind="fixed", limit=limit))


@given(lengths=st.one_of(lognormal, measured, fixed), rows=st.integers(1, 300))
def test_spread_is_ascending_and_within_the_limit(lengths: Lengths, rows: int) -> None:
    spread = lengths.spread(rows)
    assert len(spread) == rows
    assert np.all(np.diff(spread) >= 0)
    assert spread[-1] <= lengths.limit


@given(lengths=lognormal)
@example(lengths=Lengths(kind="lognormal", limit=23_186, median=8.0, sigma=1.5))
def test_the_mean_counts_what_is_clipped_at_the_limit(lengths: Lengths) -> None:
    # An integral over the normal deviate: equal parts of the rows miss the tail, which rules the square.
    normal, places = NormalDist(), np.linspace(-7.5, 7.5, 3_001)
    weights = np.exp(-(places**2) / 2) * (places[1] - places[0]) / math.sqrt(2 * math.pi)
    found = np.array([lengths.quantile(normal.cdf(place)) for place in places])
    # A row has at least one token, which the closed form leaves out: at most one token, or one square token.
    assert lengths.mean == pytest.approx(float(weights @ found), rel=1e-4, abs=1.0)
    assert lengths.mean_square == pytest.approx(float(weights @ found**2), rel=1e-4, abs=1.0)


@given(lengths=st.one_of(lognormal, measured, fixed), low=st.floats(0.01, 0.99), high=st.floats(0.01, 0.99))
def test_quantiles_rise(lengths: Lengths, low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    assert lengths.quantile(low) <= lengths.quantile(high) <= lengths.limit


def test_quantiles_of_measured_lengths_are_lengths_that_were_seen() -> None:
    lengths = Lengths(kind="measured", limit=9, values=(1, 2, 3, 9))
    found = [lengths.quantile(share) for share in (0.01, 0.125, 0.25, 0.5, 0.75, 0.875, 0.99)]
    assert found == [1, 1, 2, 3, 9, 9, 9]


@given(share=st.floats(0.05, 0.95), limit=st.integers(100, 30000), sigma=st.floats(0.1, 1.3))
def test_a_mean_and_a_limit_give_lengths_of_that_mean(share: float, limit: int, sigma: float) -> None:
    lengths = lengths_of_mean(share * limit, limit, sigma)
    assert lengths.mean == pytest.approx(share * limit, rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "fixed", "limit": 0},
        {"kind": "fixed", "limit": 10**12},
        {"kind": "lognormal", "limit": 100},
        {"kind": "lognormal", "limit": 100, "median": -1.0},
        {"kind": "lognormal", "limit": 100, "median": 10.0, "sigma": 9.0},
        {"kind": "lognormal", "limit": 100, "median": float("nan"), "sigma": 1.0},
        {"kind": "measured", "limit": 100},
        {"kind": "measured", "limit": 100, "values": (5, 101)},
        {"kind": "measured", "limit": 100, "values": (5, 4)},
    ],
)
def test_lengths_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Lengths(**wrong)


@pytest.mark.parametrize("mean", [0.0, 21.0])
def test_a_mean_beyond_the_limit_is_refused(mean: float) -> None:
    with pytest.raises(PlanError):
        lengths_of_mean(mean, 20)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": 0},
        {"samples": -1},
        {"epochs": 0},
        {"minibatches": 17},
        {"tokens_per_micro_batch": 0},
        {"rows_at_once": 0},
        {"function_s": -1.0},
    ],
)
def test_a_workload_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"prompts": 4, "samples": 4, **changes}
    with pytest.raises(PlanError) as caught:
        Workload(prompt=Lengths(kind="fixed", limit=8), response=Lengths(kind="fixed", limit=8), **sizes)
    assert str(next(iter(changes.values()))).removesuffix(".0") in caught.value.what


EIGHT = Lengths(kind="fixed", limit=8)


@pytest.mark.parametrize(
    ("name", "said", "inside", "outside"),
    [
        ("prompts", "--prompts (algorithm.prompts_per_step)", [1, 2**16], [10**9 + 1]),
        ("samples", "--samples (algorithm.samples_per_prompt)", [1, 2**16], [0]),
        ("epochs", "algorithm.epochs", [1, 10**9], [10**9 + 1]),
        ("minibatches", "--minibatches", [1, 16], [0, 17]),
        ("tokens_per_micro_batch", "policy.tokens_per_micro_batch", [1, 10**9], [10**9 + 1]),
        ("rows_at_once", "rollout.max_rows", [1, 10**9], [10**9 + 1]),
        ("function_s", "--reward-seconds", [0.0, 86_400.0], [-0.1, 86_400.5]),
        ("gradient_share", "the share of rows with a gradient", [0.0, 1.0], [-0.1, 1.1]),
    ],
)
def test_a_number_at_its_bounds_is_taken_and_beyond_them_named(
    name: str, said: str, inside: list[float], outside: list[float]
) -> None:
    def made(value: float) -> Workload:
        sizes: dict[str, Any] = {"prompts": 4, "samples": 4, name: value}
        return Workload(prompt=EIGHT, response=EIGHT, **sizes)

    for value in inside:
        assert vars(made(value))[name] == value
    for value in outside:
        with pytest.raises(PlanError, match=re.escape(said)) as caught:
            made(value)
        assert f" is {value:.12g}" in caught.value.what


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({"kind": "fixed", "limit": 100_000_000}, {"kind": "fixed", "limit": 100_000_001}),
        ({"kind": "fixed", "limit": 1}, {"kind": "fixed", "limit": 0}),
        ({"sigma": 5.0}, {"sigma": 5.1}),
        ({"sigma": 0.0}, {"sigma": -0.1}),
        ({"kind": "measured", "values": (0, 9)}, {"kind": "measured", "values": (-1, 9)}),
        ({"kind": "measured", "values": (9, 9)}, {"kind": "measured", "values": (9, 10)}),
    ],
)
def test_lengths_at_their_bounds_are_taken(inside: dict[str, Any], outside: dict[str, Any]) -> None:
    given: dict[str, Any] = {"kind": "lognormal", "limit": 9, "median": 5.0}
    Lengths(**(given | inside))
    with pytest.raises(PlanError):
        Lengths(**(given | outside))


def test_what_nobody_says_of_a_workload() -> None:
    one = Workload(prompts=4, samples=2, prompt=EIGHT, response=EIGHT)
    assert (one.epochs, one.minibatches, one.tokens_per_micro_batch, one.rows_at_once) == (1, 1, 16384, 1024)
    assert (one.function_s, one.dtype, one.shares_prompts, one.gradient_share) == (0.0, "bfloat16", True, 1.0)
    assert (one.rows, one.row_tokens, one.row_square, one.running_tokens) == (8, 16.0, 256.0, 12.0)
