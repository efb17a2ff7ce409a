"""Chart: the data of a chart as an element, which the page's script draws with the shared chart library.

Curve ─ cut at phases, shortened ─> JSON in the attribute data-chart ─ report.js ─> canvas
                                └─> a table of first and last values, for readers without scripts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rillflow.records.metrics import Histogram
from rillflow.runs.curves import Curve, Floats, plain
from rillflow.runs.formatting import number
from rillflow.runs.json_lines import JSON
from rillflow_parts.report.html import Html, el, table

if TYPE_CHECKING:
    from rillflow.runs.run_data import PhaseSpan

MAX_POINTS = 400
"""Largest number of points of a curve on a page."""
LARGEST = 1e100
"""Values of this size and more are not drawn: the arithmetic of an axis would overflow."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve."""

    label: str
    """Label of the curve; empty when the chart's title is enough."""
    curve: Curve
    """Values by step. ``low`` and ``high`` are the ends of an interval, or those of a bucket of steps."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Content and style of one pair of axes."""

    series: Sequence[Series]
    """Curves; the first is the main one."""
    phases: Sequence[PhaseSpan] = ()
    """Phases, drawn as bands behind the curves."""
    is_share: bool = False
    """Whether the values are shares; the axis then covers at least 0 to 1."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic at first."""
    has_marks: bool = False
    """Whether every value has a dot; straight lines then connect the values, without smoothing."""
    is_stepped: bool = True
    """Whether x counts steps; otherwise x is a continuous measure, such as a divergence."""
    x_name: str = "step"
    """Name of the horizontal axis."""
    y_name: str = ""
    """Name of the vertical axis; empty when the chart's title is enough."""
    is_lead: bool = False
    """Whether it is one of the curves that matter most, which are larger."""


LEAD_HEIGHT = 320
"""Height of a chart that matters most, in pixels; the others have that of chart.js."""


def points(
    x: Sequence[float],
    y: Sequence[float],
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
) -> Curve:
    """Return a curve of single values, with the ends of their intervals if they have some."""
    values = np.array(y, dtype=np.float64)
    ends = [values if each is None else np.array(each, dtype=np.float64) for each in (low, high)]
    places = np.array(x, dtype=np.float64)
    return Curve(x=places, y=values, low=ends[0], high=ends[1], weights=np.full(len(values), np.nan))


def draw(chart: Chart) -> Html:
    """Return the chart's element, or a note when no value is finite."""
    if not any(_is_drawable(series.curve.y).any() for series in chart.series):
        return el("p", "No finite value was recorded.", class_="empty")
    data: dict[str, JSON] = {
        "curves": [_curve_data(place, series, chart.phases) for place, series in enumerate(chart.series)],
        "phases": [{"name": each.name, "first": each.first, "last": each.last} for each in chart.phases],
        "is_share": chart.is_share,
        "is_log": chart.is_log,
        "has_marks": chart.has_marks,
        "is_stepped": chart.is_stepped,
        "x_name": chart.x_name,
        "y_name": chart.y_name,
    }
    data |= {"height": LEAD_HEIGHT} if chart.is_lead else {}
    return _figure(data, chart.y_name, chart.x_name, _ends(chart))


def heat_map(columns: Sequence[tuple[int, Histogram]]) -> Html:
    """Return histograms by step, whose counts are drawn as shades."""
    edges = columns[0][1].edges
    heat: JSON = {
        "x": [step for step, _ in columns],
        "edges": list(edges),
        "counts": [list(column.counts) for _, column in columns],
    }
    head = ["step", *(f"to {edge:g}" for edge in edges), f"above {edges[-1]:g}"]
    rows = [(f"{step:,}", *map(str, column.counts)) for step, column in (columns[0], columns[-1])]
    return _figure({"heat": heat, "is_stepped": True, "x_name": "step"}, "", "step", table(rows, head))


def _figure(data: JSON, y_name: str, x_name: str, fallback: Html) -> Html:
    names = [el("span", y_name, class_="axis-y")] if y_name else []
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return el(
        "figure",
        names,
        el("div", class_="chart", data_chart=text),
        el("noscript", fallback),
        el("figcaption", x_name, class_="axis-x"),
    )


def _ends(chart: Chart) -> Html:
    """Return the first and last value of every curve as a table."""
    rows = []
    for series in chart.series:
        x, y = series.curve.x, series.curve.y
        places = [f"{each:,.0f}" if chart.is_stepped else number(each) for each in (x[0], x[-1])]
        rows.append((series.label or chart.y_name, places[0], number(y[0]), places[1], number(y[-1])))
    return table(rows, ("curve", f"first {chart.x_name}", "value", f"last {chart.x_name}", "value"))


def _curve_data(place: int, series: Series, phases: Sequence[PhaseSpan]) -> JSON:
    whole = len(series.curve)
    parts = [
        part.shortened(max(2, MAX_POINTS * len(part) // whole)) if whole > MAX_POINTS else part
        for part in _cut(series.curve, phases)
    ]
    y = np.concatenate([part.y for part in parts])
    found: dict[str, JSON] = {
        "label": series.label,
        "colour": place,
        "unit": 1,
        "x": _numbers(np.concatenate([part.x for part in parts])),
        "y": _numbers(y),
    }
    ends = {
        "low": np.concatenate([part.low for part in parts]),
        "high": np.concatenate([part.high for part in parts]),
    }
    if not all(np.array_equal(end, y, equal_nan=True) for end in ends.values()):
        found |= {name: _numbers(end) for name, end in ends.items()}
    return found


def _cut(curve: Curve, phases: Sequence[PhaseSpan]) -> Iterator[Curve]:
    """Yield the parts of a curve between the starts of phases; a bucket never has steps of two phases."""
    starts = np.searchsorted(curve.x, [phase.first for phase in phases[1:]]).tolist()
    for start, stop in pairwise([0, *starts, len(curve)]):
        if stop > start:
            yield Curve(**{name: values[start:stop] for name, values in vars(curve).items()})


def _numbers(values: Floats) -> list[JSON]:
    return [
        None if each is None or abs(each) >= LARGEST else int(each) if each == int(each) else each
        for each in plain(values)
    ]


def _is_drawable(values: Floats) -> np.typing.NDArray[np.bool_]:
    """Return which values are neither NaN nor so large that arithmetic overflows, [N]."""
    return np.abs(values) < LARGEST
