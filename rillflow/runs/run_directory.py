"""The run directory: all files of a run, written so that a crash loses at most one line.

    open ─ lock ─> holds a step? ─ no ──> config.json
                     └──────────── yes ─> same config? cut-off lines removed ─ rewind(step of checkpoint) ─┐
    every step: log_metrics, log_span, sometimes log_evaluation <──────────────────────────────────────────┘

The caller resumes from a checkpoint of step s with ``rewind(s)``, which drops the records of later steps;
those steps then run again. Steps count from 1 over all phases; step 0 is before the first update.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Histogram, LargestShare, Max, Mean, Metric, Metrics, Min, Sum, Variance
from rillflow.runs import durable, layout
from rillflow.runs.changes import Change, allowed_changes
from rillflow.runs.integrity import RECOVERABLE, Evidence, damage, entries, newest_checkpoint, recover
from rillflow.runs.json_lines import JSON, decode, encode, read_json, read_lines
from rillflow.runs.lock import Lock
from rillflow.runs.observers import Observers
from rillflow.runs.passes import PassesRecord
from rillflow.runs.reader import (
    RETURN,
    Evaluation,
    RankSpan,
    SpanRecord,
    read_metrics,
    read_spans,
    read_starts,
)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Step of a line."""

    step: int


class RunDirectory(ExitStack):
    """An open run directory, locked until ``close``. Create it with ``RunDirectory.open``.

    Example:
        with RunDirectory.open(Path("runs/first"), config) as run:
            run.log_metrics(1, "grpo", {"reward/score/mean": Mean(total=3.0, count=4)})
    """

    def __init__(
        self,
        path: Path,
        lock: Lock,
        config: Mapping[str, JSON],
        *,
        is_new: bool,
        changes: Sequence[Change],
        notes: Sequence[str],
        clock: Callable[[], float],
        identity: str = "",
    ) -> None:
        super().__init__()
        self.callback(self._release)
        self.path = path
        """Path of the directory."""
        self.is_new = is_new
        """Whether this call created the directory; False for a resumed run."""
        self.changes = tuple(changes)
        """Settings that differ from the previous start; ``log_start`` records them."""
        self.notes = tuple(notes)
        """Descriptions of damage and of restored files."""
        self.evidence = Evidence(path)
        """Digests of everything written."""
        self.id = _identity(path, identity or new_identity())
        """Unique id of this run, stored in its checkpoints."""
        self.checkpoints = path / layout.CHECKPOINTS
        """Folder of checkpoints, which another package writes."""
        self.observers = Observers((), lambda _: None)
        """What hears of each step and evaluation once it is written."""
        self._lock: Lock | None = lock
        self._config = config
        self._clock = clock
        self._set_clock()

    @classmethod
    def open(
        cls,
        path: Path,
        config: Mapping[str, JSON],
        *,
        may_change: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        identity: str = "",
    ) -> RunDirectory:
        """Create the directory, or reopen it to continue the same run.

        ``may_change`` names settings, or groups of them, that a resumed run may change (dotted keys). The
        config file holds the new values after ``log_start`` has recorded the changes. A new run gets the id
        ``identity``; empty: a random one.

        Raises:
            RunDirectoryError: the path is a file, holds something else, cannot be written, is in use
                by another driver, or belongs to a run with another config that made a step.
        """
        _require_ours_or_empty(path)
        with durable.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path / layout.LOCK)
        try:
            changes, notes = list[Change](), _restored(path)
            is_new = not (path / layout.CONFIG).exists()
            if not is_new:
                require_format(path)
                if holds_step(path):
                    changes = allowed_changes(path, config, may_change)
            if not holds_step(path):
                Evidence(path).write(layout.CONFIG, encode(config, indent=2), config)
            how: dict[str, Any] = {"notes": notes, "clock": clock, "identity": identity}
            return cls(path, lock, config, is_new=is_new, changes=changes, **how)
        except BaseException:
            lock.release()
            raise

    def elapsed_s(self) -> float:
        """Return the seconds of work on this run, over all its starts."""
        return self._before_s + self._clock() - self._opened_s

    @property
    def _time_s(self) -> float:
        return round(self.elapsed_s(), 6)

    def log_start(self, start: Mapping[str, JSON]) -> None:
        """Add the environment and the changes of this start to environment.json."""
        self._require_open()
        changed: dict[str, JSON] = {"changes": [asdict(change) for change in self.changes]}
        starts = [*read_starts(self.path), {**start, **(changed if self.changes else {})}]
        self.write_json(layout.ENVIRONMENT, {"format": layout.FORMAT, "run": self.id, "starts": starts})
        if self.changes:
            self.write_json(layout.CONFIG, self._config)

    def log_metrics(self, step: int, phase: str, metrics: Metrics) -> None:
        """Append one step's metrics, each with its reduction, to metrics.jsonl."""
        values = {name: metric_json(metric) for name, metric in metrics.items()}
        self._append(layout.METRICS, step=step, phase=phase, time_s=self._time_s, metrics=values)
        self.observers.step(step, phase, metrics)

    def log_evaluation(self, step: int, found: Evaluation) -> None:
        """Append one evaluation to evaluations.jsonl."""
        line: dict[str, JSON] = {"step": step, "time_s": self._time_s}
        line |= {"set": found.set} if found.set else {}
        measure = RETURN if found.is_return else "accuracy" if found.is_accuracy else "mean_reward"
        line |= {"measure": measure, "count": found.count}
        line |= {"correct": found.correct} if found.correct is not None else {}
        line |= {"mean_reward": found.mean_reward}
        line |= {"interval": found.interval} if found.interval else {}
        self._append(layout.EVALUATIONS, **{**line, **found.more})
        self.observers.evaluation(step, found)

    def log_skip(self, step: int, role: str, reason: str, rows: Sequence[Sequence[int]]) -> None:
        """Append one skipped update, with its rows (epoch, prompt, sample), to skips.jsonl."""
        self._append(layout.SKIPS, step=step, time_s=self._time_s, role=role, reason=reason, rows=rows)

    def log_given_up(self, step: int, group: Sequence[int], reason: str) -> None:
        """Append one group (epoch, prompt) that was sampled and not trained to given_up.jsonl."""
        self._append(layout.GIVEN_UP, step=step, time_s=self._time_s, group=list(group), reason=reason)

    def log_decisions(self, events: Sequence[JSON]) -> None:
        """Append decisions of the sampler's controller to decisions.jsonl."""
        self.require_lock()
        self.evidence.append(layout.DECISIONS, None, encode({"events": list(events)}))

    def cut_decisions(self, count: int) -> None:
        """Drop all decisions of the sampler's controller but the first ``count``."""
        self.require_lock()
        kept, rest = 0, list[JSON]()
        for line in read_lines(self.path / layout.DECISIONS).lines:
            events: Any = line.data.get("events", [])
            if len(events) > count:
                rest = events[:count]
                break
            kept, count = kept + 1, count - len(events)
        self.evidence.keep_lines(layout.DECISIONS, kept)
        if rest:
            self.log_decisions(rest)

    def keep_bundle(self, step: int) -> None:
        """Rename the draft of a step's bundle to its final name, if the disk had room for the draft."""
        kept = self.path / layout.BUNDLES / f"step-{step:06d}"
        draft = kept.with_name(layout.DRAFT)
        with durable.writing(kept):
            if draft.is_dir():
                shutil.rmtree(kept, ignore_errors=True)
                draft.rename(kept)
                shutil.copy(self.path / layout.CONFIG, kept)

    def write_json(self, name: str, data: Mapping[str, JSON]) -> None:
        """Write a file with one record, atomically. ``name`` is a plain file name."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise RunDirectoryError(
                f"{name!r} is not a plain file name", why="the file would be outside the run directory"
            )
        self.require_lock()
        self.evidence.write(name, encode(data, indent=2), data if name in RECOVERABLE else None)

    def require_lock(self) -> None:
        """Raise an error if another driver may have taken the directory.

        Raises:
            RunDirectoryError: run.lock was removed or replaced, or the directory is closed.
        """
        self._require_open()
        assert self._lock is not None, "the run directory is open"
        self._lock.require_held()

    def rewind(self, step: int) -> None:
        """Drop the records of steps after ``step``, to resume from the checkpoint of ``step``.

        Each file is replaced atomically; after a crash, calling it again completes the work. Decisions stay,
        because a resumed run repeats them.
        """
        self._require_open()
        self.evidence.rewind(step)
        for name in layout.STEP_FILES:
            file = self.path / name
            lines = read_lines(file).lines
            kept = [line.text for line in lines if decode(_Step, line).step <= step]
            if len(kept) < len(lines):
                durable.replace(file, kept)
        for written, files in layout.written_rollouts(self.path).items():
            for file in files if written > step else ():
                with durable.writing(file):
                    file.unlink()
        self.evidence.keep_lines(layout.DECISIONS)
        self._set_clock()

    def _release(self) -> None:
        assert self._lock is not None, "the lock is released once"
        self._lock.release()
        self._lock = None

    def log_span(self, span: SpanRecord) -> None:
        """Append one stage of one step to spans.jsonl."""
        ranks = [_span_json(each) for each in span.ranks]
        self._append(layout.SPANS, **{**_span_json(span), "ranks": ranks})

    def log_passes(self, passes: PassesRecord) -> None:
        """Append the passes of one stage of one step to passes.jsonl."""
        self._append(layout.PASSES, **{**vars(passes), "ranks": [vars(each) for each in passes.ranks]})

    def _append(self, name: str, /, **record: JSON) -> None:
        self.require_lock()
        step = record["step"]
        assert isinstance(step, int), "every record has a step"
        # A resumed run may add an evaluation after the checkpoint of its step, which flushed the other lines.
        self.evidence.append(name, step, encode(record), is_flushed=name == layout.EVALUATIONS)

    def _require_open(self) -> None:
        if self._lock is None:
            raise RunDirectoryError(f"run directory {self.path} is closed", why="its lock has been released")

    def _set_clock(self) -> None:
        # A resumed run continues from its last recorded time, so that times in a file never decrease.
        ends = [record.time_s for record in read_metrics(self.path)]
        ends += [span.end_s for span in read_spans(self.path)]
        self._before_s = max(ends, default=0.0)
        self._opened_s = self._clock()


def holds_step(path: Path) -> bool:
    """Return whether a run in this directory reached a step; before that, the config may be overwritten."""
    checkpoints, steps = path / layout.CHECKPOINTS, path / layout.METRICS
    is_saved = checkpoints.is_dir() and any(checkpoints.iterdir())
    return is_saved or (steps.exists() and steps.stat().st_size > 0)


def set_aside(path: Path) -> Path | None:
    """Rename a run directory to the first free of ``NAME.old-1``, ``NAME.old-2`` ..., to make room.

    Return the new name, or None if there is no run directory at ``path``. Nothing is deleted.

    Raises:
        RunDirectoryError: it is not a run directory, is in use, or cannot be renamed.
    """
    _require_ours_or_empty(path)
    if not layout.is_run_directory(path):
        return None
    lock = Lock(path / layout.LOCK)
    try:
        names = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
        with durable.writing(path):
            return path.rename(next(name for name in names if not name.exists()))
    finally:
        lock.release()


def metric_json(metric: Metric) -> dict[str, JSON]:
    """Return a metric with its reduction in the format of metrics.jsonl."""
    match metric:
        case Mean():
            return {"mean": metric.value, "count": metric.count}
        case Variance():
            return {"variance": metric.value, "about": metric.mean, "count": metric.count}
        case LargestShare():
            return {"largest_share": metric.value, "total": metric.total}
        case Histogram():
            return {"histogram": [*metric.counts], "edges": [*metric.edges]}
        case Sum() | Max() | Min():
            return {type(metric).__name__.lower(): metric.value}


def _span_json(span: SpanRecord | RankSpan) -> dict[str, JSON]:
    """Return a span's fields with times rounded to the microsecond."""
    return {**vars(span), "start_s": round(span.start_s, 6), "duration_s": round(span.duration_s, 6)}


def _require_ours_or_empty(path: Path) -> None:
    """Raise an error if a new run in this path would mix with other files."""
    if path.is_dir():
        with durable.writing(path):
            first = next((entry.name for entry in path.iterdir()), None)
        if first is not None and not layout.is_run_directory(path):
            raise RunDirectoryError(
                f"{path} is not empty and is not a run directory: it holds {first!r}",
                why="a run never mixes with files that it did not write, and never deletes them",
                fix="choose a run directory that does not exist yet",
            )
    elif path.is_symlink() or path.exists():
        kind = "a file" if path.is_file() else "not a directory"
        raise RunDirectoryError(
            f"{path} is {kind}", why="the run directory would be created there", fix="choose another name"
        )


def require_format(path: Path) -> None:
    """Refuse a run directory of another format.

    Raises:
        RunDirectoryError: another version of Rillflow wrote it.
    """
    file = path / layout.ENVIRONMENT
    found = read_json(file)["format"] if file.exists() else layout.FORMAT
    if found != layout.FORMAT:
        raise RunDirectoryError(
            f"{path} has format {found}, but this version of rillflow writes format {layout.FORMAT}",
            why="it would misread files of the other version",
            fix="use the version that wrote it, or another run directory",
        )


def new_identity() -> str:
    """Return a random id for a run."""
    return secrets.token_hex(8)


def _identity(path: Path, new: str) -> str:
    """Return the id of the run in a directory, or the new one; empty for an old run without an id."""
    if (path / layout.ENVIRONMENT).exists():
        known = read_json(path / layout.ENVIRONMENT)
        return str(known["run"]) if "run" in known else ""
    starts: dict[str, JSON] = {"format": layout.FORMAT, "run": new, "starts": []}
    Evidence(path).write(layout.ENVIRONMENT, encode(starts, indent=2), starts)
    return new


def _restored(path: Path) -> list[str]:
    """Remove half-written content and restore recoverable files; return descriptions of the damage."""
    notes = []
    if holds_step(path) and not (path / layout.DIGESTS).exists():
        notes.append(f"{layout.DIGESTS} is missing: the run's files are accepted unverified")
    _mend(path)
    Evidence(path).mend()
    if not holds_step(path) and not any(each.is_line for each in entries(path)):
        return notes  # no record depends on the config yet
    notes += recover(path)
    notes += [f"{each}, not repaired: see rillflow verify {path}" for each in damage(path, is_deep=False)]
    newest = newest_checkpoint(path)
    if newest is not None and not (path / layout.CHECKPOINTS / f"step-{newest:06d}").is_dir():
        notes.append(f"{layout.CHECKPOINTS}/step-{newest:06d} is missing: it was the newest checkpoint")
    return notes


def _mend(path: Path) -> None:
    """Remove content that a killed driver left half written."""
    for name in layout.LINE_FILES:
        torn_at = read_lines(path / name).torn_at
        if torn_at is not None:
            with durable.writing(path / name):
                os.truncate(path / name, torn_at)
    for folder in (path, path / layout.ROLLOUTS, path / layout.SOURCES):
        for temporary in folder.glob(".*.tmp"):
            with durable.writing(temporary):
                temporary.unlink()
