"""Histograms: draw the distribution over tokens, step by step, as one picture per metric.

metrics.jsonl ─> one column per step, sums of neighbouring steps ─ share of the column ─> shade of a cell
"""

from __future__ import annotations

from rillflow.records.metrics import Histogram, merge_metrics
from rillflow.runs.report.chart import parts_of
from rillflow.runs.report.html import Html, el
from rillflow.runs.run_data import RunData

COLUMNS = 60
"""Largest number of columns in a picture; with more steps, neighbouring steps are summed."""
WIDTH, HEIGHT, LEFT = 480, 240, 96
CAPTIONS = {
    "staleness/versions/histogram": (
        "Staleness",
        "Number of versions that a token is older than the weights it trains.",
    ),
    "mismatch/log_ratio/histogram": (
        "Trainer against sampler",
        "log(trainer / sampler) of a token, in nats. Stale tokens widen it.",
    ),
}
"""Title and caption of each picture; docs/metrics.md defines the metrics."""


def histogram_cards(data: RunData) -> list[Html]:
    """Return a card for every histogram that the run recorded."""
    return [_card(data, name) for name in CAPTIONS if any(name in record.metrics for record in data.steps)]


def _card(data: RunData, name: str) -> Html:
    steps = [(record.step, {name: record.metrics[name]}) for record in data.steps if name in record.metrics]
    columns = [merge_metrics(one for _, one in part)[name] for part in parts_of(steps, COLUMNS)]
    found = [column for column in columns if isinstance(column, Histogram)]
    wide, bins = (WIDTH - LEFT) / len(columns), len(found[0].counts)
    high = (HEIGHT - 20) / bins
    parts = []
    for place, column in enumerate(found):
        for row, tokens in enumerate(column.counts):
            if tokens:
                box = {"x": f"{LEFT + place * wide:.1f}", "y": f"{(bins - 1 - row) * high:.1f}"}
                size = {"width": f"{wide:.1f}", "height": f"{high:.1f}"}
                shade = f"{max(0.05, tokens / sum(column.counts)):.2f}"
                parts.append(el("rect", class_="cell", fill_opacity=shade, **box, **size))
    for row, label in enumerate(labels(found[0].edges)):
        parts.append(
            el("text", label, class_="tick end", x=LEFT - 7, y=f"{(bins - 0.5 - row) * high + 4:.1f}")
        )
    for at, anchor, step in ((LEFT, "tick", steps[0][0]), (WIDTH, "tick end", steps[-1][0])):
        parts.append(el("text", f"{step:,}", class_=anchor, x=at, y=HEIGHT - 6))
    chart = el("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img")
    title, hint = CAPTIONS[name]
    return el("section", el("h3", title), el("p", hint, class_="hint"), chart, class_="card")


def labels(edges: tuple[float, ...]) -> list[str]:
    """Return the labels of the bins: the version for staleness, otherwise the upper edge."""
    if edges == tuple(range(len(edges))):
        return [str(place) for place in range(len(edges) + 1)]
    return [*(f"to {edge:g}" for edge in edges), f"above {edges[-1]:g}"]
