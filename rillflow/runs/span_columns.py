"""Span columns: the stages of every step as columns that grow with the run; records are read when needed.

    spans.jsonl ─ update ─> SpanColumns: stage, step, start, duration, rows, tokens, place in the file
    SpanColumns ─ between ─> the spans of some steps, or around them, as SpanRecord

A column holds some 50 bytes for each span, and a record of ``runs/reader.py`` some thousand.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.following import FollowedFile
from rillflow.runs.json_lines import Line, decode, restored
from rillflow.runs.reader import SpanRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
AROUND = 64
"""Steps after a window that are read with it: the next work of a rank tells what the rank waited for."""
LARGEST = 2**62
"""Numbers beyond this are damage."""


class SpanColumns:
    """Spans of every stage of a run, read as far as the run has written them.

    Example:
        spans = SpanColumns(run)
        spans.update()
        spans.of_steps(5, 8)
    """

    def __init__(self, run: Path) -> None:
        self._file = FollowedFile(run / layout.SPANS)
        self._clear()

    def _clear(self) -> None:
        self.stages: list[str] = []
        """Names of the stages in the order in which they first appeared."""
        self.has_inputs = False
        """Whether a span names its inputs."""
        self._columns: dict[str, array[Any]] = {
            name: array(kind)
            for name, kind in {"stage": "i", "step": "q", "start": "d", "duration": "d"}.items()
        }
        self._columns |= {name: array("q") for name in ("rows", "tokens", "offset")}
        self._numbers: dict[str, int] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self.damaged: list[RunDirectoryError] = []
        """An error for each line that is no record; the other lines are kept."""

    def update(self) -> bool:
        """Read the lines that are new; return whether anything changed. A rewound file is read again."""
        is_rewound = self._file.is_rewound()
        if is_rewound:
            self._clear()
        before = self._file.offset
        for line in self._file.new_lines():
            if not self._add(line.text, line.offset):
                self.damaged.append(line.refusal(self._file.path, "is not a span"))
        is_changed = is_rewound or self._file.offset != before
        if is_changed:
            self._arrays = {}
        return is_changed

    def __len__(self) -> int:
        return len(self._columns["step"])

    @property
    def nbytes(self) -> int:
        """Bytes that the columns hold."""
        return sum(each.itemsize * len(each) for each in self._columns.values())

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column: ``stage`` (its number), ``step``, ``start``, ``duration``, ``rows``, ``tokens`` or
        ``offset``.
        """
        if name not in self._arrays:
            self._arrays[name] = np.array(self._columns[name])
        return self._arrays[name]

    @property
    def steps(self) -> Ints:
        """Steps that have a span, in order."""
        return np.unique(self.column("step"))

    @property
    def ends(self) -> Floats:
        """End of every span, in seconds of the run."""
        ends: Floats = self.column("start") + self.column("duration")
        return ends

    def rows_of(self, first: int, last: int, stage: str | None = None) -> Ints:
        """Return the numbers of the spans of some steps, of one stage or of all."""
        steps = self.column("step")
        wanted = (steps >= first) & (steps <= last)
        if stage is not None:
            wanted &= self.column("stage") == self._numbers.get(stage, -1)
        return np.flatnonzero(wanted)

    def by_step(self, rows: Ints) -> tuple[Ints, Floats]:
        """Return the steps of some spans in order, and the sum of their durations in each step."""
        steps, places = np.unique(self.column("step")[rows], return_inverse=True)
        return steps, np.bincount(places, self.column("duration")[rows], len(steps)).astype(np.float64)

    def of_steps(self, first: int, last: int) -> list[SpanRecord]:
        """Return the spans of some steps, in the order of the file."""
        return list(self._read(self.rows_of(first, last)))

    def around(self, first: int, last: int) -> list[SpanRecord]:
        """Return the spans of some steps, those that ran meanwhile, and those of the next AROUND steps."""
        rows = self.rows_of(first, last)
        if not len(rows):
            return []
        starts, ends = self.column("start"), self.ends
        begun_s, ended_s = starts[rows].min(), ends[rows].max()
        ran = (ends > begun_s) & (starts < ended_s)
        following = (self.column("step") > last) & (self.column("step") <= last + AROUND)
        wanted = ran | following
        wanted[rows] = True
        return list(self._read(np.flatnonzero(wanted)))

    def _read(self, rows: Ints) -> Iterator[SpanRecord]:
        with self._file.path.open("rb") as file:
            for row in rows.tolist():
                file.seek(self._columns["offset"][row])
                text = file.readline()
                line = Line(file=self._file.path, number=row + 1, data=restored(json.loads(text)), text=text)
                yield decode(SpanRecord, line)

    def _add(self, text: bytes, offset: int) -> bool:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return False
        match found:
            case {
                "step": int() as step,
                "stage": str() as stage,
                "start_s": int() | float() as start_s,
                "duration_s": int() | float() as duration_s,
            }:
                pass
            case _:
                return False
        if stage not in self._numbers:
            self._numbers[stage] = len(self.stages)
            self.stages.append(stage)
        self.has_inputs = self.has_inputs or bool(found.get("after"))
        counts = [
            value if isinstance(value, int) else 0 for value in (found.get("rows"), found.get("tokens"))
        ]
        values = (self._numbers[stage], step, start_s, duration_s, *counts, offset)
        if not all(abs(value) <= LARGEST for value in values):
            return False
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        return True


def covered_s(starts: Floats, ends: Floats, low_s: float, high_s: float) -> float:
    """Return the seconds between two times during which at least one of some spans ran."""
    order = np.argsort(starts, kind="stable")
    begun = np.clip(starts[order], low_s, high_s)
    ended = np.clip(ends[order], low_s, high_s)
    reached = np.maximum.accumulate(np.concatenate([[low_s], ended]))[:-1]
    return float(np.maximum(0.0, ended - np.maximum(begun, reached)).sum())
