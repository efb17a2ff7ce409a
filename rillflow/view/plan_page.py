"""Plan page: a plan's or a simulation's timeline, its curve and its tables as one HTML file.

bars ─ timeline ─┐
curves ─ chart ──┼─> one page, as the report of a run is
lines of text ───┘
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rillflow.errors import PlanError
from rillflow.view.chart import Chart, Series, draw
from rillflow.view.html import Html, el
from rillflow.view.page import page, section
from rillflow.view.timeline import Bar, draw_timeline

KINDS = (".html",)
"""What a picture may be, by how its file's name ends."""


def require_kind(file: Path) -> str:
    """How the file's name ends.

    Raises:
        PlanError: no picture is drawn as that.
    """
    if file.suffix not in KINDS:
        raise PlanError(
            f"{file} names no kind of picture",
            why="it is drawn as .html, which a browser prints",
            fix=f"{file.stem}.html",
        )
    return file.suffix


def plan_page(
    title: str, bars: Sequence[Bar], curves: Sequence[Series], axes: str, lines: Sequence[str]
) -> str:
    """The page.

    Args:
        title: what it shows.
        bars: the timeline.
        curves: drawn in one pair of axes; may be none.
        axes: what these are, ``x; y``.
        lines: what the command line says of it.
    """
    timeline = draw_timeline(bars)
    body: list[Html] = [
        el("h1", title),
        *section("In numbers", [el("pre", "\n".join(lines))] if lines else []),
        *section("Timeline", [el("section", timeline, class_="card wide")] if timeline else []),
        *section(axes.partition("; ")[2] or "Curves", [_card(axes, curves)] if curves else []),
        el("footer", "Made by Rillflow; docs/design/planner.md says how each number is predicted."),
    ]
    return page(title, body)


def _card(axes: str, curves: Sequence[Series]) -> Html:
    x, _, y = axes.partition("; ")
    header = el("header", el("h3", f"{y} by {x}"), el("output", "", data_last=""))
    return el("section", header, draw(Chart(series=curves, has_marks=True)), class_="card")
