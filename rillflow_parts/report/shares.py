"""Shares: draw the time of each phase by stage, and the scored rows by outcome, as one bar and one table.

spans ─ by phase and stage ─> seconds, share, median step, rows and tokens per second
time of the phase less the time under any span ─> evaluation, checkpoints and the rest
metrics reward/OUTCOME/share ─> rows by outcome; a failure is not a reward of 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rillflow.runs.formatting import duration, number
from rillflow.runs.run_data import PhaseSpan, RunData
from rillflow.runs.span_columns import covered_s
from rillflow_parts.report.html import COLOURS, Html, card, el, share_bar, table

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
    stages, found = data.stages, []
    inside = stages.rows_of(first, last)
    numbers, firsts = np.unique(stages.column("stage")[inside], return_index=True)
    for place in numbers[np.argsort(firsts)].tolist():
        own = inside[stages.column("stage")[inside] == place]
        _, times = stages.by_step(own)
        found.append(
            StageTime(
                stage=stages.stages[place],
                seconds=float(times.sum()),
                median_s=float(np.median(times)),
                rows=int(stages.column("rows")[own].sum()),
                tokens=int(stages.column("tokens")[own].sum()),
            )
        )
    return found


def stage_colours(data: RunData) -> dict[str, int]:
    """Return the colour of every stage on the whole page; those with the most time get different ones."""
    if not data.phases:
        return {}
    times = stage_times(data, data.phases[0].first, data.phases[-1].last)
    longest = sorted(times, key=lambda one: -one.seconds)
    return {one.stage: place % COLOURS for place, one in enumerate(longest)}


def draw_stages(data: RunData) -> list[Html]:
    """Draw a card for every phase: its stages, and the time outside any stage."""
    colours = stage_colours(data)
    cards = []
    for phase in data.phases:
        times = sorted(stage_times(data, phase.first, phase.last), key=lambda one: -one.seconds)
        rows, stages = data.stages.rows_of(phase.first, phase.last), data.stages
        busy_s = covered_s(stages.column("start")[rows], stages.ends[rows], phase.start_s, phase.end_s)
        rest = phase.end_s - phase.start_s - busy_s
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
    head = ("stage", "time", "share", "median step", "rows/s", "tokens/s with prompts")
    filled = [place for place in range(len(head)) if any(row[place] for row in rows)]
    rows = [[row[place] for place in filled] for row in rows]
    found = table(rows, [head[place] for place in filled])
    return card(title, share_bar(shares), found, kind="card wide")


def outcome_counts(data: RunData) -> dict[str, int]:
    """Return the number of rows in the run by outcome; empty if no step scored rows."""
    counts = dict[str, int]()
    for outcome in OUTCOMES:
        shares = data.curves.curve(f"reward/{outcome}/share")
        if len(shares):
            counts[outcome] = round(float(np.nansum(shares.y * shares.weights)))
    return counts


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
