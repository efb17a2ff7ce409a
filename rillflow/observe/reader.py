"""Reading a run directory back, while it is written or years later.

    metrics.jsonl ─> MetricsRecord     spans.jsonl ─> SpanRecord
    evaluations.jsonl ─> EvaluationRecord     rollouts/step-N... ─> columns ─> RolloutRecord

A last line that is cut off is left out. Anything else that is not what it should be is an error that
names file, line and field. A field this version does not know is no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from rillflow.errors import RunDirectoryError
from rillflow.observe import layout
from rillflow.observe.fields import Fields
from rillflow.observe.json_lines import JSON, read_json, read_lines
from rillflow.observe.rollouts import RolloutRecord, prompt_text, read_columns, rollout_records
from rillflow.records.metrics import Histogram, LargestShare, Max, Mean, Metric, Min, Sum, Variance
from rillflow.records.row import RowId

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """One step's metrics."""

    step: int
    """The step, from 1 over all phases."""
    phase: str
    """The phase it belongs to."""
    time_s: float
    """When it ended, in seconds of the run."""
    metrics: Mapping[str, Metric]
    """The metrics by name, with their reductions."""


@dataclass(frozen=True, kw_only=True)
class RankSpan:
    """What one rank did of a stage; of rows that come in parts, one part of it."""

    rank: int
    """Which of the pool's."""
    start_s: float
    """When it began, in seconds of the run; its arguments were there by then."""
    duration_s: float
    """How long it took."""
    rows: int
    """Rows of its result, 0 when unknown."""
    tokens: int
    """Tokens of its result, 0 when unknown."""


@dataclass(frozen=True, kw_only=True)
class SpanRecord:
    """One stage of one step."""

    step: int
    """The step it belongs to."""
    stage: str
    """The stage's name, ``role.endpoint``."""
    start_s: float
    """When it began, in seconds of the run."""
    duration_s: float
    """How long it took."""
    rows: int
    """Rows it worked on, 0 when unknown."""
    tokens: int
    """Tokens it worked on, 0 when unknown."""
    pool: str = ""
    """The pool whose ranks worked, empty when unknown."""
    ranks: tuple[RankSpan, ...] = ()
    """The same rank by rank and part by part, in order of time; empty where an older version wrote."""
    after: tuple[str, ...] = ()
    """The stages of the step whose results it was given; empty where there are none, or none was written."""

    @classmethod
    def of_ranks(
        cls, ranks: Sequence[RankSpan], taken: int, *, step: int, stage: str, pool: str, after: Sequence[str]
    ) -> SpanRecord:
        """A stage from the first rank that began to the last that ended.

        Args:
            ranks: what each did.
            taken: the results of the first so many are the stage's; the others have copies.
            step, stage, pool, after: see the fields.
        """
        start_s = min(each.start_s for each in ranks)
        return cls(
            step=step,
            stage=stage,
            start_s=start_s,
            duration_s=max(each.start_s + each.duration_s for each in ranks) - start_s,
            rows=sum(each.rows for each in ranks[:taken]),
            tokens=sum(each.tokens for each in ranks[:taken]),
            pool=pool,
            ranks=tuple(sorted(ranks, key=lambda each: (each.start_s, each.rank))),
            after=tuple(after),
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out rows, or pairs of them, come out.

    Example:
        Evaluation(count=50, mean_reward=0.86, correct=43, interval=(0.74, 0.93))
    """

    count: int
    """Rows or pairs looked at."""
    mean_reward: float
    """Mean over the rows that have a score; of pairs the accuracy, for an order is right or wrong."""
    correct: int | None = None
    """Rows that are right: a reward of 1 where every reward is 0 or 1, else one of at least
    ``evaluate.success``, and None without that. Pairs in the right order: the chosen answer scores higher."""
    is_accuracy: bool = True
    """Whether right and wrong is all there is: every reward is 0 or 1, or an order of two."""
    interval: tuple[float, float] | None = None
    """95%: of the accuracy (Wilson), a row without a score counting as not right; else of the mean reward."""
    more: Mapping[str, JSON] = field(default_factory=dict)
    """What else was measured, by name: mean tokens of an answer, or mean margin of a pair."""
    set: str = ""
    """Which of the recipe's ``evaluate.sets`` was looked at; empty for the rows that were held out."""

    @property
    def text(self) -> str:
        """In a line. Example: ``held-out accuracy 0.860 [0.738, 0.930] (43 of 50)``."""
        of = f"{self.set}" if self.set else "held-out"
        ends = "" if self.interval is None else f" [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"
        if self.is_accuracy and self.correct is not None:
            right = self.correct / self.count
            return f"{of} accuracy {right:.3f}{ends} ({self.correct} of {self.count})"
        if math.isnan(self.mean_reward):
            return f"no reward for any of {self.count} {of} answers"
        share = "" if self.correct is None else f", {self.correct} of them right"
        return f"{of} mean reward {self.mean_reward:.3f}{ends} ({self.count} answers{share})"


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Evaluation):
    """One look at the held-out rows, as it was written; ``more`` is what else stands there."""

    step: int
    """The step after which it was made; 0 is before the first update."""

    @property
    def accuracy(self) -> float | None:
        """The share that was right, where that is all there is; NaN when no row was there."""
        if not self.is_accuracy or self.correct is None:
            return None
        return self.correct / self.count if self.count else float("nan")

    @property
    def value(self) -> float:
        """What a run is judged by: the accuracy, or else the mean reward."""
        return self.mean_reward if self.accuracy is None else self.accuracy

    @property
    def name(self) -> str:
        """What the value is called."""
        return "mean reward" if self.accuracy is None else "accuracy"


def read_config(run: Path) -> Mapping[str, JSON]:
    """The resolved config."""
    require_run(run)
    return read_json(run / layout.CONFIG)


def read_starts(run: Path) -> list[Mapping[str, JSON]]:
    """What each start of the run ran on, the first one first; none when the run never got that far."""
    require_run(run)
    file = run / layout.ENVIRONMENT
    starts = read_json(file).get("starts") if file.exists() else []
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise RunDirectoryError(f"{file} has no list of starts", why="it was written by something else")
    return cast(list[Mapping[str, JSON]], starts)


def read_metrics(run: Path) -> list[MetricsRecord]:
    """The metrics of every step, in the order they were written."""
    return _read(run / layout.METRICS, _metrics_record)


def read_spans(run: Path) -> list[SpanRecord]:
    """Every stage of every step, in the order they ended."""
    return _read(run / layout.SPANS, _span_record)


def read_evaluations(run: Path) -> list[EvaluationRecord]:
    """Every evaluation of held-out rows, in the order they were made."""
    return [each for each in read_every_evaluation(run) if not each.set]


def read_every_evaluation(run: Path) -> list[EvaluationRecord]:
    """Every evaluation, those of named sets too, in the order they were made."""
    return _read(run / layout.EVALUATIONS, _evaluation_record)


def best_checkpoint(run: Path) -> EvaluationRecord | None:
    """The evaluation of the highest mean reward whose checkpoint is kept; the first of equals."""
    kept = run / layout.CHECKPOINTS
    found = [each for each in read_evaluations(run) if (kept / f"step-{each.step:06d}").is_dir()]
    scored = [each for each in found if each.mean_reward == each.mean_reward]
    return max(scored, key=lambda each: each.mean_reward, default=None)


def best_step(run: Path) -> int:
    """The step of ``best_checkpoint``.

    Raises:
        RunDirectoryError: no checkpoint was judged.
    """
    best = best_checkpoint(run)
    if best is None:
        raise RunDirectoryError(
            f"{run} has no best checkpoint",
            why="none of those that are kept was judged by held-out rows",
            fix="leave --best out: the newest one answers",
        )
    return best.step


def read_rollouts(run: Path, step: int) -> list[RolloutRecord]:
    """The rollouts of one step.

    Raises:
        RunDirectoryError: the step has no file (the message names the steps that have), or a line is garbage.
    """
    files = _rollout_files(run, step)
    if files[0].suffix == ".jsonl":
        return _read(files[0], _rollout_record)
    return rollout_records(read_columns(files), _token_texts(run))


def rollout_columns(run: Path, step: int) -> dict[str, list[Any]]:
    """The rollouts of one step as columns, an entry a row; see the table of docs/design/run_directory.md.

    Raises:
        RunDirectoryError: see ``read_rollouts``.
    """
    files = _rollout_files(run, step)
    if files[0].suffix != ".jsonl":
        return read_columns(files)
    lines = [line.data for line in read_lines(files[0]).lines]
    names = dict.fromkeys(name for line in lines for name in line if name != "token_texts")
    return {name: [line.get(name) for line in lines] for name in names}


def first_prompt(run: Path, *, newest: bool = False) -> JSON:
    """The prompt, a text or chat messages, of the first row of the first step, or of the newest, that has
    rollouts; None where none has."""
    steps = list(layout.rollout_files(run))
    found = (rollout_columns(run, step)["prompt"] for step in (reversed(steps) if newest else steps))
    prompt: JSON = next((prompts[0] for prompts in found if prompts), None)
    return prompt


def _rollout_files(run: Path, step: int) -> tuple[Path, ...]:
    known = layout.rollout_files(run)
    if step in known:
        return known[step]
    steps = list(known)
    have = f"there are files of steps {steps[0]} to {steps[-1]}" if steps else "there are none at all"
    raise RunDirectoryError(f"{run} has no rollouts of step {step}", why=have)


def _token_texts(run: Path) -> Sequence[str]:
    """The text of every token; none where the run has no such file."""
    file = run / layout.TOKENS
    texts = read_json(file).get("texts") if file.exists() else []
    return cast(list[str], texts)


def require_run(run: Path) -> None:
    """Refuse a path that is no run directory.

    Raises:
        RunDirectoryError: it is missing, or another kind of directory.
    """
    if not run.is_dir():
        raise RunDirectoryError(f"there is no run directory {run}", why="the path is missing or is a file")
    if not layout.is_run_directory(run):
        raise RunDirectoryError(f"{run} is not a run directory", why=f"it has no {layout.LOCK}")


def _read(file: Path, make: Callable[[Fields], Record]) -> list[Record]:
    return [make(Fields(file, line)) for line in read_lines(file).lines]


def _metrics_record(fields: Fields) -> MetricsRecord:
    metrics = {name: _metric(fields, name, parts) for name, parts in fields.mapping("metrics").items()}
    return MetricsRecord(
        step=fields.integer("step"),
        phase=fields.text("phase"),
        time_s=fields.number("time_s"),
        metrics=metrics,
    )


def _metric(fields: Fields, name: str, parts: JSON) -> Metric:
    match parts:
        case {"mean": int() | float() | None as value, "count": int() | float() as count}:
            mean = fields.note(f"metrics.{name}.mean") if value is None else value
            return Mean(total=mean * count if count else 0.0, count=count)
        case {
            "variance": int() | float() | None as value,
            "about": int() | float() | None as about,
            "count": int() | float() as count,
        }:
            found = fields.note(f"metrics.{name}.variance") if value is None else value
            mean = fields.note(f"metrics.{name}.about") if about is None else about
            return Variance(squares=found * count if count else 0.0, mean=mean, count=count)
        case {"largest_share": int() | float() | None as value, "total": int() | float() | None as total}:
            share = fields.note(f"metrics.{name}.largest_share") if value is None else value
            over = fields.note(f"metrics.{name}.total") if total is None else total
            return LargestShare(most=share * over, total=over)
        case {"histogram": [*counts], "edges": [*edges]} if len(counts) == len(edges) + 1:
            return Histogram(edges=tuple(map(float, edges)), counts=tuple(map(int, counts)))
        case {"sum": int() | float() | None as value}:
            return Sum(value=fields.note(f"metrics.{name}.sum") if value is None else value)
        case {"max": int() | float() | None as value}:
            return Max(value=fields.note(f"metrics.{name}.max") if value is None else value)
        case {"min": int() | float() | None as value}:
            return Min(value=fields.note(f"metrics.{name}.min") if value is None else value)
    raise fields.refusal(
        f"metric {name!r} is {parts!r}",
        "it should be a mean or variance with its count, a largest share, a histogram, a sum, a max or a min",
    )


def _span_record(fields: Fields) -> SpanRecord:
    return SpanRecord(
        step=fields.integer("step"),
        stage=fields.text("stage"),
        start_s=fields.number("start_s"),
        duration_s=fields.number("duration_s"),
        rows=fields.integer("rows"),
        tokens=fields.integer("tokens"),
        pool=fields.text("pool") if fields.has("pool") else "",
        ranks=tuple(_rank_span(each) for each in fields.records("ranks")),
        after=fields.texts("after"),
    )


def _rank_span(fields: Fields) -> RankSpan:
    return RankSpan(
        rank=fields.integer("rank"),
        start_s=fields.number("start_s"),
        duration_s=fields.number("duration_s"),
        rows=fields.integer("rows"),
        tokens=fields.integer("tokens"),
    )


def _evaluation_record(fields: Fields) -> EvaluationRecord:
    interval = fields.numbers("interval") if fields.has("interval") else ()
    if len(interval) not in (0, 2):
        raise fields.refusal(f"interval has {len(interval)} ends", "an interval is a low and a high end")
    return EvaluationRecord(
        step=fields.integer("step"),
        correct=fields.integer("correct") if fields.has("correct") else None,
        count=fields.integer("count"),
        mean_reward=fields.number("mean_reward"),
        is_accuracy=not fields.has("measure") or fields.text("measure") == "accuracy",
        interval=(interval[0], interval[1]) if interval else None,
        set=fields.text("set") if fields.has("set") else "",
        more=fields.others("step", "set", "measure", "correct", "count", "mean_reward", "interval", "notes"),
    )


def _rollout_record(fields: Fields) -> RolloutRecord:
    record = RolloutRecord(
        row=RowId(fields.integer("epoch"), fields.integer("prompt_id"), fields.integer("sample")),
        prompt=prompt_text(fields.value("prompt")),
        completion=fields.text("completion") if fields.has("completion") else "",
        tokens=fields.integers("tokens"),
        token_texts=fields.texts("token_texts"),
        logprobs=fields.numbers("logprobs"),
        versions=fields.integers("versions"),
        finish=fields.text("finish"),
        reward=fields.number("reward") if fields.has("reward") else None,
        outcome=fields.text("outcome") if fields.has("outcome") else "",
        message=fields.text("message") if fields.has("message") else "",
        penalised_reward=fields.number("penalised_reward") if fields.has("penalised_reward") else None,
        advantage=fields.number("advantage") if fields.has("advantage") else None,
        columns=fields.mapping("columns") if fields.has("columns") else {},
        parts=fields.mapping("parts") if fields.has("parts") else {},
    )
    for name, values in (("logprobs", record.logprobs), ("versions", record.versions)):
        if len(values) != len(record.tokens):
            raise fields.refusal(
                f"{len(values)} {name} of {len(record.tokens)} tokens", "every token has one"
            )
    return record
