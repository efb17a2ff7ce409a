"""Tracker: the interface of a tracker, and the record of the run that it gets.

    start(run) ─> log(step, values) ... samples(step, rows) ... ─> finish(state)

All calls come from one process that does nothing else, in the order of the steps. A tracker may be slow,
raise or hang there: an exception repeats the call later, and training does not notice any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rillflow.errors import RillflowError
from rillflow.runs.json_lines import JSON
from rillflow.runs.observers import End


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker receives."""

    path: Path
    """Run directory."""
    id: str
    """Unique id of the run."""
    name: str
    """Name of the run directory."""
    tags: tuple[str, ...]
    """Tags of the recipe."""
    config: Mapping[str, JSON]
    """Every resolved setting, by section."""
    started: float
    """Start of the run, in seconds since 1970."""
    step: int
    """Last step that the tracker has; -1 for a new one."""
    kept: Mapping[str, JSON]
    """What ``start`` returned at the run's earlier starts; empty for the first."""


class Tracker(Protocol):
    """A tracker of one run."""

    def start(self, run: TrackedRun) -> Mapping[str, JSON]:
        """Begin, or continue the tracker's run of an earlier start.

        Returns:
            What the next start needs to continue, such as the tracker's own id of the run.

        Raises:
            TrackerError: it cannot work, for example without a key; it is not tried again.
        """

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """Take the metrics of a step, or an evaluation after it.

        Args:
            step: the step, from 1 over all phases; 0 for an evaluation before the first one.
            values: numbers by name, as in metrics.jsonl; those of an evaluation begin with ``evaluation/``.
            time_s: seconds of the run.
        """

    def samples(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        """Take some rollouts of a step, with prompt, completion, reward; only if ``samples`` is set."""

    def finish(self, state: End) -> None:
        """Send everything, and end."""


class TrackerError(RillflowError):
    """A tracker that cannot work until the user changes something."""
