"""Summary: the result of a run in a dozen lines, without overstating it.

RunData ─ summarise ─> Summary ─ render_text ─> the end of `rillflow run`
                               └ as_json ─> summary.json
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from rillflow.runs import layout, sampler_gap, uniform_rewards
from rillflow.runs.episodes import EpisodeFacts, episode_facts
from rillflow.runs.formatting import duration
from rillflow.runs.json_lines import JSON
from rillflow.runs.layout import kept_steps
from rillflow.runs.outcome import LENGTH, OutcomeKind, RunOutcome, judge
from rillflow.runs.reader import EvaluationRecord, best_checkpoint, first_prompt
from rillflow.runs.run_data import RunData, load
from rillflow.runs.sampler_gap import gap_warning, mismatch_warning
from rillflow.runs.uniform_rewards import streaks

NO_SUGGESTIONS: Mapping[str, str] = MappingProxyType({})
"""No suggested commands."""
_FREE = ("--dir", "algorithm.steps=")
"""Option and setting that the suggested commands set themselves."""
_KEPT = ("--set", "--plan", "--cluster", "--lengths")
"""Options of a run that the suggested commands repeat: settings, placement, and expected lengths."""
_ASKED = "policy"
"""Role whose model ``rillflow ask`` can use."""
_MODEL_FILES = ("config.json", "adapter_config.json")
"""Config file of a model directory: a full model or an adapter."""
_TYPED = 1000
"""Largest number of characters of a question in a suggested command."""


@dataclass(frozen=True, kw_only=True)
class PhaseSteps:
    """Completed steps of one phase."""

    name: str
    """Name of the phase."""
    steps: int
    """Number of completed steps."""
    seconds: float
    """Seconds that the phase took."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of a run. Paths are None as long as the file or folder does not exist."""

    run: str
    """The run directory."""
    is_finished: bool
    """Whether the run completed its last step."""
    before: EvaluationRecord | None
    """First evaluation on the held-out rows."""
    after: EvaluationRecord | None
    """Last evaluation; None if there was only one."""
    phases: tuple[PhaseSteps, ...]
    """Phases with completed steps."""
    seconds: float
    """Seconds of the whole run so far."""
    checkpoint: str | None
    """Model of the newest checkpoint, a Hugging Face directory; without a language model, the checkpoint."""
    report: str | None
    """Path of the report."""
    rollouts: str | None
    """Folder of the rollouts."""
    num_rollout_files: int
    """Number of steps with recorded rollouts."""
    command: tuple[str, ...]
    """Command that started the run."""
    question: tuple[str, ...]
    """Command-line words that ask the model one of the run's prompts; empty if they cannot hold the prompt.
    """
    steps_setting: int | None
    """The setting algorithm.steps, if the config has it."""
    success: float | None
    """The setting evaluate.success: the reward of a correct answer when rewards are graded."""
    warnings: tuple[str, ...]
    """Warnings for the reader."""
    changes: tuple[str, ...]
    """Settings that later starts changed, and the first step with the change."""
    best: str | None
    """Model of the checkpoint with the highest held-out score; None if it is the newest."""
    has_agent: bool
    """Whether an agent wrote the rows; ``rillflow ask`` queries the model without the agent."""
    has_environment: bool
    """Whether the rows have turns of an environment, without which ``rillflow ask`` queries the model."""
    kind: str = ""
    """Kind of the recipe; empty for a language model."""
    outcome: RunOutcome
    """What the held-out scores and the training signal say."""
    sampling: str = ""
    """How held-out answers are chosen: ``greedy``, or at which temperature; empty if nothing is sampled."""
    trained_sampling: str = ""
    """The same of the answers that training scores."""
    episodes: EpisodeFacts | None = None
    """Environment steps, their rate and the best return; None without an environment's steps."""

    def as_json(self) -> dict[str, JSON]:
        """Return the content of summary.json."""
        scores = {"before": _score_json(self.before), "after": _score_json(self.after)}
        episodes = self.episodes and {**asdict(self.episodes), "best": _score_json(self.episodes.best)}
        return {**asdict(self), **scores, "episodes": episodes}


def _score_json(score: EvaluationRecord | None) -> JSON:
    if score is None:
        return None
    known = {"step": score.step, "accuracy": score.accuracy, "correct": score.correct, "count": score.count}
    return {**known, "interval": score.interval, "mean_reward": score.mean_reward}


def summarise(run: Path) -> Summary:
    """Read a run directory and return its summary.

    Raises:
        RunDirectoryError: it is not a run directory, or one of its files is damaged.
    """
    return summary_of(load(run))


def summary_of(data: RunData) -> Summary:
    """Return the summary of a run that was already read."""
    scores, success = scores_of(data), data.setting("evaluate.success")
    outcome = judge(data, scores)
    kind = data.setting("kind")
    files = data.rollouts
    checkpoint = newest_model(data.path) if kind is None else newest_checkpoint(data.path)
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
        question=_question(data.path),
        steps_setting=steps if isinstance(steps, int) else None,
        success=success if isinstance(success, float) else None,
        warnings=(*outcome.warnings, *warnings_of(data)),
        changes=tuple(data.changes),
        best=_best(data.path, checkpoint),
        has_agent=isinstance(data.setting("rollout.agent.function"), str),
        has_environment=isinstance(data.setting("rollout.environment.source"), str),
        kind=kind if isinstance(kind, str) else "",
        outcome=outcome,
        sampling=_sampling(data, "evaluate.temperature"),
        trained_sampling=_sampling(data, "rollout.temperature"),
        episodes=episode_facts(data),
    )


def _sampling(data: RunData, setting: str) -> str:
    """Return how answers are chosen at this temperature; empty if the run samples none."""
    temperature = data.setting(setting)
    if not isinstance(temperature, int | float) or LENGTH not in data.curves.names:
        return ""
    return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"


def scores_of(data: RunData) -> list[EvaluationRecord]:
    """Return all evaluations on the held-out rows, made comparable by ``alike``."""
    return alike(data.evaluations)


def alike(evaluations: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """Return the evaluations as one kind: accuracies only if every evaluation is an accuracy."""
    graded = not all(found.is_accuracy for found in evaluations)
    return [replace(found, is_accuracy=not graded) for found in evaluations]


def warnings_of(data: RunData) -> tuple[str, ...]:
    """Return the longest run of steps without a training signal for each reason, the first steps of a phase
    with a distant sampler or with a mismatch, and missing rollouts.
    """
    curves = data.curves
    lessons = streaks(curves.records((uniform_rewards.SHARE, uniform_rewards.LOW, uniform_rewards.HIGH)))
    longest = {one.why: one.text for one in sorted(lessons, key=lambda one: one.last - one.first)}
    phases = dict.fromkeys(name for name, _ in curves.phases)
    gaps = [gap_warning(curves.records([sampler_gap.KL], name)) for name in phases]
    first = (sampler_gap.MEAN_GAP, sampler_gap.LARGEST_GAP, sampler_gap.ROW_GAP)
    gaps += [mismatch_warning(curves.records(first, name)) for name in phases]
    return (*longest.values(), *filter(None, gaps), *_gone(data))


def _gone(data: RunData) -> list[str]:
    """Return a warning that names steps that sampled rows but whose rollout file is missing."""
    there = data.rollouts
    every = data.setting("run.rollouts_every")
    due = data.curves.curve("rollout/length/mean").x.astype(int).tolist()
    if isinstance(every, int):
        due = [step for step in due if every and step % every == 0]
    gone = [step for step in due if step not in there]
    few = ", ".join(map(str, gone[:5])) + (" ..." if len(gone) > 5 else "")
    return [f"the rollout files of {len(gone):,} steps are missing: {few}"] if gone else []


def _best(run: Path, newest: Path | None) -> str | None:
    best = best_checkpoint(run)
    if best is None or newest is None or f"step-{best.step:06d}" in newest.parts[-2:]:
        return None
    folder = run / layout.CHECKPOINTS / f"step-{best.step:06d}"
    return str(folder if newest.parent == folder.parent else folder / newest.name)


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest checkpoint; None without one."""
    folder = run / layout.CHECKPOINTS
    return next(iter(layout.checkpoint_folders(folder)), None) if folder.is_dir() else None


def newest_model(run: Path) -> Path | None:
    """Return the model directory of the newest checkpoint, preferably the policy's; None without one."""
    folder = run / layout.CHECKPOINTS
    for step in reversed(kept_steps(folder) if folder.is_dir() else []):
        files = folder.glob(f"step-{step:06d}/*/*config.json")
        if models := [file.parent for file in files if file.name in _MODEL_FILES]:
            return max(models, key=lambda model: model.name == _ASKED)
    return None


def verdict(before: EvaluationRecord, after: EvaluationRecord) -> str:
    """Describe a change in plain words; overlapping intervals are called possible chance."""
    change = after.value - before.value
    if math.isnan(change):
        return "One of the two evaluations has no reward."
    if change == 0:
        return "It did not change."
    words = f"It {'rose' if change > 0 else 'fell'} by {abs(change):.3f}"
    if before.interval is None or after.interval is None:
        return f"{words}; without both intervals, this may be chance."
    if after.interval[0] > before.interval[1] or after.interval[1] < before.interval[0]:
        return f"{words}; the intervals do not overlap."
    return f"{words}, but the intervals overlap: this may be chance."


def render_text(summary: Summary, suggested: Mapping[str, str] = NO_SUGGESTIONS) -> str:
    """Return the summary as lines for a terminal.

    Args:
        summary: the summary.
        suggested: further commands to suggest for a finished run, by their purpose.
    """
    blocks = [_score_lines(summary), _place_lines(summary), _next_lines(summary, suggested)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def interval_text(interval: tuple[float, float] | None) -> str:
    """Format an interval in brackets; empty without one."""
    return "" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def _score_lines(summary: Summary) -> list[str]:
    before, after = summary.before, summary.after
    if before is None:
        none = "Nothing was evaluated: no rows are held out, or the run reached no evaluation."
        return [none, *_training_lines(summary)]
    title = f"{before.title:<17}  "
    first = f"{before.value:.3f} {interval_text(before.interval)}".rstrip()
    how = f", {summary.sampling}" if summary.sampling else ""
    if after is None:
        seen = f"{title}{first} after step {before.step}, evaluated once ({before.rows}{how})"
        return [seen, *_more_lines(summary, before), *_training_lines(summary)]
    last = f"{after.value:.3f} {interval_text(after.interval)}".rstrip()
    return [
        f"{title}{first} -> {last}",
        f"                   steps {before.step} and {after.step}, {after.rows}{how}, 95% intervals. "
        f"{verdict(before, after)}",
        *_more_lines(summary, before, after),
        *_training_lines(summary),
    ]


def training_text(summary: Summary) -> str:
    """Return the training signal of the first and last steps; empty without one.

    Example: ``Training reward    0.314 -> 0.967 (means of the first and last 6 of 60 steps)``.
    """
    trend = summary.outcome.trend
    if trend is None:
        return ""
    how = f", {summary.trained_sampling}" if summary.trained_sampling else ""
    steps = "step" if trend.window == 1 else f"{trend.window} steps"
    means = f"first and last {steps} of {trend.steps:,}"
    if trend.largest is not None and trend.largest.first < trend.start + trend.window - 1:
        means = f"steps before the loss, and of the last {steps} of {trend.steps:,}"
    return f"{trend.first:.3f} -> {trend.last:.3f} (means of the {means}{how})"


def _training_lines(summary: Summary) -> list[str]:
    trend, told = summary.outcome.trend, training_text(summary)
    lines = [f"{trend.name.capitalize():<17}  {told}"] if trend is not None else []
    return [*lines, *(f"                   {sentence}" for sentence in summary.outcome.sentences)]


def _more_lines(summary: Summary, *scores: EvaluationRecord) -> list[str]:
    """Return the mean reward if it differs from the accuracy, or the share of sufficient rewards."""
    if all(score.accuracy is None for score in scores):
        shares = [score.correct / score.count for score in scores if score.correct is not None]
        if summary.success is None or len(shares) < len(scores):
            return []
        what, rows = ("Return", "episodes") if scores[0].is_return else ("Reward", "answers")
        return [f"{what} >= {summary.success:<8g} {_arrows(shares)} (share of the {rows})"]
    if all(abs(score.mean_reward - score.value) < 1e-6 for score in scores):
        return []
    return [f"Held-out reward    {_arrows([score.mean_reward for score in scores])} (mean)"]


def _arrows(values: Sequence[float]) -> str:
    return " -> ".join(f"{value:.3f}" for value in values)


def _place_lines(summary: Summary) -> list[str]:
    steps = (
        ", ".join(f"{one.name} {one.steps:,} in {duration(one.seconds)}" for one in summary.phases)
        or "none yet"
    )
    lines = [f"Steps              {steps}"]
    if summary.episodes is not None:
        lines.append(f"Environment steps  {summary.episodes.steps_text}")
        lines += [f"Best return        {text}"] if (text := summary.episodes.best_text) else []
    lines += [f"Warning            {warning}" for warning in summary.warnings]
    model, best = ("Checkpoint", "Best checkpoint") if summary.kind else ("Model", "Best held out")
    places = {model: summary.checkpoint, best: summary.best, "Report": summary.report}
    lines += [f"{what:<18} {place}" for what, place in places.items() if place]
    if summary.rollouts:
        lines.append(f"Rollouts           {summary.rollouts} ({summary.num_rollout_files:,} steps)")
    lines += [f"Changed            {change}" for change in summary.changes]
    return lines


def _next_lines(summary: Summary, suggested: Mapping[str, str]) -> list[str]:
    if not summary.is_finished:
        return ["Next", f"  resume:          {shlex.join(summary.command) or 'launch the same recipe'}"]
    lines = ["Next"]
    if summary.checkpoint and not summary.kind:
        lines += _model_lines(summary, Path(summary.checkpoint).name)
    if summary.report:
        lines.append(f"  look inside:     open {shlex.quote(summary.report)} in a browser")
    lines += [f"  {f'{purpose}:':<16} {command}" for purpose, command in suggested.items()]
    if summary.steps_setting is not None:
        more = [f"algorithm.steps={2 * summary.steps_setting}"]
        lines.append(f"  train longer:    {_again(summary, more, summary.run)}")
    lines += _advice(summary)
    return lines


def _model_lines(summary: Summary, role: str) -> list[str]:
    """Return what can be done with the model of the newest checkpoint."""
    lines = []
    if role != _ASKED:
        setting = "reward.judge.model" if role == "judge" else "reward.model or cost.model"
        lines.append(f"  score with it:   {setting} = {summary.run!r} in another recipe")
    elif not (summary.has_agent or summary.has_environment):
        lines.append(f"  ask it:          {shlex.join(['rillflow', 'ask', summary.run, *summary.question])}")
    if summary.has_agent:
        served = shlex.join(["rillflow", "serve", summary.run])
        lines.append(f"  serve it:        {served}, and point the agent at the address that it prints")
    return lines


_OPENINGS = {
    OutcomeKind.COLLAPSED: "it collapsed",
    OutcomeKind.FELL: "it fell",
    OutcomeKind.CHANCE: "no clear change",
    OutcomeKind.NO_SIGNAL: "nothing to learn",
}
"""Heading of the advice by the kind of the outcome."""


def _advice(summary: Summary) -> list[str]:
    """Return what to try, with a direction and a number where a setting is the cause."""
    lines = list[str]()
    for each in summary.outcome.advice:
        opening = _OPENINGS.get(summary.outcome.kind, "a steadier start")
        lines.append(f"  {opening + ':':<16} {each.text}")
        if each.settings:
            lines.append(f"{'':19}{_again(summary, each.settings, f'{summary.run}-lr')}")
    return lines


def _command(data: RunData) -> tuple[str, ...]:
    """Return the typed command, ``rillflow ...`` or ``python FILE ...``.

    Empty if a program started the run.
    """
    typed = data.starts[-1].get("command") if data.starts else None
    words = [word for word in typed if isinstance(word, str)] if isinstance(typed, list) else []
    return tuple(words) if words[:1] == ["python"] else ("rillflow", *words[1:]) if words else ()


def _again(summary: Summary, settings: Sequence[str], folder: str) -> str:
    """Return a command that runs the recipe again with other settings and another folder."""
    if not summary.command:
        return f"launch the recipe with {', '.join(settings)}, run.dir={folder}"
    program = summary.command[: 2 if summary.command[0] == "python" else 1]
    recipe = _recipe(summary.command[len(program) + 1 :])
    changed = " ".join(f"--set {setting}" for setting in settings)
    return f"{shlex.join(program)} run {recipe} {changed} --dir {shlex.quote(folder)}"


def _recipe(typed: Sequence[str]) -> str:
    """Return the recipe and its kept options. Example: ``run.toml --set policy.lr=1e-5 --plan plan.toml``."""
    recipe, given, words = "RECIPE", list[str](), iter(typed)
    for word in words:
        name, equals, value = word.partition("=")
        if name in (*_KEPT, *_FREE):
            value = value if equals else next(words, "")
            given += [name, value] if name in _KEPT and not value.startswith(_FREE) else []
        elif not word.startswith("-"):
            recipe = word
    return shlex.join([recipe, *given])


def _question(run: Path) -> tuple[str, ...]:
    """Return arguments for ``ask`` from the last step's first prompt: a text, or a system and a user
    message.
    """
    prompt = first_prompt(run, newest=True)
    match prompt:
        case [{"role": "system", "content": str() as system, **more}, *rest] if not more:
            words, prompt = [f"--system={system}"] if system[:1] == "-" else ["--system", system], rest
        case _:
            words = []
    match prompt:
        case str() as text:
            pass
        case [{"role": "user", "content": str() as text, **more}] if not more:
            pass
        case _:
            return ()
    words += ["--", text] if text[:1] == "-" else [text]
    return tuple(words) if text and _can_type("".join(words)) else ()


def _can_type(text: str) -> bool:
    """Return whether a suggested command can hold a text: short enough and printable."""
    return len(text) <= _TYPED and text.replace("\n", "").isprintable()
