"""The report: a run as one HTML file that needs no network and no server.

RunData ─┬─ header      settings of the run, accuracy before and after
         ├─ media       pictures and videos
         ├─ curves      one card per metric, phases marked
         ├─ seeds       the run's results beside those of its sweep's other seeds
         ├─ stages      time by stage, and the timeline of the last steps
         ├─ outcomes    scores of the reward, and how often it gave none
         ├─ samples     first and last step; best, worst, longest
         └─ details     other metrics, environment, config
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

from rillflow.runs import durable, layout
from rillflow.runs.formatting import duration
from rillflow.runs.json_lines import JSON
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.report import curves
from rillflow.runs.report.html import Html, card, cut, el, page, section, table
from rillflow.runs.report.measured import Predict, bars_with, last_steps, measured_bars, rank_rows
from rillflow.runs.report.media import draw_media
from rillflow.runs.report.pass_bars import pass_bars, pass_lines
from rillflow.runs.report.predicted import draw_comparison_card
from rillflow.runs.report.samples import draw_comparison, draw_groups, draw_pairs, read_samples, shade_key
from rillflow.runs.report.seeds import draw_seeds
from rillflow.runs.report.shares import draw_outcomes, draw_stages
from rillflow.runs.report.timeline import SHOWN_STEPS, draw_timeline
from rillflow.runs.run_data import RunData, load
from rillflow.runs.summary import Summary, summary_of, verdict


def write_report(run: Path, predict: Predict | None = None) -> Path:
    """Write report.html into a run directory, finished or not, and return its path.

    Args:
        run: the run directory.
        predict: predicts steps of the run; with None, the report shows only measured steps.

    Raises:
        RunDirectoryError: it is not a run directory, one of its files is damaged, or it cannot be written.
    """
    file = run / layout.REPORT
    durable.replace(file, [render(load(run), predict).encode("utf-8", "replace")])
    return file


def render(data: RunData, predict: Predict | None = None) -> str:
    """Return the whole page."""
    read = read_samples(data.path)
    body = [
        _hero(data, summary_of(data)),
        *section("Pictures and videos", draw_media(data.path)),
        *section("Curves", _curves(data) if len(data.curves) else []),
        *section("All seeds", draw_seeds(data.path)),
        *section("Where the time went", _times(data, predict) if len(data.stages) else []),
        *section("Reward outcomes", draw_outcomes(data)),
        *section("First and last samples", draw_comparison(read)),
        *section("Pairs", draw_pairs(read)),
        *section("Samples", [shade_key(), el("div", draw_groups(read), class_="pair")] if read else []),
        *_details(data),
        el(
            "footer",
            "Made by Rillflow from the files of the run directory; docs/metrics.md defines every metric.",
        ),
    ]
    return page(data.path.resolve().name, body)


def _curves(data: RunData) -> list[Html]:
    """Draw the named curves, below the place for their controls."""
    drawn = el("div", curves.cards(data), class_="grid-cards curves")
    return [el("div", data_controls=True), drawn, *curves.not_measured(data.curves)]


def _times(data: RunData, predict: Predict | None) -> list[Html]:
    """Draw time by phase, and the last steps rank by rank, measured and predicted."""
    found = last_steps(data, SHOWN_STEPS)
    predicted = None if predict is None else predict(data, found.first, found.last)
    bars, told = measured_bars(found), list[Html]()
    if predicted is not None:
        bars = bars_with(found, bars, predicted)
        told = [el("p", line, class_="hint") for line in predicted.lines(data)]
    head, *rows = rank_rows(found)
    title = f"{found.steps.capitalize()}, rank by rank"
    drawn = card(title, draw_timeline(bars), told, table(rows, head, kind="waits"), kind="card wide")
    stack = [*draw_comparison_card(data), *draw_stages(data), drawn, *_passes(data)]
    return [el("div", stack, class_="stack")]


def _passes(data: RunData) -> list[Html]:
    """Draw the passes of the last step's pipelines."""
    if not data.passes:
        return []
    last = data.passes[-1].step
    bars = draw_timeline(pass_bars([record for record in data.passes if record.step == last]))
    told = el("pre", "\n".join(pass_lines(data.passes)))
    return [card(f"Pipeline passes of step {last:,}", bars, told, kind="card wide")]


def _hero(data: RunData, summary: Summary) -> Html:
    made = sum(phase.steps for phase in summary.phases)
    status = "finished" if summary.is_finished else f"not finished: {made:,} steps" if made else "no step yet"
    title = el("h1", data.path.resolve().name, el("span", status, class_="status"))
    steps = ", ".join(f"{one.name} {one.steps:,}" for one in summary.phases)
    facts = {
        "task": _text(data.setting("task.source")) or _text(data.setting("environment.id")),
        "model": _model(data),
        "steps": steps,
        "time": duration(summary.seconds) if summary.seconds else "",
        "machine": _machine(data),
        "command": shlex.join(summary.command),
        "checkpoint": summary.checkpoint or "",
        "best": summary.best or "",
        "changed": "; ".join(summary.changes),
    }
    listed = el("dl", ([el("dt", name), el("dd", cut(value, 300))] for name, value in facts.items() if value))
    warned = [el("p", warning, class_="bad") for warning in summary.warnings]
    return el("section", el("div", title, listed, warned), _result(summary), class_="card hero")


def _result(summary: Summary) -> Html:
    before, after = summary.before, summary.after
    if before is None:
        return el("p", "Nothing was evaluated.", class_="hint")
    if after is None:
        shown = el("p", f"{before.value:.3f}", class_="change")
        return el("div", el("small", before.title), shown, _intervals([before]))
    change = el("p", f"{before.value:.3f} ", el("span", "→"), f" {after.value:.3f}", class_="change")
    kind = "good" if after.value > before.value else "bad"
    words = el("p", verdict(before, after), class_=kind)
    head = el("small", f"{before.title} on {after.rows}, before and after")
    return el("div", head, change, words, _intervals([before, after]))


def _intervals(scores: list[EvaluationRecord]) -> Html:
    """Draw the intervals on one scale: 0 to 1, extended to the range of the rewards."""
    shown = [(score, score.interval or (score.value, score.value)) for score in scores]
    ends = [end for _, interval in shown for end in interval if not math.isnan(end)]
    least, most = min(0.0, *ends), max(1.0, *ends)
    rows = []
    for index, (score, (low, high)) in enumerate(shown):
        if math.isnan(score.value):
            continue
        start, stop, at = ((end - least) / (most - least) for end in (low, high, score.value))
        band = el("i", class_="ends", style=f"left:{start:.2%};width:{stop - start:.2%}")
        bar = el("span", band, el("i", class_="mark", style=f"left:{at:.2%}"), class_=f"track c{1 - index}")
        told = "" if score.interval is None else f"{low:.3f} to {high:.3f}"
        rows.append([el("span", f"step {score.step:,}"), bar, el("span", told)])
    return el("div", rows, class_="intervals")


def _details(data: RunData) -> list[Html]:
    others = curves.other_cards(data)
    start = "Environment" if len(data.starts) == 1 else f"Environment, {len(data.starts)} starts"
    parts = (
        {f"Other metrics ({len(others)})": el("div", others, class_="grid-cards curves")} if others else {}
    )
    parts |= {start: el("pre", _pretty(list(data.starts)))} if data.starts else {}
    parts["Config"] = el("pre", _pretty(data.config))
    return [el("details", el("summary", title), body) for title, body in parts.items()]


def _pretty(value: JSON) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else ""


def _model(data: RunData) -> str:
    """Return the model's directory, or the size of a new model."""
    path = _text(data.setting("policy.model.path"))
    if path:
        return path
    parts = [f"{name} {data.setting(f'policy.model.new.{name}')}" for name in ("layers", "hidden", "heads")]
    architecture = _text(data.setting("policy.model.new.architecture"))
    return f"new {architecture}: {', '.join(parts)}" if architecture else ""


def _machine(data: RunData) -> str:
    if not data.starts:
        return ""
    start = data.starts[-1]
    return f"{start.get('device')}, {start.get('cores')} cores, {start.get('platform')}"
