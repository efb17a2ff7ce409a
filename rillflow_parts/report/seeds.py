"""Seeds: the results of a run beside those of its other seeds, with the interval of their mean.

    SWEEP/CASE/seed-0, seed-1, ... ─ values of the same step ─> mean and Student's 95% interval

A run belongs to seeds if a sweep wrote it, into a folder ``seed-N``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from rillflow.formulas.interval import mean_interval
from rillflow.runs import layout
from rillflow.runs.curves import MetricColumns
from rillflow.runs.formatting import number
from rillflow.runs.reader import read_evaluations
from rillflow.runs.uniform_rewards import HIGH, LOW
from rillflow_parts.report.chart import Chart, Series, draw, points
from rillflow_parts.report.html import Html, card, el

METRICS = {"episode/return/mean": "Episode return", "reward/score/mean": "Reward"}
"""Metrics that are drawn over seeds, if the runs have them."""
MOST_POINTS = 200
"""Points of a curve; of more steps, neighbours are averaged."""
Values = dict[int, list[float]]
"""Value of every seed, by step."""


def draw_seeds(run: Path) -> list[Html]:
    """Return a card for the evaluations and one for the returns or rewards of all seeds."""
    runs = seeds_of(run)
    if len(runs) < 2:
        return []
    looks = [read_evaluations(each) for each in runs]
    evaluated = _common([{each.step: each.value for each in found} for found in looks])
    columns = [MetricColumns(each) for each in runs]
    for each in columns:
        each.update()
    possible = _range(columns)
    found = [_card(f"Evaluation: {looks[0][-1].name}", evaluated, len(runs), possible)] if evaluated else []
    for name, title in METRICS.items():
        values = _common([_averaged(each, name) for each in columns])
        found += [_card(title, values, len(runs), possible)] if values else []
    return [el("div", found, class_="grid-cards curves")] if found else []


def seeds_of(run: Path) -> list[Path]:
    """Return the run directories of all seeds of a run's case; none if it is of no sweep."""
    run = run.resolve()
    if not re.fullmatch(r"seed-\d+", run.name):
        return []
    return [each for each in sorted(run.parent.glob("seed-*")) if layout.is_run_directory(each)]


def _averaged(columns: MetricColumns, name: str) -> dict[int, float]:
    """Return a metric by step; of many steps, the mean of neighbours without NaN, by the last of them."""
    if name not in columns.names:
        return {}
    curve = columns.curve(name)
    every = -(-len(curve.x) // MOST_POINTS)
    steps = curve.x.astype(int)
    ends = (steps - 1) // every * every + every
    kept = np.isfinite(curve.y)
    return {int(end): float(curve.y[kept & (ends == end)].mean()) for end in np.unique(ends[kept])}


def _common(seeds: Sequence[dict[int, float]]) -> Values:
    """Return the values of all seeds at every step of any seed, as far as all seeds have come.

    Where a seed has no value, such as the return of a step in which no episode ended, the value lies on the
    line between its neighbours.
    """
    if not all(seeds):
        return {}
    first, last = max(map(min, seeds)), min(map(max, seeds))
    steps = sorted(step for step in set().union(*seeds) if first <= step <= last)
    found = [np.interp(steps, sorted(each), [each[step] for step in sorted(each)]) for each in seeds]
    return {step: list(map(float, values)) for step, *values in zip(steps, *found, strict=True)}


def _range(columns: Sequence[MetricColumns]) -> tuple[float, float]:
    """Return the least and the largest reward of all seeds; unbounded without them."""
    lows = [each.curve(LOW).y.min() for each in columns if len(each.curve(LOW))]
    highs = [each.curve(HIGH).y.max() for each in columns if len(each.curve(HIGH))]
    return float(min(lows, default=-math.inf)), float(max(highs, default=math.inf))


def _card(title: str, values: Values, count: int, possible: tuple[float, float]) -> Html:
    steps, means = list(values), [fmean(each) for each in values.values()]
    ends = [
        mean_interval(each, possible) or (mean, mean)
        for each, mean in zip(values.values(), means, strict=True)
    ]
    curve = points(steps, means, [low for low, _ in ends], [high for _, high in ends])
    chart = Chart(series=[Series(label="", curve=curve)], y_name="mean")
    hint = f"Mean of {count} seeds. The band is Student's 95% interval of this mean."
    return card(f"{title}, {count} seeds", draw(chart), hint=hint, last=number(means[-1]))
