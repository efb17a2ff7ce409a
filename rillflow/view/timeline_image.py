"""Timeline image: the timeline and a curve as PNG, for papers and chats; drawn by matplotlib, if it is there.

bars, curve ─> picture.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.errors import PlanError
from rillflow.view.chart import Series
from rillflow.view.timeline import Bar, colours_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e84", "#d9772b", "#6a5acd", "#3f9b6c", "#c2527f", "#8a7a3b")
"""Those of the pages, on white."""
IDLE = "#c9c5bb"


def save_png(
    file: Path, title: str, bars: Sequence[Bar], curves: Sequence[Series] = (), axes: str = ""
) -> None:
    """Write a picture: lanes by pool over seconds, and below them curves, where there are any.

    Args:
        file: where to.
        title: what it shows.
        bars: the timeline; may be empty.
        curves: drawn in one pair of axes.
        axes: what the curves' axes are, ``x; y``.

    Raises:
        PlanError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(
            f"{file} cannot be drawn",
            why="a PNG needs matplotlib, which is not installed",
            fix="pip install 'rillflow[plot]', or ask for an .html file",
        ) from None
    lanes = list(dict.fromkeys((bar.pool, bar.lane) for bar in bars))
    heights = ([0.6 + 0.3 * len(lanes)] if bars else []) + ([3.2] if curves else [])
    if not heights:
        raise PlanError(f"{file} would be empty", why="there is neither a timeline nor a curve")
    figure = Figure(figsize=(12.0, sum(heights) + 1.0 * len(heights)), layout="constrained")
    plots = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if bars:
        _timeline(plots[0], bars, lanes)
    if curves:
        _curves(plots[-1], curves, axes)
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(file, format="png", dpi=110)


def _timeline(plot: Axes, bars: Sequence[Bar], lanes: Sequence[tuple[str, str]]) -> None:
    colours, start = colours_of(bars), min(bar.start_s for bar in bars)
    places = {lane: place for place, lane in enumerate(lanes)}
    for place, lane in enumerate(lanes):
        own = [bar for bar in bars if (bar.pool, bar.lane) == lane]
        spans = [(bar.start_s - start, bar.end_s - bar.start_s) for bar in own]
        shades = [IDLE if bar.is_idle else COLOURS[colours[bar.stage]] for bar in own]
        plot.broken_barh(spans, (place - 0.4, 0.8), facecolors=shades, linewidth=0)
    for stage, colour in colours.items():
        plot.barh(0, 0, color=COLOURS[colour], label=stage)
    plot.set_yticks(list(places.values()), [f"{pool}: {lane}" if lane else pool for pool, lane in lanes])
    plot.invert_yaxis()
    plot.set_xlabel("seconds")
    plot.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _curves(plot: Axes, curves: Sequence[Series], axes: str) -> None:
    for place, series in enumerate(curves):
        x, y = [point.x for point in series.points], [point.y for point in series.points]
        plot.plot(x, y, marker="o", color=COLOURS[place % len(COLOURS)], label=series.label)
    left, _, right = axes.partition("; ")
    plot.set_xlabel(left)
    plot.set_ylabel(right)
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)
    if any(series.label for series in curves):
        plot.legend(frameon=False)
