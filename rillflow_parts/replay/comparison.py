"""StepComparison: find the first value in which a step of one run differs from the same step of another.

    sampled tokens ─> scores ─> advantages ─> skipped updates ─> metrics ─> evaluations ─> Difference
        row by row, token by token       in the order in which a step computes them

A value that a clock measured is not compared. Values are equal if their bits are; NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.records.metrics import Metrics
from rillflow.records.row import RowId
from rillflow.runs import layout
from rillflow.runs.integrity import entries
from rillflow.runs.json_lines import JSON, read_lines
from rillflow.runs.reader import rollout_columns
from rillflow.runs.run_directory import metric_json

ABSENT = "(missing)"
_IDS = ("epoch", "prompt_id", "sample")
_PER_TOKEN = ("versions", "tokens", "logprobs")
"""Columns with a value per token; a version is known before its token, a token before its log probability."""
_SAMPLED = ("prompt", "columns", *_PER_TOKEN, "finish", "completion")
"""Columns that sampling fills, in its order; scores and advantages follow."""
_CLOCK = ("time_s",)
"""Fields of a line that a clock measured."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value that differs."""

    step: int
    """Step of the value; 0 is before the first update."""
    place: str
    """Name of the value: a column with row and token, a metric, or a tensor with an index."""
    recorded: Any
    """Value in the run directory."""
    replayed: Any
    """Value of the replay."""

    @property
    def by(self) -> float | None:
        """Replayed minus recorded value; None if they are not two numbers."""
        both = (self.recorded, self.replayed)
        if any(isinstance(each, bool) or not isinstance(each, int | float) for each in both):
            return None
        return float(self.replayed - self.recorded)

    def __str__(self) -> str:
        away = "" if self.by is None else f" (difference {self.by:.6g})"
        return f"{self.place}: recorded {_shown(self.recorded)}, replayed {_shown(self.replayed)}{away}"


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """Result of comparing one step, up to its first difference."""

    step: int
    """Step, from 1; 0 stands for the evaluation before the first step."""
    compared: Mapping[str, int]
    """Number of compared things by name: rows, metrics, evaluations, tensors."""
    left_out: Sequence[str]
    """Things that could not be compared, with reasons."""
    difference: Difference | None
    """The first difference; None if all compared values are equal."""

    def __str__(self) -> str:
        counts = [f"{n} {name if n != 1 else name[:-1]}" for name, n in self.compared.items() if n]
        found = "equal" if self.difference is None else "DIFFERENT"
        left = f" (not compared: {'; '.join(self.left_out)})" if self.left_out else ""
        return f"step {self.step}: {', '.join([*counts, found])}{left}"


_CLOCKED = ("flight/lag/", "fused/", "gather/", "reward_metrics/", "cost_metrics/", "rollout_metrics/")
"""First parts of the names of metrics that depend on the clock, or on what a user's function logs."""


def is_clocked(metric: str) -> bool:
    """Return whether a metric depends on the clock.

    The name of a measured time ends with its unit, seconds. ``flight/lag`` counts weights on their way,
    ``fused`` has shares of measured seconds, and which rows move (``gather``) depends on when others end. A
    function may log anything, such as a time.
    """
    return metric.split("/")[-2:][0].endswith("_seconds") or metric.startswith(_CLOCKED)


class StepComparison:
    """StepComparison of a recorded run with a replay of it, step by step.

    Args:
        recorded: the run directory.
        steps: its lines of metrics by step.
        replayed: the run directory of the replay.
        last: the last step; its evaluation may belong to a later phase.
    """

    def __init__(
        self, recorded: Path, steps: Mapping[int, Mapping[str, JSON]], replayed: Path, last: int
    ) -> None:
        self._recorded, self._steps, self._replayed, self._last = recorded, steps, replayed, last
        rollouts = f"{layout.ROLLOUTS}/"
        self._with_rows = {each.step for each in entries(recorded) if each.file.startswith(rollouts)}

    def step(self, step: int, phase: str, metrics: Metrics) -> ComparedStep:
        """Compare a replayed step whose rows are on disk.

        Args:
            step: number of the step, from 1.
            phase: its phase.
            metrics: its metrics in the replay.

        Raises:
            RunDirectoryError: a file of the run is damaged.
        """
        compared, left = dict[str, int](), list[str]()
        found = self._rows(step, compared, left)
        found = found or self._lines(layout.SKIPS, step) or self._lines(layout.GIVEN_UP, step)
        found = found or self._numbers(step, phase, metrics, compared)
        found = found or self.evaluations(step, compared, left)
        return ComparedStep(step=step, compared=compared, left_out=left, difference=found)

    def _rows(self, step: int, compared: dict[str, int], left: list[str]) -> Difference | None:
        """Compare the rollouts of a step."""
        there, here = (layout.rollout_files(run) for run in (self._recorded, self._replayed))
        if step not in there:
            if step in self._with_rows:
                left.append("rollouts, files of the step are missing")
            elif self._sampled(step):
                left.append("rollouts, none are recorded")
            return None
        if step not in here:
            return Difference(step=step, place="rollouts", recorded="recorded", replayed=ABSENT)
        recorded, replayed = (rollout_columns(run, step) for run in (self._recorded, self._replayed))
        compared["rows"] = count = len(recorded["tokens"])
        if count < self._sampled(step):
            left.append(f"{self._sampled(step) - count} rows, which are not recorded")
        found = next(_row_differences(recorded, replayed), None)
        return None if found is None else Difference(step=step, **vars(found))

    def _sampled(self, step: int) -> int:
        """Return the number of rows that a recorded step sampled."""
        metrics: Any = self._steps[step]["metrics"]
        match metrics.get("rollout/rows/sum"):
            case {"sum": int() | float() as rows}:
                return int(rows)
        return 0

    def _lines(self, file: str, step: int) -> Difference | None:
        """Compare the lines of a file for a step."""
        recorded, replayed = (_lines_of(run, file, step) for run in (self._recorded, self._replayed))
        return _difference(step, file, recorded, replayed)

    def _numbers(
        self, step: int, phase: str, metrics: Metrics, compared: dict[str, int]
    ) -> Difference | None:
        """Compare the phase and the metrics of a step, except for times."""
        line = self._steps[step]
        recorded: Any = line["metrics"]
        names = [name for name in {**recorded, **metrics} if not is_clocked(name)]
        compared["metrics"] = len(names)
        found = _difference(step, "phase", line["phase"], phase)
        for name in names:
            here = metric_json(metrics[name]) if name in metrics else ABSENT
            found = found or _difference(step, f"metric {name}", recorded.get(name, ABSENT), here)
        return found

    def evaluations(self, step: int, compared: dict[str, int], left: list[str]) -> Difference | None:
        """Compare the evaluations after a step."""
        file = layout.EVALUATIONS
        recorded, replayed = (_lines_of(run, file, step) for run in (self._recorded, self._replayed))
        if step == self._last and len(recorded) != len(replayed):
            where = "the run" if replayed else "the replay"
            left.append(f"evaluation, {where} made none after its last step")
            return None
        compared["evaluations"] = len(recorded)
        return _difference(step, "evaluation", recorded, replayed)


@dataclass(frozen=True, kw_only=True)
class _Mismatch:
    """Two values that differ; the fields are those of ``Difference``."""

    place: str
    recorded: Any
    replayed: Any


def _difference(step: int, place: str, recorded: JSON, replayed: JSON) -> Difference | None:
    found = next(_mismatches(place, recorded, replayed), None)
    return None if found is None else Difference(step=step, **vars(found))


def _mismatches(place: str, recorded: Any, replayed: Any) -> Iterator[_Mismatch]:
    """Yield the values that differ in two JSON values, in order."""
    if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        for key in {**recorded, **replayed}:
            yield from _mismatches(f"{place}, {key}", recorded.get(key, ABSENT), replayed.get(key, ABSENT))
    elif isinstance(recorded, list | tuple) and isinstance(replayed, list | tuple):
        pairs = zip(recorded, replayed, strict=False)
        for index, (one, other) in enumerate(pairs):
            yield from _mismatches(f"{place}, {index}", one, other)
        if len(recorded) != len(replayed):
            yield _Mismatch(place=f"{place}, length", recorded=len(recorded), replayed=len(replayed))
    elif not _is_same(recorded, replayed):
        yield _Mismatch(place=place, recorded=recorded, replayed=replayed)


def _is_same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)


def _row_differences(
    recorded: Mapping[str, Sequence[Any]], replayed: Mapping[str, Sequence[Any]]
) -> Iterator[_Mismatch]:
    """Yield the values that differ in two steps' rollouts, in the order in which a step computes them."""
    places = {row: place for place, row in enumerate(_ids(replayed))}
    rows = _ids(recorded)
    for row in rows:
        if row not in places:
            yield _Mismatch(place=f"row ({row})", recorded="sampled", replayed=ABSENT)
    for row in places.keys() - set(rows):
        yield _Mismatch(place=f"row ({row})", recorded=ABSENT, replayed="sampled")
    names = [name for name in {**recorded, **replayed} if name not in (*_IDS, *_SAMPLED)]
    late = [name for name in names if name in ("penalised_reward", "advantage")]
    none = [ABSENT] * max(len(rows), len(places))

    def pairs(name: str, index: int, row: RowId) -> Iterator[_Mismatch]:
        one, other = recorded.get(name, none)[index], replayed.get(name, none)[places[row]]
        if one == other:
            return
        word = "token" if name in _PER_TOKEN else "entry"
        for each in _mismatches("", one, other):
            at = f", {word} {each.place.removeprefix(', ')}" if each.place else ""
            place = f"column {name}, row ({row}){at}"
            yield _Mismatch(place=place, recorded=each.recorded, replayed=each.replayed)

    for index, row in enumerate(rows):  # rows are sampled independently of each other
        yield from pairs("prompt", index, row)
        first = [_first_token(recorded[name][index], replayed[name][places[row]]) for name in _PER_TOKEN]
        for _, name in sorted(zip(first, _PER_TOKEN, strict=True), key=lambda each: each[0]):
            yield from pairs(name, index, row)
        for name in ("columns", "finish", "completion"):
            yield from pairs(name, index, row)
    for name in (*(each for each in names if each not in late), *late):
        for index, row in enumerate(rows):
            yield from pairs(name, index, row)


def _first_token(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first position at which two rows differ; their length if they do not."""
    if one == other:
        return len(one)
    same = (place for place, pair in enumerate(zip(one, other, strict=False)) if not _is_same(*pair))
    return next(same, min(len(one), len(other)))


def _ids(columns: Mapping[str, Sequence[Any]]) -> list[RowId]:
    return [RowId(*each) for each in zip(*(columns[name] for name in _IDS), strict=True)]


def _lines_of(run: Path, file: str, step: int) -> list[JSON]:
    """Return the lines of a step in a file, without the values that a clock measured."""
    lines = [line.data for line in read_lines(run / file).lines if line.data.get("step") == step]
    return [{name: value for name, value in data.items() if name not in _CLOCK} for data in lines]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
