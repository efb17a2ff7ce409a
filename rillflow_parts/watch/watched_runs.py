"""Watched runs: find run directories below some paths, and keep up with their files.

    paths ─ find ─> WatchedRun for each directory ─┬─ state, evaluations   small files, when they change
                                                   └─ metrics              the new lines of metrics.jsonl

Everything is read from files, and nothing is written or locked, so a watched run is the same as another.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from rillflow.errors import RillflowError, RunDirectoryError
from rillflow.runs import layout, reader
from rillflow.runs.curves import MetricColumns
from rillflow.runs.json_lines import JSON, read_json
from rillflow.runs.reader import EvaluationRecord
from rillflow.runs.span_columns import SpanColumns
from rillflow.runs.summary import alike

LOOK_S = 2.0
"""Least seconds between two looks for new run directories, or at the files of one run."""
MOST_BYTES = 200 * 2**20
"""Bytes of columns that are kept in memory; those of the run in use are kept in any case."""
DEPTH = 3
"""Levels of folders below a given path in which runs are searched."""
REMOTE_S = 600.0
"""A run of another machine counts as running for this long after its last step."""
_SMALL = (layout.CONFIG, layout.ENVIRONMENT, layout.EVALUATIONS, layout.FINISHED, layout.LOCK)
HEADLINES = (
    *("reward/score/mean", "episode/return/mean", "supervised/nll/mean"),
    *("preference/loss/mean", "policy/loss/mean"),
)
"""Metrics of which the first that a run has stands for it, before any evaluation."""


@dataclass(frozen=True, kw_only=True)
class SmallFiles:
    """Everything about a run that stands in its small files."""

    config: Mapping[str, JSON]
    """The resolved config."""
    starts: Sequence[Mapping[str, JSON]]
    """Environment of each start."""
    evaluations: Sequence[EvaluationRecord]
    """Evaluations of held-out rows and of named sets."""
    is_finished: bool
    """Whether the last step is done."""
    problems: Sequence[str]
    """Errors of files that could not be read."""


class WatchedRun:
    """One run directory. Methods may be called from several threads.

    Args:
        path: the directory.
        name: the run's name in this server.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.lock = Lock()
        """Held while the metrics or spans are read or used."""
        self.used = -math.inf
        """Time of the last use of the metrics or spans."""
        self._metrics, self._stages = MetricColumns(path), SpanColumns(path)
        self._looked, self._looked_at_stages = -math.inf, -math.inf
        self._seen: object = None
        self._small: SmallFiles | None = None

    def metrics(self) -> MetricColumns:
        """Return the metrics with the lines written so far; hold ``lock`` while using them."""
        assert self.lock.locked(), "the caller holds the lock"
        if time.monotonic() - self._looked > LOOK_S / 4:
            self._metrics.update()
            self._looked = time.monotonic()
        self.used = time.monotonic()
        return self._metrics

    def stages(self) -> SpanColumns:
        """Return the spans with the lines written so far; hold ``lock`` while using them."""
        assert self.lock.locked(), "the caller holds the lock"
        if time.monotonic() - self._looked_at_stages > LOOK_S / 4:
            self._stages.update()
            self._looked_at_stages = time.monotonic()
        self.used = time.monotonic()
        return self._stages

    @property
    def nbytes(self) -> int:
        """Bytes of the columns in memory."""
        return self._metrics.nbytes + self._stages.nbytes

    def forget(self) -> None:
        """Drop the columns; the next use reads the files again."""
        with self.lock:
            self._metrics, self._stages = MetricColumns(self.path), SpanColumns(self.path)
            self._looked, self._looked_at_stages = -math.inf, -math.inf

    def small(self) -> SmallFiles:
        """Return the content of the small files; files that cannot be read are named in ``problems``."""
        seen = tuple(_stamp(self.path / name) for name in _SMALL)
        if self._small is None or seen != self._seen:
            self._small, self._seen = _small_files(self.path), seen
        return self._small

    def identity(self) -> str:
        """Return a name for the run's cache: the run's id, and a digest of where it is.

        A copied directory has the same id and may grow differently.
        """
        try:
            known = read_json(self.path / layout.ENVIRONMENT).get("run")
        except RunDirectoryError:
            known = None
        where = hashlib.blake2b(os.fsencode(self.path.absolute()), digest_size=6).hexdigest()
        is_plain = isinstance(known, str) and known.isalnum() and len(known) <= 64
        return f"{known}-{where}" if is_plain else where

    def updated(self) -> float | None:
        """Return the time of the last change of the metrics, in seconds since 1970."""
        stamps = [_stamp(self.path / name) for name in (layout.METRICS, layout.ENVIRONMENT)]
        return max((stamp[0] for stamp in stamps if stamp), default=0) / 1e9 or None

    def last_line(self) -> Mapping[str, Any]:
        """Return the last complete line of the metrics without reading the others; empty without one."""
        return _last_line(self.path / layout.METRICS)

    def state(self) -> str:
        """Return ``finished``, ``running`` or ``stopped``."""
        if (self.path / layout.FINISHED).is_file():
            return "finished"
        return "running" if _is_driven(self.path / layout.LOCK, self.updated() or 0.0) else "stopped"

    def headline(self) -> dict[str, JSON]:
        """Return the run's most telling number: its last evaluation, else its last reward or loss."""
        held_out = alike([each for each in self.small().evaluations if not each.set])
        if held_out:
            last = held_out[-1]
            interval: JSON = None if last.interval is None else [finite(end) for end in last.interval]
            return {"name": last.title.lower(), "value": finite(last.value), "interval": interval}
        metrics = self.last_line().get("metrics", {})
        for name in HEADLINES:
            if isinstance(metrics, dict) and isinstance(metrics.get(name), dict):
                value = metrics[name].get("mean")
                is_number = isinstance(value, int | float)
                return {"name": name, "value": finite(value) if is_number else None, "interval": None}
        return {"name": "", "value": None, "interval": None}

    def row(self) -> dict[str, JSON]:
        """Return the run as ``/api/runs`` lists it."""
        small, last = self.small(), self.last_line()
        step, starts = last.get("step", 0), small.starts
        return {
            "run": self.name,
            "path": str(self.path),
            "name": self.path.absolute().name,
            "recipe": _recipe(starts),
            "algorithm": setting(small.config, "algorithm.name"),
            "state": self.state(),
            "steps": step if isinstance(step, int) else 0,
            "of_steps": _of_steps(small.config),
            "started": starts[0].get("started") if starts else None,
            "updated": _iso(self.updated()),
            "headline": self.headline(),
            "problems": [*small.problems],
        }


class WatchedRuns:
    """The runs below some paths. Runs keep their names as long as the server lives.

    Args:
        paths: run directories, or folders of runs.

    Raises:
        RunDirectoryError: a path is missing.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.is_dir():
                raise RunDirectoryError(
                    f"there is no folder {path}",
                    why="rillflow watch shows run directories and folders of runs",
                    fix="name a run directory, or the folder that runs are written to",
                )
        self._paths, self._lock = [path.absolute() for path in paths], Lock()
        self._runs: dict[Path, WatchedRun] = {}
        self._looked = -math.inf

    def all(self) -> list[WatchedRun]:
        """Return the runs that exist now, in the order in which they were found."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_S:
                for path in (run for given in self._paths for run in sorted(_found(given, DEPTH))):
                    self._add(path)
                self._looked = time.monotonic()
            return [run for run in self._runs.values() if layout.is_run_directory(run.path)]

    def one(self, name: str) -> WatchedRun:
        """Return a run by its name.

        Raises:
            LookupError: there is no such run, or it was deleted.
        """
        for run in self.all():
            if run.name == name:
                return run
        raise LookupError(name)

    def trim(self) -> None:
        """Forget the columns of the runs that were used least recently, if all take more than MOST_BYTES."""
        with self._lock:
            held = sorted(self._runs.values(), key=lambda run: run.used, reverse=True)
        total = 0
        for place, run in enumerate(held):
            total += run.nbytes
            if total > MOST_BYTES and place:
                run.forget()

    def _add(self, path: Path) -> None:
        if path in self._runs:
            return
        taken = {run.name for run in self._runs.values()}
        names = [path.name, f"{path.parent.name}~{path.name}"]
        names += [f"{path.name}~{number}" for number in range(2, len(taken) + 3)]
        self._runs[path] = WatchedRun(path, next(name for name in names if name not in taken))


def setting(config: Mapping[str, JSON], dotted: str) -> JSON:
    """Return a setting of a config, or None."""
    value: JSON = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def flat(config: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    """Return a config as dotted keys and values."""
    found: dict[str, JSON] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def finite(value: float) -> float | None:
    """Return a number as JSON has it: None for NaN and infinity."""
    return value if math.isfinite(value) else None


def _found(folder: Path, depth: int) -> Iterable[Path]:
    """Yield the run directories in a folder; nothing inside of a run is searched."""
    if layout.is_run_directory(folder):
        yield folder
        return
    if not depth:
        return
    try:
        inner = [Path(entry) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."]
    except OSError:  # it was deleted, or cannot be read
        return
    for path in inner:
        yield from _found(path, depth - 1)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return the time of a file's last change in nanoseconds and its size; None if it is missing."""
    try:
        known = file.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size


def _small_files(run: Path) -> SmallFiles:
    problems = list[str]()

    def read(what: Any, default: Any) -> Any:
        try:
            return what(run)
        except (RillflowError, OSError) as error:
            problems.append(str(error).partition("\n")[0])
            return default

    return SmallFiles(
        config=read(reader.read_config, {}),
        starts=read(reader.read_starts, []),
        evaluations=read(reader.read_every_evaluation, []),
        is_finished=(run / layout.FINISHED).is_file(),
        problems=problems,
    )


def _last_line(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            end, size = opened.seek(0, os.SEEK_END), 2**14
            while True:
                start = opened.seek(max(0, end - size))
                lines = opened.read(end - start).rpartition(b"\n")[0].split(b"\n")
                if len(lines) > 1 or start == 0:
                    break
                size *= 4
            found = json.loads(lines[-1])
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_driven(lock: Path, updated: float) -> bool:
    """Return whether a process drives the run. Taking its lock to find out could refuse a starting driver."""
    try:
        holder = read_json(lock)
        held = lock.stat().st_ino
    except (RunDirectoryError, OSError):
        return False
    pid, host = holder.get("pid"), holder.get("host")
    if not isinstance(pid, int) or host != socket.gethostname():
        return time.time() - updated < REMOTE_S
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:  # no Linux
        return _is_alive(pid)
    return any(
        line.split()[5].rpartition(":")[2] == str(held) for line in locks.splitlines() if "FLOCK" in line
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _recipe(starts: Sequence[Mapping[str, JSON]]) -> str:
    """Return the recipe's file in the command of the last start; empty if a program started the run."""
    command = starts[-1].get("command") if starts else None
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    return next((word for word in words if word.endswith(".toml")), "")


def _of_steps(config: Mapping[str, JSON]) -> int | None:
    """Return the number of steps of all phases, or None if the config does not say it."""
    steps, warm = setting(config, "algorithm.steps"), setting(config, "warm_start.steps")
    return steps + (warm if isinstance(warm, int) else 0) if isinstance(steps, int) else None


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat("T", "seconds")
