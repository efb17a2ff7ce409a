"""Metrics merge to the same result in any order and grouping."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RecordError
from rillflow.records.metrics import (
    Histogram,
    LargestShare,
    Max,
    Mean,
    Metric,
    Min,
    Sum,
    Variance,
    histogram_of,
    merge_metrics,
)

NUMBERS = st.integers(-1000, 1000).map(float)  # whole numbers, so that sums are exact
PARTS = st.lists(st.lists(NUMBERS, min_size=1, max_size=5), min_size=1, max_size=6)


def measure(values: list[float]) -> dict[str, Metric]:
    return {
        "a/value/mean": Mean(total=sum(values), count=len(values)),
        "a/value/sum": Sum(value=sum(values)),
        "a/value/max": Max(value=max(values)),
        "a/value/min": Min(value=min(values)),
        "a/value/largest_share": LargestShare(most=max(map(abs, values)), total=sum(map(abs, values))),
        "a/value/histogram": histogram_of(torch.tensor(values), (-500, 0, 3)),
    }


@settings(max_examples=50, deadline=None)
@given(parts=PARTS, data=st.data())
def test_any_partition_measures_what_the_whole_does(parts: list[list[float]], data: st.DataObject) -> None:
    whole = measure([value for part in parts for value in part])
    shuffled = data.draw(st.permutations(parts))
    assert merge_metrics(measure(part) for part in shuffled) == whole
    cut = data.draw(st.integers(0, len(parts)))
    halves = [merge_metrics(measure(part) for part in half) for half in (parts[:cut], parts[cut:])]
    assert merge_metrics(halves) == whole


@settings(max_examples=50, deadline=None)
@given(parts=PARTS)
def test_a_variance_is_that_of_all_values_however_they_were_parted(parts: list[list[float]]) -> None:
    values = [value for part in parts for value in part]
    merged = Variance(squares=0.0, mean=math.nan, count=0)
    for part in parts:
        mean = fmean(part)
        squares = sum((value - mean) ** 2 for value in part)
        merged = merged.merge(Variance(squares=squares, mean=mean, count=len(part)))
    assert merged.value == pytest.approx(pvariance(values), rel=1e-9, abs=1e-9)
    assert merged.mean == pytest.approx(fmean(values), rel=1e-9, abs=1e-9)
    assert math.isnan(Variance(squares=0.0, mean=0.0, count=0).value)


def test_a_value_that_is_an_edge_lies_below_it() -> None:
    found = histogram_of(torch.tensor([-0.5, 0.0, 0.1, 1.0, 1.1, 9.0]), (0, 1))
    assert found == Histogram(edges=(0, 1), counts=(2, 2, 2)) and found.value == 6
    assert histogram_of(torch.zeros(0), (0, 1)).counts == (0, 0, 0)
    assert histogram_of(torch.tensor([2, 0, 2]), range(2)).counts == (1, 0, 2)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        found.merge(Histogram(edges=(0,), counts=(1, 1)))


def test_a_largest_share_is_of_the_sum() -> None:
    merged = LargestShare(most=3.0, total=4.0).merge(LargestShare(most=2.0, total=8.0))
    assert merged.value == 0.25 and LargestShare(most=0.0, total=0.0).value == 0
    for one, other in ((math.nan, 1.0), (1.0, math.nan)):
        merged = LargestShare(most=one, total=one).merge(LargestShare(most=other, total=other))
        assert math.isnan(merged.most) and math.isnan(merged.value)


def test_a_mean_weighs_by_count() -> None:
    merged = Mean(total=3.0, count=1).merge(Mean(total=1.0, count=3))
    assert merged.value == 1.0
    assert math.isnan(Mean(total=0.0, count=0).value)


def test_names_of_one_part_alone_stay() -> None:
    merged = merge_metrics([{"a": Sum(value=1.0)}, {"b": Sum(value=2.0)}])
    assert merged == {"a": Sum(value=1.0), "b": Sum(value=2.0)}


def test_reductions_that_differ_are_refused() -> None:
    with pytest.raises(RecordError, match="'a/b/mean' is a Mean in one part"):
        merge_metrics([{"a/b/mean": Mean(total=1.0, count=1)}, {"a/b/mean": Sum(value=1.0)}])


def test_a_nan_does_not_hide_in_an_extreme() -> None:
    for order in ((1.0, math.nan), (math.nan, 1.0)):
        merged = merge_metrics({"a": Max(value=value), "b": Min(value=value)} for value in order)
        assert math.isnan(merged["a"].value)
        assert math.isnan(merged["b"].value)
