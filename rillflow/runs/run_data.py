"""RunData: all data of a run that the views show, read once.

metrics.jsonl ─> curves, phases     spans.jsonl ─> stages     evaluations.jsonl ─> evaluations
passes.jsonl ─> passes
config.json, environment.json ─> settings and machine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rillflow.runs import layout, reader
from rillflow.runs.curves import MetricColumns
from rillflow.runs.json_lines import JSON
from rillflow.runs.passes import PassesRecord, read_passes
from rillflow.runs.reader import EvaluationRecord, MetricsRecord, SpanRecord
from rillflow.runs.span_columns import SpanColumns


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """Completed steps of one phase."""

    name: str
    """Name of the phase."""
    first: int
    """First step."""
    last: int
    """Last completed step."""
    start_s: float
    """End of the previous phase, in seconds of the run."""
    end_s: float
    """End of the last completed step, in seconds of the run."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Content of a run directory."""

    path: Path
    """The run directory."""
    config: Mapping[str, JSON]
    """The resolved config."""
    starts: Sequence[Mapping[str, JSON]]
    """Environment of each start of the run."""
    curves: MetricColumns
    """Metrics of every step."""
    stages: SpanColumns
    """Spans of every stage and step."""
    passes: Sequence[PassesRecord] = ()
    """Recorded passes of pipelines."""
    evaluations: Sequence[EvaluationRecord]
    """Evaluations on the held-out rows."""
    sets: Mapping[str, Sequence[EvaluationRecord]] = field(default_factory=dict)
    """Evaluations on the recipe's named sets, by name."""
    phases: Sequence[PhaseSpan]
    """Phases in order."""
    is_finished: bool
    """Whether the run reached its last step."""

    def setting(self, dotted: str) -> JSON:
        """Return a setting of the resolved config, or None if the config lacks it."""
        value: JSON = self.config
        for part in dotted.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    @cached_property
    def steps(self) -> Sequence[MetricsRecord]:
        """Metrics of every step as records, read at the first use; ``curves`` takes less memory and time."""
        return reader.read_metrics(self.path)

    @cached_property
    def spans(self) -> Sequence[SpanRecord]:
        """Spans as records, read at the first use; ``stages`` takes less memory and time."""
        return reader.read_spans(self.path)

    @cached_property
    def rollouts(self) -> Mapping[int, tuple[Path, ...]]:
        """Rollout files by step, for steps with all their files."""
        return layout.rollout_files(self.path)

    @property
    def changes(self) -> list[str]:
        """Settings that later starts changed. Example: ``from step 15 on, policy.lr: 0.001 -> 0.0005``."""
        found = []
        for start in self.starts:
            after, changed = start.get("after_step"), start.get("changes")
            if isinstance(after, int) and isinstance(changed, list):
                words = [f"{each['key']}: {each['old']!r} -> {each['new']!r}" for each in changed]
                found += [f"from step {after + 1} on, {word}" for word in words]
        return found

    @property
    def placed_from(self) -> int:
        """First step with the current placement."""
        begun = 1
        for start in reversed(self.starts):
            if start.get("placement") != self.starts[-1].get("placement"):
                break
            after = start.get("after_step")
            begun = after + 1 if isinstance(after, int) else 1
        return begun


def load(run: Path) -> RunData:
    """Read a run directory, finished or not.

    Raises:
        RunDirectoryError: it is not a run directory, or one of its files is damaged.
    """
    config = reader.read_config(run)
    every, curves, stages = reader.read_every_evaluation(run), MetricColumns(run), SpanColumns(run)
    for columns in (curves, stages):
        columns.update()
        if columns.damaged:
            raise columns.damaged[0]
    names = dict.fromkeys(each.set for each in every if each.set)
    return RunData(
        path=run,
        config=config,
        starts=reader.read_starts(run),
        curves=curves,
        stages=stages,
        passes=read_passes(run),
        evaluations=[each for each in every if not each.set],
        sets={name: [each for each in every if each.set == name] for name in names},
        phases=phases_of(curves),
        is_finished=(run / layout.FINISHED).is_file(),
    )


def phases_of(curves: MetricColumns) -> list[PhaseSpan]:
    """Return the phases of a run's metrics in order."""
    phases, end_s = list[PhaseSpan](), 0.0
    steps, seconds = curves.steps, curves.seconds
    for name, rows in curves.phase_rows():
        first, last, last_s = int(steps[rows[0]]), int(steps[rows[-1]]), float(seconds[rows[-1]])
        phases.append(PhaseSpan(name=name, first=first, last=last, start_s=end_s, end_s=last_s))
        end_s = last_s
    return phases
