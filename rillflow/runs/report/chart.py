"""Chart: draw curves over steps as SVG, without a plotting library.

    Series ─ smooth ─ thin ─ scale ─> polylines     phases ─> bands behind them

A chart fills its card at any width. The page's script reads values back from the polyline with class
``track`` and the ranges in the svg's data attributes, so no number is written twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeVar

from rillflow.records.metrics import Histogram
from rillflow.runs.formatting import number
from rillflow.runs.report.html import Attribute, Child, Html, el

if TYPE_CHECKING:
    from rillflow.runs.run_data import PhaseSpan

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 20, 34
MAX_POINTS = 400
_SMOOTHED_FROM = 40
_LABELS = 96
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value at one step; a non-finite value leaves a gap in the curve."""

    x: float
    """Step."""
    y: float
    """Value."""
    low: float | None = None
    """Lower end of the confidence interval; None without one."""
    high: float | None = None
    """Upper end of the confidence interval; None without one."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve."""

    label: str
    """Label of the curve; empty when the chart's title is enough."""
    points: Sequence[Point]
    """Values by step."""


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
    """Whether the vertical axis is logarithmic."""
    has_marks: bool = False
    """Whether every value has a dot; straight lines then connect the values, without smoothing."""
    is_stepped: bool = True
    """Whether x counts steps; otherwise x is a continuous measure, such as a divergence."""
    x_name: str = "step"
    """Name of the horizontal axis."""
    y_name: str = ""
    """Name of the vertical axis; empty when the chart's title is enough."""


@dataclass(frozen=True, kw_only=True)
class ChartAxis:
    """Linear map from values to picture coordinates."""

    low: float
    """Value at the start of the axis."""
    high: float
    """Value at the end of the axis."""
    start: float
    """Coordinate of ``low``."""
    length: float
    """Distance from the coordinate of ``low`` to the coordinate of ``high``; may be negative."""

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * self.length


def draw(chart: Chart) -> Html:
    """Return the chart as an svg element, or a note when no value is finite."""
    scaled = _log_chart(chart) if chart.is_log else chart
    values = [point for series in scaled.series for point in series.points if _is_drawable(point.y)]
    if not values:
        return el("p", "No finite value was recorded.", class_="empty")
    x = _x_axis(values)
    y = _y_axis(scaled, values)
    parts = [*_phase_bands(scaled, x), *_y_grid(scaled, y), *_x_labels(x, scaled.is_stepped)]
    parts.append(text(WIDTH - RIGHT, HEIGHT - 2, chart.x_name, "axis end"))
    if chart.y_name:
        parts.append(text(0, 10, chart.y_name, "axis"))
    for index, series in reversed(list(enumerate(scaled.series))):
        parts += _curve(series, index, scaled, x, y)
    parts.append(el("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM))
    parts.append(el("circle", class_="dot", r=4))
    ends = {"data_x0": x.low, "data_x1": x.high, "data_y0": y.low, "data_y1": y.high}
    ranges = {name: str(end) for name, end in ends.items()}
    return svg("chart", WIDTH, HEIGHT, parts, **ranges, data_log=chart.is_log)


def svg(kind: str, width: int, height: int, *parts: Child, **attributes: Attribute) -> Html:
    """Return a picture of ``width`` x ``height`` units, which scales to the width of its card."""
    box = f"0 0 {width} {height}"
    return el("svg", parts, viewBox=box, class_=kind, role="img", **attributes)


def text(x: float, y: float, words: str, kind: str) -> Html:
    """Return a text whose baseline begins at a place, or ends there for the class ``end``."""
    return el("text", words, class_=kind, x=x, y=y)


def line(kind: str, x: tuple[float, float], y: tuple[float, float], **attributes: Attribute) -> Html:
    """Return a line between two places."""
    return el("line", class_=kind, x1=x[0], x2=x[1], y1=y[0], y2=y[1], **attributes)


def box(kind: str, x: tuple[float, float], y: float, height: float, *parts: Child, **more: Attribute) -> Html:
    """Return a rectangle from ``x[0]`` to ``x[1]``, whose upper edge is at ``y``."""
    return el("rect", parts, class_=kind, height=height, x=x[0], width=x[1] - x[0], y=y, **more)


def heat_map(columns: Sequence[Histogram], first: int, last: int) -> Html:
    """Return histograms side by side, their counts as shades; ``first`` and ``last`` label the ends."""
    edges = columns[0].edges
    x = ChartAxis(low=0, high=len(columns), start=_LABELS, length=WIDTH - _LABELS)
    y = ChartAxis(low=0, high=len(edges) + 1, start=HEIGHT - 20, length=20 - HEIGHT)
    parts = []
    for place, column in enumerate(columns):
        for row, count in enumerate(column.counts):
            if count:
                shade = max(0.05, round(count / sum(column.counts), 2))
                ends = x(place), x(place + 1)
                parts.append(box("cell", ends, y(row + 1), y(row) - y(row + 1), fill_opacity=shade))
    is_counted = edges == tuple(range(len(edges)))
    upper = [f"{edge:g}" if is_counted else f"to {edge:g}" for edge in edges]
    above = f"{len(edges)}" if is_counted else f"above {edges[-1]:g}"
    for row, label in enumerate([*upper, above]):
        parts.append(text(_LABELS - 7, y(row + 0.5) + 4, label, "tick end"))
    parts.append(text(_LABELS, HEIGHT - 6, f"{first:,}", "tick"))
    return svg("chart", WIDTH, HEIGHT, parts, text(WIDTH, HEIGHT - 6, f"{last:,}", "tick end"))


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most ``limit`` points; neighbouring points are averaged."""
    return [_middle(part) for part in parts_of(points, limit)]


def pick(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most ``limit`` points: from each group of neighbours, the one furthest from their mean."""
    return [_furthest(part) for part in parts_of(points, limit)]


def parts_of(points: Sequence[Row], limit: int) -> list[Sequence[Row]]:
    """Split into at most ``limit`` even parts of neighbours, none of them empty."""
    count = min(len(points), limit)
    cuts = [len(points) * part // count for part in range(count + 1)] if count else []
    return [points[start:stop] for start, stop in pairwise(cuts)]


def _furthest(points: Sequence[Point]) -> Point:
    """Return the point furthest from the mean; a non-finite point wins, so that it shows as a gap."""
    middle = _middle(points).y
    return max(points, key=lambda point: abs(point.y - middle) if _is_drawable(point.y) else math.inf)


def smooth(points: Sequence[Point], phases: Sequence[PhaseSpan]) -> list[Point]:
    """Fit a line around every point over a fortieth of the curve; no fit crosses a gap or the end of a phase.

    A running mean would pull in the ends of a rising curve; a fitted line does not.
    """
    half = max(2, len(points) // 80)
    smoothed: list[Point] = []
    for run in _unbroken(points, phases):
        for place, point in enumerate(run):
            near = run[max(0, place - half) : place + half + 1]
            smoothed.append(Point(x=point.x, y=_fitted(near, point.x)))
    return smoothed


def _fitted(points: Sequence[Point], at: float) -> float:
    """Return the value at ``at`` of the least-squares line through the points."""
    middle = _middle(points)
    spread = sum((point.x - middle.x) ** 2 for point in points)
    slope = sum((point.x - middle.x) * (point.y - middle.y) for point in points) / spread if spread else 0.0
    return middle.y + slope * (at - middle.x)


def _unbroken(points: Sequence[Point], phases: Sequence[PhaseSpan]) -> Iterator[list[Point]]:
    """Yield runs of finite points within one phase."""

    def place(point: Point) -> tuple[int, bool]:
        return sum(phase.first <= point.x for phase in phases), _is_drawable(point.y)

    for (_, is_drawn), run in groupby(points, key=place):
        if is_drawn:
            yield list(run)


def _middle(points: Sequence[Point]) -> Point:
    finite = [point.y for point in points if _is_drawable(point.y)]
    return Point(
        x=sum(point.x for point in points) / len(points), y=sum(finite) / len(finite) if finite else math.nan
    )


def _curve(series: Series, index: int, chart: Chart, x: ChartAxis, y: ChartAxis) -> list[Html]:
    points = pick(series.points)
    many = len(points) > _SMOOTHED_FROM and not chart.has_marks
    phases = () if chart.has_marks else chart.phases
    parts = [_band(points, x, y)] if any(point.low is not None for point in points) else []
    kind = f"{'raw' if many else 'line'} c{index}{' track' if index == 0 else ''}"
    parts += [_line(run, x, y, kind) for run in _unbroken(points, phases)]
    if many:
        middle = smooth(thin(series.points), phases)
        parts += [_line(run, x, y, f"line c{index}") for run in _unbroken(middle, phases)]
    if chart.has_marks and len(points) <= _SMOOTHED_FROM:
        drawn = [(x(point.x), y(point.y)) for point in points if _is_drawable(point.y)]
        parts += [el("circle", class_=f"mark c{index}", r=3.5, cx=at, cy=height) for at, height in drawn]
    return parts


def _line(points: Sequence[Point], x: ChartAxis, y: ChartAxis, kind: str) -> Html:
    # SVG draws a single point as a dot only if the polyline has a second point, even an equal one.
    ends = points if len(points) > 1 else [*points, *points]
    places = " ".join(f"{x(point.x):.1f},{y(point.y):.2f}" for point in ends)
    return el("polyline", class_=kind, points=places)


def _band(points: Sequence[Point], x: ChartAxis, y: ChartAxis) -> Html:
    known = [point for point in points if point.low is not None and point.high is not None]
    above = [f"{x(point.x):.1f},{y(point.high or 0.0):.2f}" for point in known]
    below = [f"{x(point.x):.1f},{y(point.low or 0.0):.2f}" for point in reversed(known)]
    return el("polygon", class_="band", points=" ".join([*above, *below]))


def _x_axis(values: Sequence[Point]) -> ChartAxis:
    low, high = min(point.x for point in values), max(point.x for point in values)
    one = int(low == high)
    return ChartAxis(low=low - one, high=high + one, start=LEFT, length=WIDTH - LEFT - RIGHT)


def _y_axis(chart: Chart, values: Sequence[Point]) -> ChartAxis:
    ends = [end for point in values for end in (point.y, point.low, point.high) if end is not None]
    low, high = min(ends), max(ends)
    if chart.is_share:
        low, high = min(0.0, low), max(1.0, high)
    elif chart.is_log:
        low, high = math.floor(low), math.ceil(high)
    elif low > 0 and low < 0.4 * high:
        low = 0.0
    if high - low < 1e-9 * max(1.0, abs(high)):
        room = 1.0 if chart.is_log else abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    room = 0.0 if chart.is_share or chart.is_log else 0.04 * (high - low)
    start = HEIGHT - BOTTOM
    return ChartAxis(low=low if low == 0 else low - room, high=high + room, start=start, length=TOP - start)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about ``count`` round values between two ends."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _y_grid(chart: Chart, axis: ChartAxis) -> list[Html]:
    parts = []
    for value in ticks(axis.low, axis.high):
        if not chart.is_log or value == round(value):
            label = f"1e{value:.0f}" if chart.is_log else _tick_label(value)
            parts.append(line("grid", (LEFT, WIDTH - RIGHT), (axis(value), axis(value))))
            parts.append(text(LEFT - 7, axis(value) + 4, label, "tick end"))
    return parts


def _x_labels(axis: ChartAxis, is_stepped: bool) -> list[Html]:
    labels = [
        text(axis(value), HEIGHT - 18, f"{value:,.0f}" if is_stepped else f"{value:g}", "tick middle")
        for value in ticks(axis.low, axis.high)
        if not is_stepped or value == round(value)
    ]
    return [*labels, line("base", (LEFT, WIDTH - RIGHT), (HEIGHT - BOTTOM, HEIGHT - BOTTOM))]


def _phase_bands(chart: Chart, axis: ChartAxis) -> list[Html]:
    """Return one band per phase, with its name at the top, when the chart shows more than one phase."""
    shown = [phase for phase in chart.phases if phase.last > axis.low and phase.first < axis.high]
    parts: list[Html] = []
    for index, phase in enumerate(shown if len(shown) > 1 else ()):
        start, end = axis(max(axis.low, phase.first - 0.5)), axis(min(axis.high, phase.last + 0.5))
        parts.append(box(f"phase p{index % 2}", (start, end), TOP, HEIGHT - BOTTOM - TOP))
        is_wide = end - start > 7.5 * len(phase.name)
        if is_wide or index == len(shown) - 1:
            kind, place = ("phasename", start + 3) if is_wide else ("phasename end", end)
            parts.append(text(place, TOP - 6, phase.name, kind))
    return parts


def _log_chart(chart: Chart) -> Chart:
    """Return the chart with the log10 of its values; zeros are drawn at the smallest positive value."""
    values = [point.y for series in chart.series for point in series.points if 0 < point.y < math.inf]
    least = min(values, default=1e-9)

    def log(point: Point) -> Point:
        return replace(point, y=math.log10(max(point.y, least)) if _is_drawable(point.y) else point.y)

    series = [replace(one, points=[log(point) for point in one.points]) for one in chart.series]
    return replace(chart, series=series)


def _is_drawable(value: float) -> bool:
    """Return whether a value is neither NaN nor so large that arithmetic overflows."""
    return abs(value) < 1e100


def _tick_label(value: float) -> str:
    if 0 < abs(value) < 1e-3:
        return number(value)
    return f"{value:,.12g}" if abs(value) < 1e6 else f"{value:.3g}"
