"""Summary: what came of a run in a dozen lines, worded no better than it was.

RunData ─ summarise ─> Summary ─ render_text ─> the end of `rillflow run`
                               └ as_json ─> summary.json
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rillflow.observe import layout
from rillflow.observe.json_lines import JSON
from rillflow.observe.reader import EvaluationRecord
from rillflow.observe.wording import duration
from rillflow.view.run_data import RunData, load
from rillflow.view.samples import read_samples

_FREE = ("--dir", "algorithm.steps=")
"""The option, and the setting, that the suggested commands choose themselves."""
_KEPT = ("--set", "--plan", "--cluster", "--lengths")
"""The options of a run that say what is computed, where, and what is expected of it."""
_ASKED = "policy"
"""The model that can be asked."""
_CHECKPOINT = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class Score:
    """The held-out rows at one step."""

    step: int
    """After which step."""
    accuracy: float
    """Share of rows that were solved."""
    correct: int
    """Rows that were solved."""
    count: int
    """Rows looked at."""
    interval: tuple[float, float] | None
    """95% interval of the accuracy."""
    mean_reward: float
    """Mean reward."""


@dataclass(frozen=True, kw_only=True)
class PhaseSteps:
    """One phase."""

    name: str
    """Its name."""
    steps: int
    """Steps made."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a run. Paths are None where there is nothing yet."""

    run: str
    """The run directory."""
    is_finished: bool
    """Whether its last step was made."""
    before: Score | None
    """The first look at the held-out rows."""
    after: Score | None
    """The last look; None when there was one look only."""
    phases: tuple[PhaseSteps, ...]
    """The phases that made steps."""
    seconds: float
    """Time of the whole run so far."""
    checkpoint: str | None
    """The newest checkpoint's model, a Hugging Face directory."""
    report: str | None
    """The report."""
    rollouts: str | None
    """The folder of rollouts."""
    num_rollout_files: int
    """Steps whose rollouts are kept."""
    command: tuple[str, ...]
    """What started the run."""
    example_prompt: str
    """A prompt of the run's own, to ask the result; empty when none was sampled."""
    steps_setting: int | None
    """The setting algorithm.steps, where the config has it."""

    def as_json(self) -> dict[str, JSON]:
        """For summary.json."""
        return asdict(self)


def summarise(run: Path) -> Summary:
    """Read a run directory and say what came of it.

    Raises:
        RunDirectoryError: it is not a run directory, or one of its files is damaged.
    """
    return summary_of(load(run))


def summary_of(data: RunData) -> Summary:
    """The summary of a run that was read already."""
    scores = [_score(evaluation) for evaluation in data.evaluations]
    files = layout.rollout_files(data.path)
    checkpoint = newest_model(data.path)
    report = data.path / layout.REPORT
    steps = data.setting("algorithm.steps")
    return Summary(
        run=str(data.path),
        is_finished=data.is_finished,
        before=scores[0] if scores else None,
        after=scores[-1] if len(scores) > 1 else None,
        phases=tuple(
            PhaseSteps(name=one.name, steps=one.last - one.first + 1, seconds=one.end_s - one.start_s)
            for one in data.phases
        ),
        seconds=data.phases[-1].end_s if data.phases else 0.0,
        checkpoint=None if checkpoint is None else str(checkpoint),
        report=str(report) if report.is_file() else None,
        rollouts=str(data.path / layout.ROLLOUTS) if files else None,
        num_rollout_files=len(files),
        command=_command(data),
        example_prompt=_example_prompt(data.path),
        steps_setting=steps if isinstance(steps, int) else None,
    )


def newest_model(run: Path) -> Path | None:
    """The model directory of the newest checkpoint, the policy's if it has one; None when there is none."""
    folder = run / layout.CHECKPOINTS
    found = (
        [entry for entry in folder.iterdir() if _CHECKPOINT.fullmatch(entry.name)] if folder.is_dir() else []
    )
    models = [file.parent for entry in found for file in entry.glob("*/config.json")]
    return max(models, key=_rank, default=None)


def _rank(model: Path) -> tuple[int, bool]:
    return int(model.parent.name.removeprefix("step-")), model.name == _ASKED


def verdict(before: Score, after: Score) -> str:
    """What the change means, in plain words: chance is called chance."""
    change = after.accuracy - before.accuracy
    if change == 0:
        return "It did not change."
    words = f"It {'rose' if change > 0 else 'fell'} by {abs(change):.3f}"
    if before.interval is None or after.interval is None:
        return f"{words}; no interval says how much of it may be chance."
    if after.interval[0] > before.interval[1] or after.interval[1] < before.interval[0]:
        return f"{words}; the intervals do not overlap."
    return f"{words}, but the intervals overlap: this may be chance."


def render_text(summary: Summary) -> str:
    """The summary as lines for a terminal."""
    blocks = [_accuracy_lines(summary), _place_lines(summary), _next_lines(summary)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def interval_text(interval: tuple[float, float] | None) -> str:
    """An interval in brackets; empty where there is none."""
    return "" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def _score(evaluation: EvaluationRecord) -> Score:
    return Score(
        step=evaluation.step,
        accuracy=evaluation.accuracy,
        correct=evaluation.correct,
        count=evaluation.count,
        interval=evaluation.interval,
        mean_reward=evaluation.mean_reward,
    )


def _accuracy_lines(summary: Summary) -> list[str]:
    before, after = summary.before, summary.after
    if before is None:
        return ["No accuracy: nothing was held out, or no evaluation was reached."]
    first = f"{before.accuracy:.3f} {interval_text(before.interval)}".rstrip()
    if after is None:
        return [
            f"Held-out accuracy  {first} after step {before.step}, seen once ({before.count:,} problems)",
            *_reward_line(before),
        ]
    last = f"{after.accuracy:.3f} {interval_text(after.interval)}".rstrip()
    return [
        f"Held-out accuracy  {first} -> {last}",
        f"                   steps {before.step} and {after.step}, {after.count:,} problems, 95% intervals. "
        f"{verdict(before, after)}",
        *_reward_line(before, after),
    ]


def _reward_line(*scores: Score) -> list[str]:
    """The mean reward, where it says more than the share of rows solved: graded rewards."""
    if all(abs(score.mean_reward - score.accuracy) < 1e-6 for score in scores):
        return []
    return [f"Held-out reward    {' -> '.join(f'{score.mean_reward:.3f}' for score in scores)} (mean)"]


def _place_lines(summary: Summary) -> list[str]:
    steps = (
        ", ".join(f"{one.name} {one.steps:,} in {duration(one.seconds)}" for one in summary.phases)
        or "none yet"
    )
    lines = [f"Steps              {steps}"]
    if summary.checkpoint:
        lines.append(f"Model              {summary.checkpoint}")
    if summary.report:
        lines.append(f"Report             {summary.report}")
    if summary.rollouts:
        lines.append(f"Rollouts           {summary.rollouts} ({summary.num_rollout_files:,} steps)")
    return lines


def _next_lines(summary: Summary) -> list[str]:
    if not summary.is_finished:
        return ["Next", f"  go on:           {shlex.join(summary.command) or 'the same command'}"]
    lines = ["Next"]
    if summary.checkpoint and Path(summary.checkpoint).name != _ASKED:
        lines.append(f"  score with it:   reward.model or cost.model = {summary.run!r} in another recipe")
    elif summary.checkpoint:
        prompt = " ".join(summary.example_prompt.split())[:80] or "your question"
        lines.append(f"  ask it:          rillflow ask {shlex.quote(summary.run)} {shlex.quote(prompt)}")
    if summary.report:
        lines.append(f"  look inside:     open {shlex.quote(summary.report)} in a browser")
    rose = summary.before and summary.after and _gain(summary.before, summary.after) > 0
    if summary.steps_setting is not None:
        elsewhere = shlex.quote(f"{summary.run}-longer")
        again = f"--set algorithm.steps={2 * summary.steps_setting} --dir {elsewhere}"
        lines.append(f"  train longer:    rillflow run {_recipe(summary.command)} {again}")
    if summary.after and not rose:
        slower = f"--set policy.lr=NUMBER --dir {shlex.quote(f'{summary.run}-lr')}"
        lines.append("  it did not rise: read the worst samples and the reward's outcomes in the report,")
        lines.append(
            f"                   then try another rate: rillflow run {_recipe(summary.command)} {slower}"
        )
    return lines


def _gain(before: Score, after: Score) -> float:
    """What was won: in rows solved, or in reward where that is graded and no row more was solved."""
    return after.accuracy - before.accuracy or after.mean_reward - before.mean_reward


def _command(data: RunData) -> tuple[str, ...]:
    """What was typed: the program by its name alone."""
    typed = data.starts[-1].get("command") if data.starts else None
    words = [word for word in typed if isinstance(word, str)] if isinstance(typed, list) else []
    return ("rillflow", *words[1:]) if words else ()


def _recipe(command: Sequence[str]) -> str:
    """The recipe with the options that are kept: ``run.toml --set policy.lr=1e-5 --plan plan.toml``."""
    recipe, given, words = "RECIPE", list[str](), iter(command[2:])
    for word in words:
        name, equals, value = word.partition("=")
        if name in (*_KEPT, *_FREE):
            value = value if equals else next(words, "")
            given += [name, value] if name in _KEPT and not value.startswith(_FREE) else []
        elif not word.startswith("-"):
            recipe = word
    return shlex.join([recipe, *given])


def _example_prompt(run: Path) -> str:
    read = read_samples(run)
    return read[-1][0].rollout.prompt if read else ""
