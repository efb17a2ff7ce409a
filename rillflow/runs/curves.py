"""Curves: the metrics of a run as columns that grow with the run, and shortened to what a chart can show.

    metrics.jsonl ─ update ─> MetricColumns: steps, seconds, a column for each metric ─ curve ─> Curve
    Curve ─ between ─> a part ─ shortened ─> at most N buckets, each with mean, least and largest value

A column holds 20 bytes for each step, where the records of ``runs/reader.py`` hold some hundred.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Histogram, Max, Mean, Metric, Metrics, Min, Sum
from rillflow.runs import layout
from rillflow.runs.following import FollowedFile
from rillflow.runs.json_lines import JSON, restored

Axis: TypeAlias = Literal["step", "phase", "seconds", "tokens"]
"""What the horizontal axis counts; ``phase`` counts steps of the last phase, and leaves out the others."""
Floats: TypeAlias = npt.NDArray[np.float64]
TOKENS = "rollout/tokens/sum"
"""Metric that the axis of tokens adds up."""
_VALUES = ("mean", "sum", "max", "min", "variance", "largest_share")
"""Fields that hold a metric's value; the name is its reduction."""
MOST_DIGITS = 300
"""Largest power of ten that numbers are rounded with."""
LARGEST = 2**53
"""Whole numbers beyond this are damage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Values of one metric over the steps that have it. Legend: N points."""

    x: Floats
    """[N] places on the axis, ascending."""
    y: Floats
    """[N] values; a bucket's mean."""
    low: Floats
    """[N] least finite value of each bucket; ``y`` if every point is one step."""
    high: Floats
    """[N] largest finite value of each bucket."""
    weights: Floats
    """[N] numbers of values that the means count; NaN for another reduction."""

    def __len__(self) -> int:
        return len(self.x)

    def between(self, low: float | None, high: float | None) -> Curve:
        """Return the points with ``low <= x <= high``, and one more on each side, so that lines reach the
        edges.
        """
        start = 0 if low is None else max(0, int(np.searchsorted(self.x, low, "left")) - 1)
        stop = len(self) if high is None else int(np.searchsorted(self.x, high, "right")) + 1
        return Curve(**{name: values[start:stop] for name, values in vars(self).items()})

    def shortened(self, points: int) -> Curve:
        """Return at most ``points`` buckets of neighbouring steps; the same curve if it is short enough."""
        if len(self) <= points:
            return self
        starts = np.linspace(0, len(self), points + 1).astype(np.int64)[:-1]
        is_finite = np.isfinite(self.y)
        counts = np.add.reduceat(is_finite.astype(np.float64), starts)
        sums = np.add.reduceat(np.where(is_finite, self.y, 0.0), starts)
        widths = np.diff(np.append(starts, len(self)))
        with np.errstate(invalid="ignore", divide="ignore"):
            y = sums / counts
        low = np.minimum.reduceat(np.where(is_finite, self.low, np.inf), starts)
        high = np.maximum.reduceat(np.where(is_finite, self.high, -np.inf), starts)
        return Curve(
            x=np.add.reduceat(self.x, starts) / widths,
            y=y,
            low=np.where(counts > 0, low, np.nan),
            high=np.where(counts > 0, high, np.nan),
            weights=np.add.reduceat(self.weights, starts),
        )


class StepMetrics(NamedTuple):
    """Some metrics of one step."""

    step: int
    """The step."""
    metrics: Metrics
    """Metrics by name."""


class _Column:
    """Values of one metric, with the index of the step of each."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.rows, self.values, self.weights = array("i"), array("d"), array("d")


class _Histograms:
    """Counts of one histogram, with the index of the step of each."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.rows, self.counts = array("i"), array("q")

    def merged(self, start: int, stop: int) -> Histogram:
        width = len(self.edges) + 1
        counts = np.array(self.counts[start * width : stop * width]).reshape(-1, width).sum(0)
        return Histogram(edges=self.edges, counts=tuple(counts.tolist()))


class MetricColumns:
    """Metrics of every step of a run, read as far as the run has written them.

    Example:
        columns = MetricColumns(run)
        columns.update()
        columns.curve("reward/score/mean", "seconds").shortened(1000)
    """

    def __init__(self, run: Path) -> None:
        self._file = FollowedFile(run / layout.METRICS)
        self._clear()

    def _clear(self) -> None:
        self._steps, self._seconds = array("q"), array("d")
        self._columns: dict[str, _Column] = {}
        self._histograms: dict[str, _Histograms] = {}
        self.offsets = array("q")
        """Offset of each step's line in metrics.jsonl."""
        self.phases: list[tuple[str, int]] = []
        """Name of each phase, and the index of its first step."""
        self.damaged: list[RunDirectoryError] = []
        """An error for each line that is no record; the other lines are kept."""

    def update(self) -> bool:
        """Read the lines that are new; return whether anything changed. A rewound file is read again."""
        is_rewound = self._file.is_rewound()
        if is_rewound:
            self._clear()
        before = self._file.offset
        for line in self._file.new_lines():
            problem = self._add(line.text, line.offset)
            if problem:
                self.damaged.append(line.refusal(self._file.path, problem))
        return is_rewound or self._file.offset != before

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """Bytes that the columns hold."""
        held = [array for each in self._columns.values() for array in (each.rows, each.values, each.weights)]
        held += [array for each in self._histograms.values() for array in (each.rows, each.counts)]
        return sum(each.itemsize * len(each) for each in (*held, self._steps, self._seconds, self.offsets))

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Step of each line."""
        return np.array(self._steps, dtype=np.int64)

    @property
    def seconds(self) -> Floats:
        """End of each step, in seconds of the run."""
        return np.array(self._seconds)

    @property
    def names(self) -> Mapping[str, str]:
        """Reduction of each metric by name, in the order in which they first appeared."""
        plain = {name: column.reduction for name, column in self._columns.items()}
        return {**plain, **dict.fromkeys(self._histograms, "histogram")}

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, or None if no step has it."""
        return self._columns[name].values[-1] if name in self._columns else None

    def curve(self, name: str, axis: Axis = "step", phase: str | None = None) -> Curve:
        """Return the curve of a metric, empty if no step has it.

        Args:
            name: a metric that is no histogram.
            axis: what ``x`` counts; tokens are those sampled until the end of the step.
            phase: leave out the steps of other phases.
        """
        column = self._columns.get(name, _NONE)
        if axis == "phase" and phase is None and self.phases:
            phase = self.phases[-1][0]
        rows = np.array(column.rows, dtype=np.int64)
        y, weights = np.array(column.values), np.array(column.weights)
        if phase is not None:
            inside = self._phase_of()[rows] == [name for name, _ in self.phases].index(phase)
            rows, y, weights = rows[inside], y[inside], weights[inside]
        return Curve(x=self.places(axis)[rows], y=y, low=y, high=y, weights=weights)

    @property
    def before_last_phase(self) -> int:
        """Last step before the last phase; 0 if there is one phase, or none."""
        return self._steps[self.phases[-1][1]] - 1 if self.phases else 0

    def places(self, axis: Axis) -> Floats:
        """Return the place of each step on an axis, [steps]."""
        if axis == "step":
            return np.array(self._steps, dtype=np.float64)
        if axis == "phase":
            return np.array(self._steps, dtype=np.float64) - self.before_last_phase
        if axis == "seconds":
            return self.seconds
        sampled, column = np.zeros(len(self)), self._columns.get(TOKENS, _NONE)
        sampled[np.array(column.rows, dtype=np.int64)] = np.nan_to_num(np.array(column.values))
        return np.cumsum(sampled)

    def phase_rows(self) -> list[tuple[str, range]]:
        """Return the name of each phase, and the indices of its steps."""
        stops = [*(first for _, first in self.phases[1:]), len(self)]
        return [(name, range(first, stop)) for (name, first), stop in zip(self.phases, stops, strict=False)]

    def records(self, names: Sequence[str], phase: str | None = None) -> Iterator[StepMetrics]:
        """Yield every step with those of its metrics that are named, as records; of one phase or of all.

        Metrics with another reduction than a mean, sum, maximum or minimum are left out.
        """
        found = [(name, self._columns[name]) for name in names if name in self._columns]
        found = [(name, column) for name, column in found if column.reduction in _RECORDS]
        places = [0] * len(found)
        for own, rows in self.phase_rows():
            for row in rows:
                metrics = dict[str, Metric]()
                for number, (name, column) in enumerate(found):
                    place = places[number]
                    if place < len(column.rows) and column.rows[place] == row:
                        places[number] += 1
                        record = _RECORDS[column.reduction]
                        metrics[name] = record(column.values[place], column.weights[place])
                if phase in (None, own):
                    yield StepMetrics(self._steps[row], metrics)

    def histograms(self, name: str, parts: int) -> Iterator[tuple[int, Histogram]]:
        """Yield at most ``parts`` histograms of a metric with their first step; neighbours are added up."""
        column = self._histograms[name]
        count = len(column.rows)
        starts = np.unique(np.linspace(0, count, min(parts, count) + 1).astype(int)).tolist()
        for start, stop in pairwise(starts):
            yield self._steps[column.rows[start]], column.merged(start, stop)

    def _phase_of(self) -> npt.NDArray[np.int64]:
        starts = [first for _, first in self.phases]
        return np.searchsorted(starts, np.arange(len(self)), "right") - 1

    def _add(self, text: bytes, offset: int) -> str:
        """Add one line; return what is wrong with it, empty if nothing is."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return "is not a JSON object"
        match found:
            case {"step": int() as step, "phase": str() as phase, "time_s": _, "metrics": dict()}:
                pass
            case _:
                return "has no step, phase, time_s and metrics"
        if abs(step) > LARGEST:
            return f"has step {step}"
        if "notes" in found:
            found = restored(found)
        metrics, time_s = found["metrics"], found["time_s"]
        row = len(self._steps)
        self._steps.append(step)
        self._seconds.append(_real(time_s))
        self.offsets.append(offset)
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, row))
        wrong = [name for name, parts in metrics.items() if not self._add_metric(name, parts, row)]
        return f"has metric {wrong[0]!r} without a known reduction" if wrong else ""

    def _add_metric(self, name: str, parts: JSON, row: int) -> bool:
        if not isinstance(parts, dict):
            return False
        for reduction in _VALUES:
            if reduction in parts:
                value = parts[reduction]
                if isinstance(value, str | list | dict):
                    return False
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = _Column(reduction)
                column.rows.append(row)
                column.values.append(_real(value))
                column.weights.append(_real(parts.get("count")))
                return True
        return self._add_histogram(name, parts, row)

    def _add_histogram(self, name: str, parts: Mapping[str, JSON], row: int) -> bool:
        match parts:
            case {"histogram": [*counts], "edges": [*edges]} if len(counts) == len(edges) + 1:
                found = self._histograms.setdefault(name, _Histograms([_real(edge) for edge in edges]))
                if list(found.edges) == edges and all(0 <= _real(count) < LARGEST for count in counts):
                    found.rows.append(row)
                    found.counts.extend(int(_real(count)) for count in counts)
                return True
        return False


def _real(value: object) -> float:
    """Return a number of a line as a float, NaN if it is none."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


_NONE = _Column("")
_RECORDS: Mapping[str, Callable[[float, float], Metric]] = {
    "mean": lambda value, weight: Mean(total=value * weight if weight else 0.0, count=weight),
    "sum": lambda value, _: Sum(value=value),
    "max": lambda value, _: Max(value=value),
    "min": lambda value, _: Min(value=value),
}


def plain(values: Sequence[float] | Floats) -> list[float | None]:
    """Return numbers as JSON has them: None for NaN and infinity, 8 significant digits."""
    array = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(array)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        digits = 7 - np.floor(np.log10(np.abs(array)))
        is_rounded = is_finite & (array != 0) & (np.abs(digits) < MOST_DIGITS)
        scale = 10.0 ** np.where(is_rounded, np.abs(digits), 0.0)
        up, down = np.round(array * scale) / scale, np.round(array / scale) * scale
    rounded = np.where(is_rounded, np.where(digits >= 0, up, down), array)
    short: list[float | None] = rounded.tolist()
    if is_finite.all():
        return short
    return [value if good else None for value, good in zip(short, is_finite.tolist(), strict=True)]
