"""Records: follow the files of a run directory while they grow, as flat values of each step.

metrics.jsonl ────┐
evaluations.jsonl ┼─ read from the last offset ─> Values(step, values)   in the order of the steps
rollouts/ ────────┘                               SampleRows(step, rows)

A file that was replaced, because a resume dropped steps, is read from its beginning again; ``Position`` skips
what was sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.runs import layout
from rillflow.runs.json_lines import JSON, parse_line
from rillflow.runs.reader import rollout_columns
from rillflow.runs.rollouts import prompt_text

_STATS = ("mean", "variance", "largest_share", "sum", "max", "min")
_CHARACTERS = 4000
"""Longest text of a sample."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """Numbers of a step or of an evaluation."""

    step: int
    """The step."""
    time_s: float
    """Seconds of the run."""
    values: Mapping[str, float]
    """Numbers by name."""
    set: str | None = None
    """Evaluated set, "" for the held-out rows; None for a step's metrics."""


@dataclass(kw_only=True)
class Position:
    """What a tracker has."""

    step: int = -1
    """Last step with metrics."""
    evaluated: dict[str, int] = field(default_factory=dict)
    """Last evaluated step of each set."""
    sampled: int = 0
    """Last step whose rollouts it has."""

    def has(self, record: Values) -> bool:
        """Return whether a record was sent."""
        last = self.step if record.set is None else self.evaluated.get(record.set, -1)
        return record.step <= last

    def add(self, record: Values) -> None:
        """Mark a record as sent."""
        if record.set is None:
            self.step = record.step
        else:
            self.evaluated[record.set] = record.step


class GrowingFile:
    """Lines of a file, each once, although the file grows or is replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, 0

    def lines(self) -> Iterator[Mapping[str, JSON]]:
        """Yield the records of whole lines that are new."""
        try:
            with self._path.open("rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._inode or now.st_size < self._offset:
                    self._inode, self._offset = now.st_ino, 0
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    record = parse_line(line)
                    if record is not None:
                        yield record
        except FileNotFoundError:
            return


class RunRecords:
    """The growing records of a run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._metrics = GrowingFile(run / layout.METRICS)
        self._evaluations = GrowingFile(run / layout.EVALUATIONS)
        self._waiting: list[Values] = []

    def new(self, position: Position) -> list[Values]:
        """Return the records that were not sent, in the order of their steps; each again until it is sent."""
        self._waiting += map(_of_step, self._metrics.lines())
        self._waiting += map(_of_evaluation, self._evaluations.lines())
        there: dict[tuple[int, str | None], Values] = {}
        for record in self._waiting:
            if not position.has(record):
                there[record.step, record.set] = record
        self._waiting = sorted(
            there.values(), key=lambda each: (each.step, each.set or "", each.set is not None)
        )
        return [*self._waiting]

    def sampled(self, position: Position, count: int) -> Iterator[tuple[int, list[Mapping[str, JSON]]]]:
        """Yield the first rollouts of each step whose rows are on disk, and that was logged before."""
        for step in layout.rollout_files(self._run):
            if position.sampled < step <= position.step:
                yield step, _rows(self._run, step, count)


def _rows(run: Path, step: int, count: int) -> list[Mapping[str, JSON]]:
    columns = rollout_columns(run, step)
    found: list[Mapping[str, JSON]] = []
    for row in range(min(count, len(columns["prompt"]))):
        prompt, completion = prompt_text(columns["prompt"][row]), str(columns["completion"][row] or "")
        cut: dict[str, JSON] = {"prompt": prompt[:_CHARACTERS], "completion": completion[:_CHARACTERS]}
        rest: dict[str, JSON] = {
            name: columns[name][row] for name in ("reward", "outcome", "finish") if name in columns
        }
        found.append({**cut, **rest})
    return found


def _of_step(line: Mapping[str, JSON]) -> Values:
    metrics = line.get("metrics")
    values = {}
    for name, parts in metrics.items() if isinstance(metrics, Mapping) else ():
        stat = next((each for each in _STATS if isinstance(parts, Mapping) and each in parts), None)
        if stat is not None and isinstance(parts, Mapping):
            values[name] = _number(parts[stat])
    return Values(step=_step(line), time_s=_number(line.get("time_s")), values=values)


def _of_evaluation(line: Mapping[str, JSON]) -> Values:
    """Return an evaluation as ``evaluation/accuracy``, or ``evaluation/SET/mean_reward``, and the like."""
    name = str(line.get("set") or "")
    area = f"evaluation/{name}" if name else "evaluation"
    values = {f"{area}/mean_reward": _number(line.get("mean_reward"))}
    count, correct, ends = line.get("count"), line.get("correct"), line.get("interval")
    if isinstance(correct, int) and isinstance(count, int) and count:
        values[f"{area}/accuracy"] = correct / count
    if isinstance(ends, list) and len(ends) == 2:
        values |= {f"{area}/interval_low": _number(ends[0]), f"{area}/interval_high": _number(ends[1])}
    known = ("step", "time_s", "set", "count", "correct", "mean_reward", "interval")
    more = {key: each for key, each in line.items() if key not in known}
    values |= {f"{area}/{key}": float(each) for key, each in more.items() if isinstance(each, int | float)}
    return Values(step=_step(line), time_s=_number(line.get("time_s")), values=values, set=name)


def _step(line: Mapping[str, JSON]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _number(value: JSON) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
