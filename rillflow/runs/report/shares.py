"""Shares: draw the time of each phase by stage, and the scored rows by outcome, as one bar and one table.

spans ─ by phase and stage ─> seconds, share, median step, rows and tokens per second
time of the phase less the time under any span ─> evaluation, checkpoints and the rest
metrics reward/OUTCOME/share ─> rows by outcome; a failure is not a reward of 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rillflow.records.metrics import Mean
from rillflow.runs.formatting import duration, number
from rillflow.runs.reader import SpanRecord
from rillflow.runs.report.html import COLOURS, Html, card, el, share_bar, table
from rillflow.runs.report.measured import covered
from rillflow.runs.run_data import PhaseSpan, RunData

REST = "evaluation, checkpoints and the rest"
OUTCOMES = {
    "score": "scored",
    "abstain": "abstained: the reward gave no score",
    "timeout": "timed out: the reward was stopped at its time limit",
    "error": "failed: the reward raised an error or died",
}
"""Meaning of each reward outcome."""


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


def _card(phase: PhaseSpan, times: Sequence[StageTime], colours: Mapping[str, int]) -> Html:
    total = sum(one.seconds for one in times) or 1.0
    kinds = [f"k{colours[one.stage]}" if one.stage in colours else "k-rest" for one in times]
    rows: list[Sequence[str]] = []
    for one, kind in zip(times, kinds, strict=True):
        speeds = [
            number(count / one.seconds) if count and one.seconds else "" for count in (one.rows, one.tokens)
        ]
        usual = "" if one.stage == REST else duration(one.median_s)
        name = el("span", one.stage, class_=f"key {kind}")
        rows.append((name, duration(one.seconds), f"{one.seconds / total:.1%}", usual, *speeds))
    shares = [(kind, one.seconds / total, one.stage) for one, kind in zip(times, kinds, strict=True)]
    title = f"{phase.name}: {phase.last - phase.first + 1:,} steps in {duration(phase.end_s - phase.start_s)}"
    head = ("stage", "time", "share", "median step", "rows/s", "tokens/s")
    return card(title, share_bar(shares), table(rows, head), kind="card wide")


def outcome_counts(data: RunData) -> dict[str, int]:
    """Return the number of rows in the run by outcome; empty if no step scored rows."""
    counts: dict[str, float] = {}
    for record in data.steps:
        for outcome in OUTCOMES:
            metric = record.metrics.get(f"reward/{outcome}/share")
            if isinstance(metric, Mean):
                counts[outcome] = counts.get(outcome, 0.0) + metric.total
    return {outcome: round(count) for outcome, count in counts.items()}


def draw_outcomes(data: RunData) -> list[Html]:
    """Draw a card with the counts; return no card if no step scored rows."""
    counts = outcome_counts(data)
    total = sum(counts.values())
    if not total:
        return []
    shares = [(f"o-{outcome}", count / total, outcome) for outcome, count in counts.items()]
    rows = [
        (el("span", OUTCOMES[outcome], class_=f"key o-{outcome}"), f"{count:,}", f"{count / total:.2%}")
        for outcome, count in counts.items()
    ]
    return [card(f"Rewards of {total:,} rows", share_bar(shares), table(rows), kind="card wide")]
