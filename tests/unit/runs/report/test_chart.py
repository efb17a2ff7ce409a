"""The chart draws the measured values."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.runs.report.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Point,
    Series,
    draw,
    pick,
    smooth,
    thin,
    ticks,
)
from rillflow.runs.run_data import PhaseSpan

any_float = st.floats(width=64)


def points(*values: float) -> list[Point]:
    return [Point(x=step, y=value) for step, value in enumerate(values, start=1)]


def phase(name: str, first: int, last: int) -> PhaseSpan:
    return PhaseSpan(name=name, first=first, last=last, start_s=0.0, end_s=1.0)


def read_back(svg: str) -> list[tuple[float, float]]:
    """Return the values that the page's script reads from the marked lines."""
    x0, x1, y0, y1 = (float(re.search(f'data-{name}="([^"]+)"', svg)[1]) for name in ("x0", "x1", "y0", "y1"))  # type: ignore[index]
    values = []
    for line in re.findall(r'class="[^"]*track" points="([^"]*)"', svg):
        for pair in line.split():
            x, y = map(float, pair.split(","))
            step = x0 + (x - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0)
            value = y0 + (HEIGHT - BOTTOM - y) / (HEIGHT - BOTTOM - TOP) * (y1 - y0)
            values.append((step, 10**value if "data-log" in svg else value))
    return values


@pytest.mark.parametrize("is_log", [False, True])
def test_the_drawn_values_read_back(is_log: bool) -> None:
    values = [1e-3, 0.2, 0.05, 4.0, 0.7]
    svg = draw(Chart(series=[Series(label="", points=points(*values))], is_log=is_log))
    found = read_back(svg)
    assert [round(step) for step, _ in found] == [1, 2, 3, 4, 5]
    assert [value for _, value in found] == pytest.approx(values, rel=1e-3, abs=0 if is_log else 1e-3)


@settings(max_examples=150, deadline=None)
@given(st.lists(any_float, max_size=120), st.booleans(), st.booleans(), st.booleans())
def test_any_values_are_drawn_within_the_picture(
    values: list[float], is_log: bool, is_share: bool, marks: bool
) -> None:
    phases = [phase("a", 1, 30), phase("b", 31, 200)]
    both = [Series(label="one", points=points(*values)), Series(label="two", points=points(*values[:1]))]
    svg = draw(
        Chart(series=both, phases=phases, is_log=is_log, is_share=is_share and not is_log, has_marks=marks)
    )
    assert "nan" not in svg and "inf" not in svg
    pairs = " ".join(re.findall(r'points="([^"]*)"', svg)).split()
    shown = [abs(value) < 1e100 and (value > 0 or not is_log) for value in values]
    assert pairs or not any(shown[place] and shown[place + 1] for place in range(min(len(shown), 30) - 1))
    for pair in pairs:
        x, y = map(float, pair.split(","))
        assert LEFT - 1 <= x <= WIDTH - RIGHT + 1
        assert TOP - 1 <= y <= HEIGHT - BOTTOM + 1


def test_a_value_that_is_not_finite_breaks_the_line() -> None:
    svg = draw(Chart(series=[Series(label="", points=points(1.0, 2.0, math.nan, 3.0, 4.0, 5.0))]))
    assert [len(line.split()) for line in re.findall(r'track" points="([^"]*)"', svg)] == [2, 3]


def test_a_phase_breaks_the_line_and_is_named() -> None:
    chart = Chart(
        series=[Series(label="", points=points(*range(8)))], phases=[phase("sft", 1, 5), phase("grpo", 6, 8)]
    )
    svg = draw(chart)
    assert [len(line.split()) for line in re.findall(r'track" points="([^"]*)"', svg)] == [5, 3]
    assert ">sft<" in svg and ">grpo<" in svg


def test_an_interval_is_a_band_from_low_to_high() -> None:
    values = [Point(x=1, y=0.5, low=0.4, high=0.6), Point(x=2, y=0.8, low=0.75, high=0.85)]
    svg = draw(Chart(series=[Series(label="", points=values)], is_share=True, has_marks=True))
    band = re.search(r'class="band" points="([^"]*)"', svg)
    assert band is not None
    heights = [float(pair.split(",")[1]) for pair in band[1].split()]
    shares = [(HEIGHT - BOTTOM - y) / (HEIGHT - BOTTOM - TOP) for y in heights]
    assert shares == pytest.approx([0.6, 0.85, 0.75, 0.4], abs=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1500))
def test_thinning_keeps_the_mean_and_picking_keeps_the_extremes_close(values: list[float]) -> None:
    thinned, picked = thin(points(*values)), pick(points(*values))
    assert len(thinned) == len(picked) == min(len(values), MAX_POINTS)
    assert {(one.x, one.y) for one in picked} <= {(one.x, one.y) for one in points(*values)}
    assert (
        min(values) - 1e-6 <= min(one.y for one in thinned)
        and max(one.y for one in thinned) <= max(values) + 1e-6
    )
    assert [one.x for one in picked] == sorted(one.x for one in picked)


def test_a_spike_of_one_step_in_thousands_stays() -> None:
    values = [0.5] * 5000
    values[1234] = 90.0
    assert max(one.y for one in pick(points(*values))) == 90.0


@settings(max_examples=50, deadline=None)
@given(st.floats(-100, 100), st.floats(-5, 5), st.integers(2, 300))
def test_a_straight_line_is_its_own_smoothing(start: float, slope: float, count: int) -> None:
    line = points(*(start + slope * step for step in range(count)))
    assert [one.y for one in smooth(line, [])] == pytest.approx([one.y for one in line], abs=1e-6)


@settings(max_examples=100)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 11
    assert all(low - 0.01 * width <= value <= low + 1.01 * width for value in found)


def test_nothing_to_draw_is_said() -> None:
    assert "No finite value" in draw(Chart(series=[Series(label="", points=points(math.nan))]))
    assert "No finite value" in draw(Chart(series=[]))
