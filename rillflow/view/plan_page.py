"""Plan page: a plan's or a simulation's timeline, its curve and its tables as one HTML file.

Simulation ─ simulated_bars ─ timeline ─┐
sizes of a cluster ─ chart ─────────────┼─> one page, as the report of a run is
lines of text ──────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rillflow.errors import PlanError
from rillflow.planner.search import ClusterSize
from rillflow.planner.simulator.result import Simulation
from rillflow.view.chart import Chart, Point, Series, draw
from rillflow.view.html import Html, el
from rillflow.view.page import page, section
from rillflow.view.timeline import Bar, draw_timeline

AXES = "rows a second by devices"
"""What the curve shows."""
MOST_REPLICAS = 16
"""Replicas of a pool that are drawn: its first ones."""
BESIDE = "beside"
"""The lane of what holds no devices: functions and formulas."""


def require_page(file: Path) -> None:
    """Refuse what is no page, before anything is searched.

    Raises:
        PlanError: no picture is drawn as that.
    """
    if file.suffix != ".html":
        raise PlanError(
            f"{file} names no kind of picture",
            why="it is drawn as .html, which a browser prints",
            fix=f"{file.stem}.html",
        )


def plan_page(
    title: str, found: Simulation, steps: int, lines: Sequence[str], sizes: Sequence[ClusterSize] = ()
) -> str:
    """The page.

    Args:
        title: what it shows.
        found: whose first steps are drawn.
        steps: how many.
        lines: what the command line says of it.
        sizes: the best plan on other sizes of the cluster; may be none.
    """
    timeline, curves = draw_timeline(simulated_bars(found, steps)), _growth(sizes)
    header = el("header", el("h3", AXES), el("output", "", data_last=""))
    card = el("section", header, draw(Chart(series=curves, has_marks=True)), class_="card")
    body: list[Html] = [
        el("h1", title),
        *section("In numbers", [el("pre", "\n".join(lines))]),
        *section("Timeline", [el("section", timeline, class_="card wide")] if timeline else []),
        *section("Throughput", [card] if sizes else []),
        el("footer", "Made by Rillflow; docs/design/planner.md says how each number is predicted."),
    ]
    return page(title, body)


def simulated_bars(found: Simulation, steps: int) -> Sequence[Bar]:
    """The bars of the first steps, replica by replica; what holds no devices comes last."""
    until = sum(found.step_s[:steps])
    bars = [
        Bar(
            pool=span.pool or BESIDE,
            lane=f"replica {span.lane:>2}" if span.pool and span.lane else "",
            stage=span.stage if span.cause is None else str(span.cause),
            start_s=span.start_s,
            end_s=min(span.end_s, until),
            step=span.step,
            is_idle=span.cause is not None,
        )
        for span in found.spans
        if span.start_s < until and span.lane <= MOST_REPLICAS
    ]
    return sorted(bars, key=lambda bar: (bar.pool == BESIDE, bar.pool, bar.lane, bar.start_s))


def _growth(sizes: Sequence[ClusterSize]) -> list[Series]:
    """Rows a second by devices, and what they would be if the smallest size were multiplied."""
    points = [Point(x=one.devices, y=one.rows_per_s) for one in sizes if one.best is not None]
    ideal = [Point(x=one.x, y=points[0].y * one.x / points[0].x) for one in points]
    return [Series(label="best plan", points=points), Series(label="ideal", points=ideal)]
