"""Curves: draw the metrics of a run, one card each.

    curves.toml ─ title, shape to expect ─┐
    RunData ─ values by step ─────────────┴─ cards ─> one card per recorded curve or histogram
                                          other_cards ─> one for every metric that curves.toml does not name

A run without a metric has no card for it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rillflow.records.metrics import Histogram, merge_metrics
from rillflow.runs.formatting import number
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.report.chart import Chart, Point, Series, draw, heat_map, parts_of
from rillflow.runs.report.html import Html, card, el
from rillflow.runs.run_data import PhaseSpan, RunData
from rillflow.runs.summary import alike, scores_of

RECENT = 20
"""Number of last steps that a verdict looks at."""
COLUMNS = 60
"""Largest number of columns in the picture of a histogram."""
_GAP, _KL = "mismatch/logprob_gap/max", "policy/kl/mean"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One card of the report."""

    title: str
    """Heading of the card."""
    hint: str
    """Meaning of the curve and the shape to expect."""
    metrics: Mapping[str, str]
    """Labels of the drawn metrics by metric name; the first metric is the main one."""
    y_name: str = ""
    """Name of the vertical axis."""
    is_share: bool = False
    """Whether the values are shares."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic."""
    is_apart: bool = False
    """Whether every phase has its own axes, because its values differ in kind."""
    is_measured_apart: bool = False
    """Whether to omit the curve when no step compared trainer and sampler, so that every gap is exactly 0."""
    is_histogram: bool = False
    """Whether the metric is a distribution over tokens, drawn step by step."""
    limit: float | None = None
    """Largest acceptable value among the last ones; None without a limit."""
    kept: str = ""
    """Sentence when the largest of the last values is at most the limit."""
    broken: str = ""
    """Sentence when it is above the limit."""


_TABLES = tomllib.loads(Path(__file__).with_name("curves.toml").read_text("utf-8"))["curve"]
CURVES = tuple(Curve(**table) for table in _TABLES)


def cards(data: RunData) -> list[Html]:
    """Return the curves that the run recorded: held-out accuracy or reward first, speed last."""
    found = [_held_out_card(data, "Held-out", scores_of(data))] if data.evaluations else []
    found += [_held_out_card(data, f"{name}:", alike(looks)) for name, looks in data.sets.items()]
    found += over_optimisation(data)
    compared = any(point.y != 0 for point in _series(data, _GAP, "", data.phases).points)
    for curve in CURVES:
        for phases in [[phase] for phase in data.phases] if curve.is_apart else [data.phases]:
            series = [_series(data, name, label, phases) for name, label in curve.metrics.items()]
            series = [one for one in series if one.points]
            if series and (compared or not curve.is_measured_apart):
                found.append(_histogram(data, curve) if curve.is_histogram else _card(curve, series, phases))
    return [*found, *_speed_card(data)]


def other_cards(data: RunData) -> list[Html]:
    """Return one card for every metric that no named curve draws."""
    named = {name for curve in CURVES for name in curve.metrics}
    names = sorted({name for record in data.steps for name in record.metrics} - named)
    return [
        _card(Curve(title=name, hint="", metrics={}), [_series(data, name, "", data.phases)], data.phases)
        for name in names
    ]


def _series(data: RunData, name: str, label: str, phases: Sequence[PhaseSpan]) -> Series:
    points = [
        Point(x=record.step, y=record.metrics[name].value)
        for record in data.steps
        if name in record.metrics and any(phase.first <= record.step <= phase.last for phase in phases)
    ]
    return Series(label=label, points=points)


def over_optimisation(data: RunData) -> list[Html]:
    """Draw gold (the held-out score) and proxy (the trained reward) over the divergence from the
    reference.
    """
    looks = [each for each in data.evaluations if isinstance(each.more.get("proxy_mean"), int | float)]
    if len(looks) < 2:
        return []
    moved = {one.step: one.metrics[_KL].value if _KL in one.metrics else None for one in data.steps}
    places = [moved.get(each.step, 0.0) for each in looks]
    is_stepped = None in places
    at = [
        float(each.step) if place is None or is_stepped else place
        for each, place in zip(looks, places, strict=True)
    ]
    unit = "step" if is_stepped else "nats per token"
    over = "step" if is_stepped else f"divergence from the reference, in {unit}"
    found = []
    for title, what, values in (
        ("Gold", "Held-out evaluation score", [each.value for each in looks]),
        (
            "Proxy",
            "Reward model's score of held-out answers",
            [float(str(one.more["proxy_mean"])) for one in looks],
        ),
    ):
        points = sorted((Point(x=x, y=y) for x, y in zip(at, values, strict=True)), key=lambda one: one.x)
        chart = Chart(
            series=[Series(label="", points=points)],
            has_marks=True,
            is_stepped=is_stepped,
            x_name=unit,
            y_name=title.lower(),
        )
        hint = f"{what}, over the {over}. If the proxy rises while gold falls, the policy is over-optimised."
        name = f"{title} over the {over.partition(' ')[0]}"
        found.append(card(name, draw(chart), hint=hint, last=number(values[-1])))
    return found


def _held_out_card(data: RunData, name: str, scores: Sequence[EvaluationRecord]) -> Html:
    points = []
    for score in scores:
        low, high = score.interval or (None, None)
        points.append(Point(x=score.step, y=score.value, low=low, high=high))
    last = scores[-1]
    is_share = last.accuracy is not None
    chart = Chart(
        series=[Series(label="", points=points)],
        phases=data.phases,
        is_share=is_share,
        has_marks=True,
        y_name=last.name,
    )
    what = "Share of correct answers to" if is_share else "Mean reward of the answers to"
    hint = f"{what} {last.count:,} held-out problems. The band is the 95% interval."
    return card(f"{name} {last.name}", draw(chart), hint=hint, last=number(last.value))


def _speed_card(data: RunData) -> list[Html]:
    """Draw the sampled tokens of each step divided by its generation time."""
    seconds: dict[int, float] = {}
    for span in data.spans:
        if span.stage.endswith(".generate"):
            seconds[span.step] = seconds.get(span.step, 0.0) + span.duration_s
    points = [
        Point(x=record.step, y=record.metrics["rollout/tokens/sum"].value / seconds[record.step])
        for record in data.steps
        if "rollout/tokens/sum" in record.metrics and seconds.get(record.step, 0.0) > 0
    ]
    if not points:
        return []
    curve = Curve(
        title="Generation speed",
        hint="Sampled tokens per second of generation.",
        metrics={},
        y_name="tokens per second",
    )
    return [_card(curve, [Series(label="", points=points)], data.phases)]


def _card(curve: Curve, series: Sequence[Series], phases: Sequence[PhaseSpan]) -> Html:
    chart = Chart(
        series=series, phases=phases, is_share=curve.is_share, is_log=curve.is_log, y_name=curve.y_name
    )
    title = f"{curve.title}: {phases[0].name}" if curve.is_apart else curve.title
    values = [point.y for point in series[0].points]
    notes = [_legend(series)] if len(series) > 1 else []
    bad = [point.x for point in series[0].points if not math.isfinite(point.y)]
    if bad:
        notes.append(
            el("p", f"{len(bad)} values are not finite, the first at step {bad[0]:,.0f}.", class_="bad")
        )
    if curve.limit is not None:
        # A non-finite value is above every limit.
        worst = max((value if math.isfinite(value) else math.inf for value in values[-RECENT:]), default=0.0)
        is_kept = worst <= curve.limit
        words = f"{curve.kept if is_kept else curve.broken} Largest recent value: {number(worst)}."
        notes.append(el("p", words, class_="good" if is_kept else "bad"))
    return card(title, draw(chart), notes, hint=curve.hint, last=number(values[-1]))


def _histogram(data: RunData, curve: Curve) -> Html:
    """Draw the shares of the values of each step; with many steps, neighbouring steps are summed."""
    (name,) = curve.metrics
    steps = [(record.step, {name: record.metrics[name]}) for record in data.steps if name in record.metrics]
    merged = [merge_metrics(one for _, one in part)[name] for part in parts_of(steps, COLUMNS)]
    columns = [column for column in merged if isinstance(column, Histogram)]
    return card(curve.title, heat_map(columns, steps[0][0], steps[-1][0]), hint=curve.hint)


def _legend(series: Sequence[Series]) -> Html:
    entries = [el("span", one.label, class_=f"key c{index}") for index, one in enumerate(series)]
    return el("p", entries, class_="legend")
