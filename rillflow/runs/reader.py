"""Read a run directory, during the run or later.

    metrics.jsonl ─> MetricsRecord     spans.jsonl ─> SpanRecord
    evaluations.jsonl ─> EvaluationRecord     rollouts/step-N... ─> columns ─> RolloutRecord

A cut-off last line is skipped. Any other invalid content raises an error that names file, line and field.
Unknown fields are not an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Histogram, LargestShare, Max, Mean, Metric, Min, Sum, Variance
from rillflow.records.row import RowId
from rillflow.runs import layout
from rillflow.runs.json_lines import JSON, Line, decode, read_json, read_lines
from rillflow.runs.old_settings import present
from rillflow.runs.rollouts import RolloutRecord, prompt_text, read_columns, rollout_records

RETURN = "mean_return"
"""Measure of an evaluation by episodes."""


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """Metrics of one step."""

    step: int
    """Step, from 1 over all phases."""
    phase: str
    """Phase of the step."""
    time_s: float
    """End of the step, in seconds of the run."""
    metrics: Mapping[str, Metric]
    """Metrics by name, with their reductions."""


class _Timed:
    """Start and duration."""

    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """End, in seconds of the run."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True)
class RankSpan(_Timed):
    """Work of one rank on a stage, or on one part of it for rows that arrive in parts."""

    rank: int
    """Rank within the pool."""
    start_s: float
    """Start, in seconds of the run; the arguments had arrived by then."""
    duration_s: float
    """Duration in seconds."""
    rows: int
    """Rows of the result; 0 when unknown."""
    tokens: int
    """Tokens of the result; 0 when unknown."""


@dataclass(frozen=True, kw_only=True)
class SpanRecord(_Timed):
    """One stage of one step."""

    step: int
    """Step of the stage."""
    stage: str
    """Name of the stage, ``role.endpoint``."""
    start_s: float
    """Start, in seconds of the run."""
    duration_s: float
    """Duration in seconds."""
    rows: int
    """Processed rows; 0 when unknown."""
    tokens: int
    """Processed tokens; 0 when unknown."""
    pool: str = ""
    """Pool whose ranks worked; empty when unknown."""
    ranks: tuple[RankSpan, ...] = ()
    """Spans by rank and part, in order of time; empty in files of older versions."""
    after: tuple[str, ...] = ()
    """Stages of the same step whose results were its inputs; empty without any, or if not recorded."""

    @classmethod
    def of_ranks(
        cls, ranks: Sequence[RankSpan], taken: int, *, step: int, stage: str, pool: str, after: Sequence[str]
    ) -> SpanRecord:
        """Return the span of a stage, from the start of its first rank to the end of its last.

        Args:
            ranks: spans of the ranks.
            taken: number of leading ranks whose results count; the other ranks hold copies.
            step, stage, pool, after: see the fields.
        """
        start_s = min(each.start_s for each in ranks)
        return cls(
            step=step,
            stage=stage,
            start_s=start_s,
            duration_s=max(each.end_s for each in ranks) - start_s,
            rows=sum(each.rows for each in ranks[:taken]),
            tokens=sum(each.tokens for each in ranks[:taken]),
            pool=pool,
            ranks=tuple(sorted(ranks, key=lambda each: (each.start_s, each.rank))),
            after=tuple(after),
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation on held-out rows or pairs.

    Example:
        Evaluation(count=50, mean_reward=0.86, correct=43, interval=(0.74, 0.93))
    """

    count: int
    """Number of evaluated rows or pairs."""
    mean_reward: float
    """Mean over the scored rows; for pairs, the accuracy."""
    correct: int | None = None
    """Number of correct rows. A row is correct with reward 1 if every reward is 0 or 1, else with a reward of
    at least ``evaluate.success``; None if that is not set. A pair is correct if the chosen answer scores
    higher.
    """
    is_accuracy: bool = True
    """Whether results are only right or wrong: every reward is 0 or 1, or rows are pairs."""
    interval: tuple[float, float] | None = None
    """95% interval of the accuracy (Wilson; rows without a score are not correct), else of the mean reward.
    """
    more: Mapping[str, JSON] = field(default_factory=dict)
    """Other measurements by name, such as mean tokens of an answer or mean margin of a pair."""
    is_return: bool = False
    """Whether a reward is the return of a whole episode in an environment, and rows are episodes."""
    set: str = ""
    """Name of the evaluated set in ``evaluate.sets``; empty for the held-out rows."""

    @property
    def text(self) -> str:
        """Evaluation in one line. Example: ``held-out accuracy 0.860 [0.738, 0.930] (43 of 50)``."""
        if self.is_return:
            share = "" if self.correct is None else f", {self.correct} of them successful"
            return f"mean return {self.mean_reward:.5g}{self._ends} ({self.count} episodes{share})"
        of = f"{self.set}" if self.set else "held-out"
        ends = self._ends
        if self.is_accuracy and self.correct is not None:
            right = self.correct / self.count
            return f"{of} accuracy {right:.3f}{ends} ({self.correct} of {self.count})"
        if math.isnan(self.mean_reward):
            return f"no reward for any of {self.count} {of} answers"
        share = "" if self.correct is None else f", {self.correct} of them right"
        return f"{of} mean reward {self.mean_reward:.3f}{ends} ({self.count} answers{share})"

    @property
    def _ends(self) -> str:
        """The interval in brackets after a space; empty without one."""
        return "" if self.interval is None else f" [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Evaluation):
    """One recorded evaluation; ``more`` holds the other fields of its line."""

    step: int
    """Step after which the evaluation was made; 0 is before the first update."""

    @property
    def accuracy(self) -> float | None:
        """Share of correct rows; None if rewards are graded, NaN without rows."""
        if not self.is_accuracy or self.correct is None:
            return None
        return self.correct / self.count if self.count else float("nan")

    @property
    def title(self) -> str:
        """Heading of the value. Example: ``Held-out accuracy``."""
        return self.name.capitalize() if self.is_return else f"Held-out {self.name}"

    @property
    def rows(self) -> str:
        """The evaluated rows, counted. Example: ``500 problems``."""
        return f"{self.count:,} {'episodes' if self.is_return else 'problems'}"

    @property
    def value(self) -> float:
        """Value that judges a run: the accuracy if there is one, otherwise the mean reward."""
        return self.mean_reward if self.accuracy is None else self.accuracy

    @property
    def name(self) -> str:
        """Name of the value."""
        if self.is_return:
            return "mean return"
        return "mean reward" if self.accuracy is None else "accuracy"


def read_config(run: Path) -> Mapping[str, JSON]:
    """Read the resolved config."""
    require_run(run)
    return present(read_json(run / layout.CONFIG))


def read_starts(run: Path) -> list[Mapping[str, JSON]]:
    """Read the environment of each start of the run in order; empty before the first start was recorded."""
    require_run(run)
    file = run / layout.ENVIRONMENT
    starts = read_json(file).get("starts") if file.exists() else []
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise RunDirectoryError(f"{file} has no list of starts", why="Rillflow did not write this file")
    return cast(list[Mapping[str, JSON]], starts)


def read_metrics(run: Path) -> list[MetricsRecord]:
    """Read the metrics of every step, in writing order."""
    return [_metrics_record(line) for line in read_lines(run / layout.METRICS).lines]


def read_spans(run: Path) -> list[SpanRecord]:
    """Read every stage of every step, in the order the stages ended."""
    return [decode(SpanRecord, line) for line in read_lines(run / layout.SPANS).lines]


def read_evaluations(run: Path) -> list[EvaluationRecord]:
    """Read every evaluation on held-out rows, in order."""
    return [each for each in read_every_evaluation(run) if not each.set]


def read_every_evaluation(run: Path) -> list[EvaluationRecord]:
    """Read every evaluation, including those on named sets, in order."""
    return [_evaluation_record(line) for line in read_lines(run / layout.EVALUATIONS).lines]


def best_checkpoint(run: Path) -> EvaluationRecord | None:
    """Return the evaluation with the highest mean reward whose checkpoint is kept; the first among equals."""
    kept = run / layout.CHECKPOINTS
    found = [each for each in read_evaluations(run) if (kept / f"step-{each.step:06d}").is_dir()]
    scored = [each for each in found if each.mean_reward == each.mean_reward]
    return max(scored, key=lambda each: each.mean_reward, default=None)


def best_step(run: Path) -> int:
    """Return the step of ``best_checkpoint``.

    Raises:
        RunDirectoryError: no kept checkpoint was evaluated.
    """
    best = best_checkpoint(run)
    if best is None:
        raise RunDirectoryError(
            f"{run} has no best checkpoint",
            why="none of the kept checkpoints was evaluated on held-out rows",
            fix="omit --best to use the newest checkpoint",
        )
    return best.step


def read_rollouts(run: Path, step: int) -> list[RolloutRecord]:
    """Read the rollouts of one step.

    Raises:
        RunDirectoryError: the step has no file (the message names those with files), or a line is invalid.
    """
    files = _rollout_files(run, step)
    if files[0].suffix == ".jsonl":
        return [_rollout_record(line) for line in read_lines(files[0]).lines]
    return rollout_records(read_columns(files), _token_texts(run))


def rollout_columns(run: Path, step: int) -> dict[str, list[Any]]:
    """Read the rollouts of one step as columns, one entry per row; see docs/design/run_directory.md.

    Raises:
        RunDirectoryError: see ``read_rollouts``.
    """
    files = _rollout_files(run, step)
    if files[0].suffix != ".jsonl":
        return read_columns(files)
    lines = [_known(line) for line in read_lines(files[0]).lines]
    names = dict.fromkeys(name for line in lines for name in line if name != "token_texts")
    return {name: [line.get(name) for line in lines] for name in names}


def first_prompt(run: Path, *, newest: bool = False) -> JSON:
    """Return the first row's prompt, a text or chat messages, from the first or newest step with rollouts.

    Return None if no step has rollouts.
    """
    steps = list(layout.rollout_files(run))
    found = (rollout_columns(run, step)["prompt"] for step in (reversed(steps) if newest else steps))
    prompt: JSON = next((prompts[0] for prompts in found if prompts), None)
    return prompt


def _rollout_files(run: Path, step: int) -> tuple[Path, ...]:
    files = layout.files_of_step(run, step)
    if files:
        return files
    steps = list(layout.rollout_files(run))
    have = f"it has rollouts of steps {steps[0]} to {steps[-1]}" if steps else "it has no rollouts"
    raise RunDirectoryError(f"{run} has no rollouts of step {step}", why=have)


def _token_texts(run: Path) -> Sequence[str]:
    """Return the text of every token; empty if the run has no tokens.json."""
    file = run / layout.TOKENS
    texts = read_json(file).get("texts") if file.exists() else []
    return cast(list[str], texts)


def require_run(run: Path) -> None:
    """Raise an error for a path that is not a run directory.

    Raises:
        RunDirectoryError: the path is missing, or is another kind of directory.
    """
    if not run.is_dir():
        raise RunDirectoryError(f"there is no run directory {run}", why="the path is missing or is a file")
    if not layout.is_run_directory(run):
        raise RunDirectoryError(f"{run} is not a run directory", why=f"it has no {layout.LOCK}")


def _metrics_record(line: Line) -> MetricsRecord:
    found = line.data.get("metrics")
    if not isinstance(found, dict):
        raise line.refusal("field 'metrics' is missing or no object", "a step has its metrics by name")
    metrics = {name: _metric(line, name, parts) for name, parts in found.items()}
    return decode(MetricsRecord, line, metrics=metrics)


def _metric(line: Line, name: str, parts: JSON) -> Metric:
    numbers = parts.items() if isinstance(parts, dict) else ()
    match {key: math.nan if number is None else number for key, number in numbers}:
        case {"mean": int() | float() as value, "count": int() | float() as count}:
            return Mean(total=value * count if count else 0.0, count=count)
        case {
            "variance": int() | float() as value,
            "about": int() | float() as mean,
            "count": int() | float() as count,
        }:
            return Variance(squares=value * count if count else 0.0, mean=mean, count=count)
        case {"largest_share": int() | float() as value, "total": int() | float() as total}:
            return LargestShare(most=value * total, total=total)
        case {"histogram": [*counts], "edges": [*edges]} if len(counts) == len(edges) + 1:
            return Histogram(edges=tuple(map(float, edges)), counts=tuple(map(int, counts)))
        case {"sum": int() | float() as value}:
            return Sum(value=value)
        case {"max": int() | float() as value}:
            return Max(value=value)
        case {"min": int() | float() as value}:
            return Min(value=value)
    raise line.refusal(
        f"metric {name!r} is {parts!r}",
        "it should be a mean or variance with its count, a largest share, a histogram, a sum, a max or a min",
    )


def _evaluation_record(line: Line) -> EvaluationRecord:
    ends = line.data.get("interval") or ()
    if isinstance(ends, list) and len(ends) != 2:
        raise line.refusal(f"interval has {len(ends)} ends", "an interval has a low and a high end")
    known = ("step", "set", "measure", "correct", "count", "mean_reward", "interval")
    return decode(
        EvaluationRecord,
        line,
        is_accuracy=line.data.get("measure") in (None, "accuracy"),
        is_return=line.data.get("measure") == RETURN,
        more={name: value for name, value in line.data.items() if name not in known},
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Row of a rollout in the JSON lines of older versions."""

    epoch: int
    prompt_id: int
    sample: int


def _known(line: Line) -> Mapping[str, JSON]:
    """Return the fields of a row; a NaN, such as a missing reward, is None."""
    return {name: None if value != value else value for name, value in line.data.items()}


def _rollout_record(line: Line) -> RolloutRecord:
    data, ids = _known(line), decode(_Row, line)
    row = RowId(ids.epoch, ids.prompt_id, ids.sample)
    record = decode(RolloutRecord, line, data, row=row, prompt=prompt_text(data.get("prompt")))
    for name, values in (("logprobs", record.logprobs), ("versions", record.versions)):
        if len(values) != len(record.tokens):
            raise line.refusal(f"{len(values)} {name} for {len(record.tokens)} tokens", "every token has one")
    return record
