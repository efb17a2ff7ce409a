"""Outcomes: count scored rows and the rows without a score; a failure is not a reward of 0."""

from __future__ import annotations

from rillflow.records.metrics import Mean
from rillflow.runs.report.html import Html, el
from rillflow.runs.run_data import RunData

OUTCOMES = {
    "score": "scored",
    "abstain": "abstained: the reward gave no score",
    "timeout": "timed out: the reward was stopped at its time limit",
    "error": "failed: the reward raised an error or died",
}
"""Meaning of each reward outcome."""


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
    bar = (
        el("i", class_=f"o-{outcome}", style=f"width:{100 * count / total:.3f}%", title=outcome)
        for outcome, count in counts.items()
        if count
    )
    rows = [
        el(
            "tr",
            el("td", el("span", OUTCOMES[outcome], class_=f"key o-{outcome}")),
            el("td", f"{count:,}"),
            el("td", f"{count / total:.2%}"),
        )
        for outcome, count in counts.items()
    ]
    table = el("div", el("table", el("tbody", rows)), class_="scroll")
    return [
        el(
            "section",
            el("h3", f"Rewards of {total:,} rows"),
            el("div", bar, class_="bar"),
            table,
            class_="card wide",
        )
    ]
