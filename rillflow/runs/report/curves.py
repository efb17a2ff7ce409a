"""Curves: the metrics that the report draws, with their titles and the shape to expect.

    RunData ─ cards ─> one card per recorded curve, then one for every metric not named here

A run without a metric has no card for it. docs/metrics.md defines the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rillflow.records.metrics import Metric
from rillflow.runs.formatting import number
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.report.chart import Chart, Point, Series, draw
from rillflow.runs.report.histograms import CAPTIONS
from rillflow.runs.report.html import Html, el
from rillflow.runs.run_data import PhaseSpan, RunData
from rillflow.runs.summary import alike, scores_of

RECENT = 20
"""Number of last steps that a verdict looks at."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Limit on a curve's last values, with a sentence for each outcome."""

    limit: float
    """Largest acceptable value."""
    kept: str
    """Sentence when the largest of the last values is at most the limit."""
    broken: str
    """Sentence when it is above the limit."""


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
    verdict: Verdict | None = None
    """Limit for the last values; None without one."""


CURVES = (
    Curve(
        title="Reward",
        hint="Mean score of the sampled answers. It should rise, with noise, and flatten out.",
        metrics={"reward/score/mean": ""},
        y_name="reward",
    ),
    Curve(
        title="Supervised loss",
        hint="Mean negative log probability of an example's token, in nats. It falls, at first quickly.",
        metrics={"supervised/nll/mean": ""},
        y_name="nats per token",
    ),
    Curve(
        title="Token accuracy",
        hint="Share of the examples' tokens that have the highest probability. It should rise.",
        metrics={"supervised/accuracy/mean": ""},
        y_name="share of tokens",
        is_share=True,
    ),
    Curve(
        title="Policy loss",
        hint="Noisy and near 0. It does not measure progress; only a large or growing value is a warning.",
        metrics={"policy/loss/mean": ""},
        y_name="loss",
    ),
    Curve(
        title="Entropy",
        hint="Uncertainty of the policy, in nats per token. It falls slowly; a drop to 0 ends exploration.",
        metrics={"policy/entropy/mean": ""},
        y_name="nats per token",
    ),
    Curve(
        title="Divergence from the reference",
        hint="KL divergence from the reference, in nats per token. It grows slowly; a jump is a warning.",
        metrics={"policy/kl/mean": ""},
        y_name="nats per token",
    ),
    Curve(
        title="Clipped tokens",
        hint="Share of tokens with a ratio beyond a clip bound. Above 0.3, take fewer or smaller steps.",
        metrics={"policy/clipped/share": ""},
        y_name="share of tokens",
    ),
    Curve(
        title="Gradient norm",
        hint="Norm before clipping. It settles; spikes that become more frequent warn of a collapse.",
        metrics={"train/grad_norm/mean": ""},
        y_name="norm",
        is_apart=True,
    ),
    Curve(
        title="Sampler against trainer",
        hint="Largest difference of their log probabilities of a token. Only rounding should cause it.",
        metrics={"mismatch/logprob_gap/max": ""},
        y_name="nats",
        is_log=True,
        is_measured_apart=True,
        verdict=Verdict(
            limit=1e-3,
            kept="They agree.",
            broken="Too large for float32 rounding; bfloat16 may give 0.1. See loss.correction.",
        ),
    ),
    Curve(
        title="First minibatch against the sampler",
        hint="Largest |trainer / sampler - 1| of a token before the step's first update. The run stops above "
        "algorithm.ratio_tolerance.",
        metrics={"mismatch/first_ratio/max": ""},
        y_name="|ratio - 1|",
        is_log=True,
    ),
    Curve(
        title="First minibatch against the sampler",
        hint="Mean difference of their log probabilities before the step's first update, in nats. The run "
        "stops above algorithm.gap_tolerance.",
        metrics={"mismatch/first_gap/mean": ""},
        y_name="nats",
        is_log=True,
    ),
    Curve(
        title="Answer length",
        hint="Sampled tokens per row. Growth without more reward is rambling; a fall to 1 is a collapse.",
        metrics={"rollout/length/mean": "mean", "rollout/length/max": "longest"},
        y_name="tokens",
    ),
    Curve(
        title="Finished answers",
        hint="Share of answers that ended before the token limit. If it falls, read the longest samples or "
        "raise max_tokens.",
        metrics={"rollout/stopped/share": ""},
        y_name="share of rows",
        is_share=True,
    ),
    Curve(
        title="Groups with equal rewards",
        hint="Share of prompts whose answers all have the same reward, so that there is nothing to learn. "
        "Near 1, the prompts are too easy or too hard.",
        metrics={"reward/flat_groups/share": ""},
        y_name="share of prompts",
        is_share=True,
    ),
    Curve(
        title="Learning rate",
        hint="Rate of each step, as given by the schedule.",
        metrics={"train/lr/mean": ""},
        y_name="rate",
    ),
)


def cards(data: RunData) -> list[Html]:
    """Return the named curves that the run recorded: held-out accuracy or reward first, speed last."""
    found = [_held_out_card(data, "Held-out", scores_of(data))] if data.evaluations else []
    found += [_held_out_card(data, f"{name}:", alike(looks)) for name, looks in data.sets.items()]
    found += over_optimisation(data)
    for curve in CURVES:
        for phases in [[phase] for phase in data.phases] if curve.is_apart else [data.phases]:
            series = [_series(data, name, label, phases) for name, label in curve.metrics.items()]
            series = [one for one in series if one.points]
            if series and not (curve.is_measured_apart and not _compares(data)):
                found.append(_card(curve, series, phases))
    return [*found, *_speed_card(data)]


def _compares(data: RunData) -> bool:
    """Return whether a step compared log probabilities of trainer and sampler.

    The gap is then not exactly 0.
    """
    gaps = [record.metrics.get("mismatch/logprob_gap/max") for record in data.steps]
    return any(gap is not None and gap.value != 0 for gap in gaps)


def other_cards(data: RunData) -> list[Html]:
    """Return one card for every metric that no named curve draws."""
    named = {*CAPTIONS, *(name for curve in CURVES for name in curve.metrics)}
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
    moved = {record.step: record.metrics.get("policy/kl/mean") for record in data.steps}
    places = [_value(moved.get(each.step)) if each.step in moved else 0.0 for each in looks]
    is_stepped = any(place is None for place in places)
    found = []
    for title, values in (
        ("Gold", [each.value for each in looks]),
        ("Proxy", [float(str(each.more["proxy_mean"])) for each in looks]),
    ):
        at = [float(each.step) for each in looks] if is_stepped else [float(place or 0) for place in places]
        points = sorted((Point(x=x, y=y) for x, y in zip(at, values, strict=True)), key=lambda one: one.x)
        chart = Chart(
            series=[Series(label="", points=points)],
            has_marks=True,
            is_stepped=is_stepped,
            x_name="step" if is_stepped else "nats per token",
            y_name=title.lower(),
        )
        over = "step" if is_stepped else "divergence from the reference, in nats per token"
        what = "Held-out evaluation score" if title == "Gold" else "Reward model's score of held-out answers"
        hint = f"{what}, over the {over}. If the proxy rises while gold falls, the policy is over-optimised."
        found.append(
            _frame(f"{title} over the {over.partition(' ')[0]}", hint, draw(chart), number(values[-1]))
        )
    return found


def _value(metric: Metric | None) -> float | None:
    return None if metric is None else metric.value


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
    return _frame(f"{name} {last.name}", hint, draw(chart), number(last.value))


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
    if curve.verdict is not None:
        notes.append(_verdict(curve.verdict, values[-RECENT:]))
    return _frame(title, curve.hint, [draw(chart), *notes], number(values[-1]))


def _verdict(verdict: Verdict, recent: Sequence[float]) -> Html:
    # A non-finite value is above every limit.
    worst = max((value if math.isfinite(value) else math.inf for value in recent), default=0.0)
    is_kept = worst <= verdict.limit
    text = f"{verdict.kept if is_kept else verdict.broken} Largest recent value: {number(worst)}."
    return el("p", text, class_="good" if is_kept else "bad")


def _legend(series: Sequence[Series]) -> Html:
    entries = [el("span", one.label, class_=f"key c{index}") for index, one in enumerate(series)]
    return el("p", entries, class_="legend")


def _frame(title: str, hint: str, body: Html | list[Html], last: str) -> Html:
    head = el("header", el("h3", title), el("output", last, data_last=last))
    note = [el("p", hint, class_="hint")] if hint else []
    return el("section", head, note, body, class_="card")
