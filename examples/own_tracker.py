"""A tracker of your own: it appends every number to a CSV file. docs/trackers.md shows how to use it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rillflow_parts.trackers.tracker import TrackedRun


class CsvTracker:
    """Lines of step, name and value.

    Args:
        file: the CSV file, relative to the run directory.
    """

    def __init__(self, file: str = "numbers.csv") -> None:
        self._name = file
        self._file = Path()

    def start(self, run: TrackedRun) -> dict[str, str]:
        """Begin the file, or continue that of an earlier start."""
        self._file = run.path / "trackers" / self._name
        if not run.kept:
            self._write([["step", "name", "value"]], "w")
        return {"file": self._name}

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """Append the numbers of a step, or of an evaluation after it."""
        self._write([[step, name, value] for name, value in {**values, "seconds": time_s}.items()], "a")

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Leave the rollouts out."""

    def finish(self, state: str) -> None:
        """Every line is in the file already."""

    def _write(self, lines: Sequence[Sequence[object]], mode: str) -> None:
        with self._file.open(mode, newline="") as file:
            csv.writer(file).writerows(lines)
