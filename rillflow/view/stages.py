"""Stages: where the time of each phase went, as one bar and one table.

spans ─ by phase and stage ─> seconds, share, a usual step, rows and tokens a second
time of the phase less the time under any span ─> evaluation, checkpoints and the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rillflow.observe.reader import SpanRecord
from rillflow.observe.wording import duration, number
from rillflow.view.html import Html, el
from rillflow.view.run_data import PhaseSpan, RunData
from rillflow.view.style import COLOURS

REST = "evaluation, checkpoints and the rest"


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What one stage took in one phase."""

    stage: str
    """The stage, or REST."""
    seconds: float
    """Its time over the phase."""
    median_s: float | None
    """A usual step's time; None for REST."""
    rows_per_s: float | None
    """Rows a second; None where rows were not counted."""
    tokens_per_s: float | None
    """Tokens a second, the prompts' included; None where tokens were not counted."""


def stage_times(data: RunData, phase: PhaseSpan) -> list[StageTime]:
    """The stages of a phase, the longest first, and what no stage covers."""
    spans = [span for span in data.spans if phase.first <= span.step <= phase.last]
    by_stage: dict[str, list[SpanRecord]] = {}
    for span in spans:
        by_stage.setdefault(span.stage, []).append(span)
    found = sorted(
        (_stage_time(stage, group) for stage, group in by_stage.items()), key=lambda one: -one.seconds
    )
    rest = phase.end_s - phase.start_s - covered(spans, phase.start_s, phase.end_s)
    return [
        *found,
        StageTime(stage=REST, seconds=max(0.0, rest), median_s=None, rows_per_s=None, tokens_per_s=None),
    ]


def covered(spans: Sequence[SpanRecord], start_s: float, end_s: float) -> float:
    """Seconds between two times during which at least one span ran."""
    total, reached = 0.0, start_s
    for span in sorted(spans, key=lambda one: one.start_s):
        stop = min(span.start_s + span.duration_s, end_s)
        total += max(0.0, stop - max(span.start_s, reached))
        reached = max(reached, stop)
    return total


def draw_stages(data: RunData) -> list[Html]:
    """A card for every phase."""
    colours: dict[str, int] = {}
    cards = []
    for phase in data.phases:
        times = stage_times(data, phase)
        for one in times:
            if one.stage != REST:
                colours.setdefault(one.stage, len(colours) % COLOURS)
        cards.append(_card(phase, times, colours))
    return cards


def _stage_time(stage: str, spans: Sequence[SpanRecord]) -> StageTime:
    seconds = sum(span.duration_s for span in spans)
    by_step: dict[int, float] = {}
    for span in spans:
        by_step[span.step] = by_step.get(span.step, 0.0) + span.duration_s
    rows, tokens = sum(span.rows for span in spans), sum(span.tokens for span in spans)
    return StageTime(
        stage=stage,
        seconds=seconds,
        median_s=median(by_step.values()),
        rows_per_s=rows / seconds if rows and seconds else None,
        tokens_per_s=tokens / seconds if tokens and seconds else None,
    )


def _card(phase: PhaseSpan, times: Sequence[StageTime], colours: dict[str, int]) -> Html:
    total = sum(one.seconds for one in times) or 1.0
    kinds = {one.stage: f"k{colours[one.stage]}" if one.stage in colours else "k-rest" for one in times}
    bar = (
        el("i", class_=kinds[one.stage], style=f"width:{100 * one.seconds / total:.2f}%", title=one.stage)
        for one in times
        if one.seconds > 0
    )
    head = el(
        "tr", (el("th", word) for word in ("stage", "time", "share", "usual step", "rows/s", "tokens/s"))
    )
    rows = [_row(one, one.seconds / total, kinds[one.stage]) for one in times]
    count = phase.last - phase.first + 1
    title = f"{phase.name}: {count:,} steps in {duration(phase.end_s - phase.start_s)}"
    table = el("div", el("table", el("thead", head), el("tbody", rows)), class_="scroll")
    return el("section", el("h3", title), el("div", bar, class_="bar"), table, class_="card wide")


def _row(one: StageTime, share: float, kind: str) -> Html:
    cells = (
        duration(one.seconds),
        f"{share:.1%}",
        "" if one.median_s is None else duration(one.median_s),
        "" if one.rows_per_s is None else number(one.rows_per_s),
        "" if one.tokens_per_s is None else number(one.tokens_per_s),
    )
    return el("tr", el("td", el("span", one.stage, class_=f"key {kind}")), (el("td", cell) for cell in cells))
