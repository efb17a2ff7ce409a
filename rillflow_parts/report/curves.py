"""Curves: draw the metrics of a run, one card each.

    curves.toml ─ title, shape to expect ─┐
    MetricColumns ─ values by step ───────┴─ cards ─> one card per recorded curve or histogram
                                          other_cards ─> one for every metric that curves.toml does not name

A run without a metric has no card for it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rillflow.runs.curves import TOKENS, MetricColumns
from rillflow.runs.formatting import number
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.run_data import PhaseSpan, RunData
from rillflow.runs.span_columns import LARGEST
from rillflow.runs.summary import alike, scores_of
from rillflow_parts.report.chart import Chart, Series, draw, heat_map, points
from rillflow_parts.report.html import Html, card, el

RECENT = 20
"""Number of last steps that a verdict looks at."""
COLUMNS = 60
"""Largest number of columns in the picture of a histogram."""
HISTOGRAM = "histogram"
"""Reduction of a metric that is a distribution."""
LEAD = "reward/score/mean"
"""Metric whose curve is as large as the held-out evaluation's."""
_HELD_OUT = "Held-out"
_GAP, _KL = "mismatch/logprob_gap/max", "policy/kl/mean"
_COMPARED, _FIRST = "mismatch/", "mismatch/first_"
"""Prefix of the metrics that compare sampler and trainer, and of those that are measured in every run."""


@dataclass(frozen=True, kw_only=True)
class CurveCard:
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
    is_histogram: bool = False
    """Whether the metric is a distribution over tokens, drawn step by step."""
    limit: float | None = None
    """Largest acceptable value among the last ones; None without a limit."""
    kept: str = ""
    """Sentence when the largest of the last values is at most the limit."""
    broken: str = ""
    """Sentence when it is above the limit."""


_TABLES = tomllib.loads(Path(__file__).with_name("curves.toml").read_text("utf-8"))["curve"]
CURVES = tuple(CurveCard(**table) for table in _TABLES)


def cards(data: RunData) -> list[Html]:
    """Return the curves that the run recorded: held-out accuracy or reward first, speed last."""
    metrics = data.curves
    found = [_held_out_card(data, _HELD_OUT, scores_of(data))] if data.evaluations else []
    found += [_held_out_card(data, f"{name}:", alike(looks)) for name, looks in data.sets.items()]
    found += over_optimisation(data)
    left_out = _never_compared(metrics)
    for curve in CURVES:
        names = [name for name in curve.metrics if name in metrics.names and name not in left_out]
        for phases in [[phase] for phase in data.phases] if curve.is_apart else [data.phases]:
            phase = phases[0].name if curve.is_apart else None
            if not names or (phase is not None and not len(metrics.curve(names[0], phase=phase))):
                continue
            found.append(
                _histogram(metrics, curve)
                if curve.is_histogram
                else _card(
                    curve, [_series(metrics, name, curve.metrics[name], phase) for name in names], phases
                )
            )
    return [*found, *_speed_card(data)]


def other_cards(data: RunData) -> list[Html]:
    """Return one card for every metric that no named curve draws."""
    named = {name for curve in CURVES for name in curve.metrics}
    metrics, found = data.curves, []
    left_out = _never_compared(metrics)
    for name in sorted(metrics.names.keys() - named - left_out):
        curve = CurveCard(title=name, hint="", metrics={name: ""})
        is_histogram = metrics.names[name] == HISTOGRAM
        found.append(
            _histogram(metrics, curve)
            if is_histogram
            else _card(curve, [_series(metrics, name, "", None)], data.phases)
        )
    return found


def not_measured(metrics: MetricColumns) -> list[Html]:
    """Return a sentence about the metrics that are 0 because nothing was compared; nothing without any."""
    left_out = sorted(_never_compared(metrics))
    if not left_out:
        return []
    words = (
        f"Not measured, so not drawn: {', '.join(left_out)}. The gap of sampler and trainer is exactly 0 in "
        'every step, as with algorithm.old_logprobs = "sampler", which computes no second log probability.'
    )
    return [el("p", words, class_="hint")]


def _never_compared(metrics: MetricColumns) -> set[str]:
    """Return the metrics that compare sampler and trainer, if no step compared them: every gap is 0."""
    if _GAP not in metrics.names or bool((metrics.curve(_GAP).y != 0).any()):
        return set()
    return {name for name in metrics.names if name.startswith(_COMPARED) and not name.startswith(_FIRST)}


def _series(metrics: MetricColumns, name: str, label: str, phase: str | None) -> Series:
    return Series(label=label, curve=metrics.curve(name, phase=phase))


def over_optimisation(data: RunData) -> list[Html]:
    """Draw gold (the held-out score) and proxy (the trained reward) over the divergence from the
    reference.
    """
    looks = [each for each in data.evaluations if isinstance(each.more.get("proxy_mean"), int | float)]
    if len(looks) < 2:
        return []
    divergence = data.curves.curve(_KL)
    moved = dict(zip(divergence.x.tolist(), divergence.y.tolist(), strict=True))
    made = set(data.curves.steps.tolist())
    places = [moved.get(each.step, None if each.step in made else 0.0) for each in looks]
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
        pairs = sorted(zip(at, values, strict=True), key=lambda pair: pair[0])
        curve = points([x for x, _ in pairs], [y for _, y in pairs])
        chart = Chart(
            series=[Series(label="", curve=curve)],
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
    ends = [score.interval or (None, None) for score in scores]
    curve = points(
        [score.step for score in scores],
        [score.value for score in scores],
        [low for low, _ in ends],
        [high for _, high in ends],
    )
    last = scores[-1]
    is_share = last.accuracy is not None
    chart = Chart(
        series=[Series(label="", curve=curve)],
        phases=data.phases,
        is_share=is_share,
        has_marks=True,
        y_name=last.name,
        is_lead=name == _HELD_OUT,
    )
    what = "Share of correct answers to" if is_share else "Mean reward of the answers to"
    hint = f"{what} {last.count:,} held-out problems. The band is the 95% interval."
    if last.is_return:
        hint = f"Mean of {last.rows} with the most likely actions. The band is the 95% interval."
    title = "Evaluation: mean return" if last.is_return else f"{name} {last.name}"
    kind = "card lead" if name == _HELD_OUT else "card"
    return card(title, draw(chart), hint=hint, last=number(last.value), kind=kind)


def _speed_card(data: RunData) -> list[Html]:
    """Draw the sampled tokens of each step divided by its generation time."""
    spans, generating = data.stages, dict[int, float]()
    for stage in spans.stages:
        if stage.endswith(".generate"):
            steps, seconds = spans.by_step(spans.rows_of(1, LARGEST, stage))
            for step, took_s in zip(steps.tolist(), seconds.tolist(), strict=True):
                generating[step] = generating.get(step, 0.0) + took_s
    sampled = data.curves.curve(TOKENS)
    pairs = [
        (step, tokens / generating[step])
        for step, tokens in zip(sampled.x.astype(int).tolist(), sampled.y.tolist(), strict=True)
        if generating.get(step, 0.0) > 0
    ]
    if not pairs:
        return []
    curve = CurveCard(
        title="Generation speed",
        hint="Sampled tokens per second of generation.",
        metrics={},
        y_name="sampled tokens per second",
    )
    values = points([step for step, _ in pairs], [speed for _, speed in pairs])
    return [_card(curve, [Series(label="", curve=values)], data.phases)]


def _card(curve: CurveCard, series: Sequence[Series], phases: Sequence[PhaseSpan]) -> Html:
    chart = Chart(
        series=series,
        phases=phases,
        is_share=curve.is_share,
        is_log=curve.is_log,
        y_name=curve.y_name,
        is_lead=LEAD in curve.metrics,
    )
    title = f"{curve.title}: {phases[0].name}" if curve.is_apart else curve.title
    main = series[0].curve
    notes = [_legend(series)] if len(series) > 1 else []
    bad = main.x[~np.isfinite(main.y)].tolist()
    if bad:
        notes.append(
            el("p", f"{len(bad)} values are not finite, the first at step {bad[0]:,.0f}.", class_="bad")
        )
    if curve.limit is not None:
        # A non-finite value is above every limit.
        recent = np.where(np.isfinite(main.y), main.y, np.inf)[-RECENT:]
        worst = float(recent.max(initial=0.0))
        is_kept = worst <= curve.limit
        words = f"{curve.kept if is_kept else curve.broken} Largest recent value: {number(worst)}."
        notes.append(el("p", words, class_="good" if is_kept else "bad"))
    kind = "card lead" if LEAD in curve.metrics else "card"
    names = [el("p", " ".join(curve.metrics), class_="metric")] if curve.hint and curve.metrics else []
    return card(title, names, draw(chart), notes, hint=curve.hint, last=number(float(main.y[-1])), kind=kind)


def _histogram(metrics: MetricColumns, curve: CurveCard) -> Html:
    """Draw the shares of the values of each step; with many steps, neighbouring steps are summed."""
    (name,) = curve.metrics
    return card(curve.title, heat_map(list(metrics.histograms(name, COLUMNS))), hint=curve.hint)


def _legend(series: Sequence[Series]) -> Html:
    entries = [el("span", one.label, class_=f"key c{index}") for index, one in enumerate(series)]
    return el("p", entries, class_="legend")
