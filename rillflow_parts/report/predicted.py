"""Predicted: compare the stage times that a run's plan predicted with the measured ones.

plan.toml ─ predicted seconds ───────────────────┐
starts ─ steps placed as in the plan ─┐          │
spans, step times ─ their medians ────┴──────────┴─> Comparison ─┬─ text with the largest error at the end
                                                                 └─ card of the report
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from rillflow.app.planned import open_plan
from rillflow.placement.plan import Predicted
from rillflow.runs import layout
from rillflow.runs.formatting import columns, seconds
from rillflow.runs.run_data import RunData
from rillflow_parts.report.html import Html, card, el, table
from rillflow_parts.report.shares import stage_times

STEP = "step"
"""Name of the row of the whole step."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a run with its plan."""

    stages: tuple[Predicted, ...]
    """Predicted and measured seconds of every stage, longest first. Measured seconds are medians over the
    steps of the last phase that used the planned placement, without the first.
    """
    step: Predicted
    """Predicted and measured seconds of the whole step."""
    steps: int
    """Number of measured steps."""

    @property
    def furthest(self) -> Predicted | None:
        """The predicted stage with the largest absolute error in seconds."""
        said = (one for one in self.stages if one.predicted_s)
        return max(said, key=lambda one: abs(one.predicted_s - one.measured_s), default=None)


def compare(data: RunData) -> Comparison | None:
    """Compare a run with the plan in its directory; return None if no step followed a plan.

    Raises:
        PlanError: the plan file is damaged.
    """
    file = data.path / layout.PLAN
    if not file.is_file() or not data.phases:
        return None
    plan = open_plan(file)
    phase, begun = data.phases[-1], data.placed_from
    left = data.starts and data.starts[-1].get("is_planned") is False
    if left or phase.name != plan.name or begun > phase.last:
        return None
    first = max(phase.first, begun)
    first += 1 if phase.last > first else 0
    measured = stage_medians(data, first, phase.last)
    expected = plan.predicted_stages_s
    names = sorted(measured.keys() | expected.keys(), key=lambda name: -measured.get(name, 0.0))
    stages = tuple(
        Predicted(stage=name, predicted_s=expected.get(name, 0.0), measured_s=measured.get(name, 0.0))
        for name in names
    )
    took = median(steps_s(data, first, phase.last))
    step = Predicted(stage=STEP, predicted_s=plan.predicted_step_s, measured_s=took)
    return Comparison(stages=stages, step=step, steps=phase.last - first + 1)


def stage_medians(data: RunData, first: int, last: int) -> Mapping[str, float]:
    """Return the median seconds of every stage over steps ``first`` to ``last``, by name."""
    return {one.stage: one.median_s for one in stage_times(data, first, last)}


def steps_s(data: RunData, first: int, last: int) -> list[float]:
    """Return the seconds of each of steps ``first`` to ``last``, or a single 0 if none was recorded."""
    taken = data.curves.curve("run/step_seconds/mean")
    inside = (taken.x >= first) & (taken.x <= last) & np.isfinite(taken.y)
    return taken.y[inside].tolist() or [0.0]


def render_comparison(found: Comparison) -> str:
    """Return the comparison as a text table, followed by the stage with the largest error."""
    head = f"predicted and measured, medians of {found.steps:,} steps:"
    return "\n".join([head, *columns(_rows(found)), _furthest_line(found)]).rstrip()


def draw_comparison_card(data: RunData) -> list[Html]:
    """Draw the comparison as a card; return no card for a run without a plan."""
    found = compare(data)
    if found is None:
        return []
    head, *rows = _rows(found)
    furthest = el("p", _furthest_line(found), class_="hint")
    title = f"Predicted and measured, medians of {found.steps:,} steps"
    return [card(title, table(rows, head), furthest, kind="card wide")]


def _furthest_line(found: Comparison) -> str:
    worst = found.furthest
    if worst is None:
        return ""
    said = f"predicted {seconds(worst.predicted_s)}, measured {seconds(worst.measured_s)}"
    return f"largest error: {worst.stage}, {said}"


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("stage", "predicted", "measured", "error")]
    for one in (*found.stages, found.step):
        said = (seconds(one.predicted_s), f"{one.error:+.0%}") if one.predicted_s else ("", "")
        rows.append((one.stage, said[0], seconds(one.measured_s), said[1] if one.measured_s else ""))
    return rows
