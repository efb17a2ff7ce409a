"""Stages: draw the time of each phase by stage, as one bar and one table.

spans ─ by phase and stage ─> seconds, share, median step, rows and tokens per second
time of the phase less the time under any span ─> evaluation, checkpoints and the rest
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rillflow.runs.formatting import duration, number
from rillflow.runs.reader import SpanRecord
from rillflow.runs.report.html import Html, el, table
from rillflow.runs.report.style import COLOURS
from rillflow.runs.run_data import PhaseSpan, RunData

REST = "evaluation, checkpoints and the rest"


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Time of one stage over some steps."""

    stage: str
    """Stage name, or REST."""
    seconds: float
    """Total seconds over all these steps."""
    median_s: float
    """Median seconds per step."""
    rows: int = 0
    """Number of rows; 0 if they were not counted."""
    tokens: int = 0
    """Number of tokens including prompt tokens; 0 if they were not counted."""


def stage_times(data: RunData, first: int, last: int) -> list[StageTime]:
    """Return the stage times of steps ``first`` to ``last``, in order of appearance."""
    by_stage: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in data.spans:
        if first <= span.step <= last:
            by_stage[span.stage].append(span)
    found = []
    for stage, spans in by_stage.items():
        by_step: dict[int, float] = defaultdict(float)
        for span in spans:
            by_step[span.step] += span.duration_s
        rows, tokens = sum(span.rows for span in spans), sum(span.tokens for span in spans)
        times = by_step.values()
        one = StageTime(stage=stage, seconds=sum(times), median_s=median(times), rows=rows, tokens=tokens)
        found.append(one)
    return found


def covered(spans: Sequence[SpanRecord], start_s: float, end_s: float) -> float:
    """Return the seconds between two times during which at least one span ran."""
    total, reached = 0.0, start_s
    for span in sorted(spans, key=lambda one: one.start_s):
        stop = min(span.start_s + span.duration_s, end_s)
        total += max(0.0, stop - max(span.start_s, reached))
        reached = max(reached, stop)
    return total


def draw_stages(data: RunData) -> list[Html]:
    """Draw a card for every phase: its stages, and the time outside any stage."""
    colours: dict[str, int] = {}
    cards = []
    for phase in data.phases:
        times = sorted(stage_times(data, phase.first, phase.last), key=lambda one: -one.seconds)
        for one in times:
            colours.setdefault(one.stage, len(colours) % COLOURS)
        spans = [span for span in data.spans if phase.first <= span.step <= phase.last]
        rest = phase.end_s - phase.start_s - covered(spans, phase.start_s, phase.end_s)
        times.append(StageTime(stage=REST, seconds=max(0.0, rest), median_s=0.0))
        cards.append(_card(phase, times, colours))
    return cards


def _card(phase: PhaseSpan, times: Sequence[StageTime], colours: dict[str, int]) -> Html:
    total = sum(one.seconds for one in times) or 1.0
    bar: list[Html] = []
    rows: list[Sequence[str]] = [("stage", "time", "share", "median step", "rows/s", "tokens/s")]
    for one in times:
        kind = f"k{colours[one.stage]}" if one.stage in colours else "k-rest"
        share = one.seconds / total
        if one.seconds > 0:
            bar.append(el("i", class_=kind, style=f"width:{100 * share:.2f}%", title=one.stage))
        speeds = (
            number(count / one.seconds) if count and one.seconds else "" for count in (one.rows, one.tokens)
        )
        usual = "" if one.stage == REST else duration(one.median_s)
        name = el("span", one.stage, class_=f"key {kind}")
        rows.append((name, duration(one.seconds), f"{share:.1%}", usual, *speeds))
    count = phase.last - phase.first + 1
    title = f"{phase.name}: {count:,} steps in {duration(phase.end_s - phase.start_s)}"
    return el("section", el("h3", title), el("div", bar, class_="bar"), table(rows), class_="card wide")
