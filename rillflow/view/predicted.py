"""Predicted: what the plan of a run expected of every stage, beside what it took.

plan.toml ─ predicted seconds ───────────────┐
starts ─ steps placed as the plan says ─┐    │
spans, step times ─ medians of those ───┴────┴─> Comparison ─┬─ text at the end, which stage was furthest off
                                                             └─ card of the report
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from rillflow.observe import layout
from rillflow.planner.plan import Predicted, open_plan
from rillflow.records.metrics import Mean
from rillflow.view.columns import columns, seconds
from rillflow.view.html import Html, el, table
from rillflow.view.run_data import RunData
from rillflow.view.stages import stage_times

STEP = "step"
"""What the row of the whole step is called."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against its plan."""

    stages: tuple[Predicted, ...]
    """Every stage that was predicted or measured, medians of the last phase's steps but the first that lay as
    planned; the longest first."""
    step: Predicted
    """The step as a whole."""
    steps: int
    """Steps that were measured."""

    @property
    def furthest(self) -> Predicted | None:
        """The stage whose prediction missed by most seconds, of those that were predicted."""
        said = (one for one in self.stages if one.predicted_s)
        return max(said, key=lambda one: abs(one.predicted_s - one.measured_s), default=None)


def compare(data: RunData) -> Comparison | None:
    """A run against the plan in its directory; None where there is none, or no step was placed as it says.

    Raises:
        PlanError: the plan there is damaged.
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
    """Seconds of every stage in a usual step, the median of steps ``first`` to ``last``, by name."""
    return {one.stage: one.median_s for one in stage_times(data, first, last)}


def steps_s(data: RunData, first: int, last: int) -> list[float]:
    """Seconds of each of steps ``first`` to ``last``; a 0 where none was recorded."""
    found = [one.metrics.get("run/step_seconds/mean") for one in data.steps if first <= one.step <= last]
    return [one.total / one.count for one in found if isinstance(one, Mean) and one.count] or [0.0]


def render_comparison(found: Comparison) -> str:
    """The comparison as a table of text, and the stage that was furthest off."""
    head = f"predicted against measured, medians of {found.steps:,} steps:"
    return "\n".join([head, *columns(_rows(found)), _furthest_line(found)]).rstrip()


def draw_comparison_card(data: RunData) -> list[Html]:
    """The comparison as a card; nothing where a run has no plan."""
    found = compare(data)
    if found is None:
        return []
    title = el("h3", f"Predicted and measured, medians of {found.steps:,} steps")
    furthest = el("p", _furthest_line(found), class_="hint")
    return [el("section", title, table(_rows(found)), furthest, class_="card wide")]


def _furthest_line(found: Comparison) -> str:
    worst = found.furthest
    if worst is None:
        return ""
    said = f"predicted {seconds(worst.predicted_s)}, measured {seconds(worst.measured_s)}"
    return f"furthest off: {worst.stage}, {said}"


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("stage", "predicted", "measured", "error")]
    for one in (*found.stages, found.step):
        said = (seconds(one.predicted_s), f"{one.error:+.0%}") if one.predicted_s else ("", "")
        rows.append((one.stage, said[0], seconds(one.measured_s), said[1] if one.measured_s else ""))
    return rows
