"""A chart's element has the measured values, and a table of them for readers without scripts."""

from __future__ import annotations

import html
import json
import math
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.records.metrics import Histogram
from rillflow.runs.run_data import PhaseSpan
from rillflow_parts.report.chart import LARGEST, MAX_POINTS, Chart, Series, draw, heat_map, points

any_float = st.floats(width=64)


def series(*values: float, label: str = "") -> Series:
    return Series(label=label, curve=points(range(1, 1 + len(values)), values))


def phase(name: str, first: int, last: int) -> PhaseSpan:
    return PhaseSpan(name=name, first=first, last=last, start_s=0.0, end_s=1.0)


def data(markup: str) -> dict[str, Any]:
    found = re.search(r'data-chart="([^"]*)"', markup)
    assert found is not None
    read: dict[str, Any] = json.loads(html.unescape(found[1]))
    return read


@settings(max_examples=150, deadline=None)
@given(st.lists(any_float, max_size=120), st.booleans(), st.booleans())
def test_every_value_is_in_the_element_or_a_gap(values: list[float], is_log: bool, marks: bool) -> None:
    phases = [phase("a", 1, 30), phase("b", 31, 200)]
    markup = draw(Chart(series=[series(*values)], phases=phases, is_log=is_log, has_marks=marks))
    if not any(abs(value) < LARGEST for value in values):
        assert "No finite value" in markup
        return
    (curve,) = data(markup)["curves"]
    assert curve["x"] == list(range(1, 1 + len(values)))
    for value, shown in zip(values, curve["y"], strict=True):
        assert (
            shown is None if not abs(value) < LARGEST else shown == pytest.approx(value, rel=1e-5, abs=1e-300)
        )


def test_an_interval_is_a_low_and_a_high_end_and_a_missing_one_is_a_gap() -> None:
    curve = points([1, 2, 3], [0.5, 0.8, 0.9], [0.4, 0.75, None], [0.6, 0.85, None])
    (found,) = data(draw(Chart(series=[Series(label="", curve=curve)])))["curves"]
    assert (found["low"], found["high"]) == ([0.4, 0.75, None], [0.6, 0.85, None])


def test_a_curve_of_single_values_has_no_band() -> None:
    (found,) = data(draw(Chart(series=[series(1.0, 2.0)])))["curves"]
    assert found.keys() == {"label", "colour", "unit", "x", "y"}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(500, 1500), st.integers(2, 400))
def test_a_long_curve_keeps_its_extremes_and_no_bucket_crosses_phases(
    seed: int, count: int, first: int
) -> None:
    numbers = random.Random(seed)
    values = [numbers.gauss(0, 1) + 100 * (numbers.random() < 0.01) for _ in range(count)]
    phases = [phase("a", 1, first - 1), phase("b", first, len(values))]
    (found,) = data(draw(Chart(series=[series(*values)], phases=phases)))["curves"]
    assert len(found["x"]) <= MAX_POINTS + len(phases)
    assert min(found["low"]) == pytest.approx(min(values), rel=1e-5)
    assert max(found["high"]) == pytest.approx(max(values), rel=1e-5)
    ends = [place for place, x in enumerate(found["x"]) if x < first - 0.5]
    assert max(found["high"][: len(ends)]) == pytest.approx(max(values[: first - 1]), rel=1e-5)


def test_the_first_and_last_values_stay_without_scripts() -> None:
    markup = draw(
        Chart(series=[series(1.5, 2.5, math.nan, label="mean"), series(4.0, label="max")], y_name="x")
    )
    fallback = re.search("<noscript>(.*)</noscript>", markup)
    assert fallback is not None
    cells = re.findall("<td>([^<]*)</td>", fallback[1])
    assert cells == ["mean", "1", "1.50", "3", "not a number", "max", "1", "4.00", "1", "4.00"]


def test_names_cannot_leave_the_attribute() -> None:
    name = "\"><script>alert(1)</script>'"
    markup = draw(Chart(series=[series(1.0, label=name)], y_name=name, phases=[phase(name, 1, 1)]))
    assert "<script" not in markup
    assert data(markup)["curves"][0]["label"] == name == data(markup)["phases"][0]["name"]


def test_a_distribution_keeps_its_counts_by_step() -> None:
    columns = [(step, Histogram(edges=(0.0, 1.0), counts=(step, 2, 3))) for step in (1, 5)]
    assert data(heat_map(columns))["heat"] == {
        "x": [1, 5],
        "edges": [0.0, 1.0],
        "counts": [[1, 2, 3], [5, 2, 3]],
    }


def test_nothing_to_draw_is_said() -> None:
    assert "No finite value" in draw(Chart(series=[series(math.nan)]))
    assert "No finite value" in draw(Chart(series=[]))
