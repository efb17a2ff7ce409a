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
import os
import shlex
from pathlib import Path

from rillflow.runs import durable, layout
from rillflow.runs.formatting import duration
from rillflow.runs.json_lines import JSON
from rillflow.runs.outcome import OutcomeKind, ScoreChange, compared
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.run_data import RunData, load
from rillflow.runs.summary import Summary, summary_of, training_text, verdict
from rillflow_parts.report import curves
from rillflow_parts.report.html import Html, card, cut, el, page, section, table
from rillflow_parts.report.measured import last_steps, measured_bars, rank_rows
from rillflow_parts.report.media import draw_media
from rillflow_parts.report.pass_bars import pass_bars, pass_lines
from rillflow_parts.report.predicted import draw_comparison_card
from rillflow_parts.report.samples import draw_comparison, draw_groups, draw_pairs, read_samples, shade_key
from rillflow_parts.report.seeds import draw_seeds
from rillflow_parts.report.shares import draw_outcomes, draw_stages, stage_colours
from rillflow_parts.report.timeline import SHOWN_STEPS, draw_timeline

DOCS = Path(__file__).resolve().parents[2] / "docs"
"""The documentation beside the package; an installed package has none."""


def write_report(run: Path) -> Path:
    """Write report.html into a run directory, finished or not, and return its path.

    Raises:
        RunDirectoryError: it is not a run directory, one of its files is damaged, or it cannot be written.
    """
    file = run / layout.REPORT
    durable.replace(file, [render(load(run)).encode("utf-8", "replace")])
    return file


def render(data: RunData) -> str:
    """Return the whole page."""
    read = read_samples(data.path)
    body = [
        _hero(data, summary_of(data)),
        *section("Pictures and videos", draw_media(data.path)),
        *section("Curves", _curves(data) if len(data.curves) else []),
        *section("All seeds", draw_seeds(data.path)),
        *section("Where the time went", _times(data) if len(data.stages) else []),
        *section("Reward outcomes", draw_outcomes(data)),
        *section("First and last samples", draw_comparison(read)),
        *section("Pairs", draw_pairs(read)),
        *section("Samples", [shade_key(), el("div", draw_groups(read), class_="pair")] if read else []),
        *_details(data),
        el(
            "footer",
            "Made by Rillflow from the files of the run directory. See ",
            _page(data.path, "first_day.md"),
            " (what each curve should look like, and what to do when a run does not learn) and ",
            _page(data.path, "metrics.md"),
            " (every metric).",
        ),
    ]
    return page(data.path.resolve().name, body)


def _page(run: Path, name: str) -> Html:
    """Name a page of the documentation, with a link where this installation has it."""
    file = DOCS / name
    link = Path(os.path.relpath(file, run.resolve())).as_posix() if file.is_file() else None
    return el("a", f"docs/{name}", href=link)


def _curves(data: RunData) -> list[Html]:
    """Draw the named curves, below the place for their controls."""
    drawn = el("div", curves.cards(data), class_="grid-cards curves")
    return [el("div", data_controls=True), drawn, *curves.not_measured(data.curves)]


def _times(data: RunData) -> list[Html]:
    """Draw time by phase, and the last steps rank by rank."""
    found = last_steps(data, SHOWN_STEPS)
    head, *rows = rank_rows(found)
    title = f"{found.steps.capitalize()}, rank by rank"
    drawn = card(
        title,
        draw_timeline(measured_bars(found), stage_colours(data)),
        table(rows, head, kind="waits"),
        kind="card wide",
    )
    stack = [*draw_comparison_card(data), *draw_stages(data), drawn, *_passes(data)]
    return [el("div", stack, class_="stack")]


def _passes(data: RunData) -> list[Html]:
    """Draw the passes of the last step's pipelines."""
    if not data.passes:
        return []
    last = data.passes[-1].step
    passes = pass_bars([record for record in data.passes if record.step == last])
    bars = draw_timeline(passes, stage_colours(data))
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
        "environment steps": summary.episodes.steps_text if summary.episodes else "",
        "best return": summary.episodes.best_text if summary.episodes else "",
        "time": duration(summary.seconds) if summary.seconds else "",
        "machine": _machine(data),
        "command": shlex.join(summary.command),
        "checkpoint": summary.checkpoint or "",
        "best": summary.best or "",
        "changed": "; ".join(summary.changes),
    }
    run_link = [el("dt", "directory"), el("dd", el("a", str(data.path.resolve()), href="./"))]
    listed = el(
        "dl",
        run_link,
        ([el("dt", name), el("dd", cut(value, 300))] for name, value in facts.items() if value),
    )
    warned = [el("p", warning, class_="bad") for warning in summary.warnings]
    return el("section", el("div", title, listed, warned), _result(summary), class_="card hero")


def _result(summary: Summary) -> Html:
    before, after = summary.before, summary.after
    if before is None:
        return el("div", el("p", "Nothing was evaluated.", class_="hint"), _training(summary, "hint"))
    if after is None:
        shown = el("p", f"{before.value:.3f}", class_="change")
        return el("div", el("small", before.title), shown, _intervals([before]), _training(summary, "hint"))
    change = el("p", f"{before.value:.3f} ", el("span", "→"), f" {after.value:.3f}", class_="change")
    kind = _MARKS.get(summary.outcome.kind, "hint")
    change_kind = "hint" if compared(before, after) is ScoreChange.UNCLEAR else kind
    words = [el("p", verdict(before, after), class_=change_kind), *_training(summary, kind)]
    head = el("small", f"{before.title} on {after.rows}, before and after")
    return el("div", head, change, words, _intervals([before, after]))


_MARKS = {OutcomeKind.ROSE: "good", OutcomeKind.FELL: "bad", OutcomeKind.COLLAPSED: "bad"}
"""Marks of clear outcomes; the others are neither good nor bad."""


def _training(summary: Summary, kind: str) -> list[Html]:
    """Write the training signal, what the numbers say together, and what to try."""
    trend, outcome = summary.outcome.trend, summary.outcome
    lines = (
        []
        if trend is None
        else [el("p", f"{trend.name.capitalize()} {training_text(summary)}", class_="hint")]
    )
    lines += [el("p", sentence, class_=kind) for sentence in outcome.sentences]
    return [*lines, *(el("p", f"Next: {each.text}.", class_="hint") for each in outcome.advice)]


def _intervals(scores: list[EvaluationRecord]) -> Html:
    """Draw the intervals on one scale: 0 to 1, extended to the range of the rewards."""
    shown = [(score, score.interval or (score.value, score.value)) for score in scores]
    ends = [end for _, interval in shown for end in interval if not math.isnan(end)]
    least, most = min([0.0, *ends]), max([1.0, *ends])
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
