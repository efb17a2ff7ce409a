"""Process: start the worker of each tracker, pass on what it says, and end it in a bounded time.

    start ─> a process for each tracker ── lines ──> a thread each ──> progress.note
    end(state) ── the word ──> all of them ── wait, wait_s of each at most ──> killed, with what was not sent

Training writes its run directory as without trackers; nothing waits for a tracker before the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rillflow.errors import ConfigError, RunDirectoryError
from rillflow.isolation.child_process import ChildProcess, python_environment
from rillflow.records.metrics import Metrics
from rillflow.runs import layout
from rillflow.runs.durable import writing
from rillflow.runs.observers import End
from rillflow.runs.reader import Evaluation
from rillflow_parts.trackers.records import Position, RunRecords
from rillflow_parts.trackers.tracker import TrackerError
from rillflow_parts.trackers.worker import CANNOT, NOTHING_LEFT, Sent, TrackerPlan, state_file

_QUIET_S = 3.0


class TrackerProcess:
    """The process of one tracker.

    Args:
        run: the run directory.
        name: name of the tracker.
        settings: its settings.
        base: folder that the file of its class is relative to.
        say: receives its lines, in another thread.
        is_export: whether its first exception ends it.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        settings: Mapping[str, Any],
        base: Path,
        say: Callable[[str], None],
        *,
        is_export: bool = False,
    ) -> None:
        self.name, self._run, self._say, self._settings = name, run, say, settings
        folder = run / layout.TRACKERS
        with writing(folder):
            folder.mkdir(exist_ok=True)
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        plan = TrackerPlan(
            run=str(run.absolute()),
            name=name,
            settings=settings,
            base=str(base.absolute()),
            control=control,
            status=status,
            is_export=is_export,
        )
        self.wait_s = plan.common.wait_s
        """Longest wait at the end, in seconds."""
        words = [sys.executable, "-m", "rillflow_parts.trackers.worker", json.dumps(asdict(plan))]
        with (folder / f"{name}.log").open("ab") as log:
            self._process = ChildProcess(
                words, descriptors=[control, status], output=log, environment=python_environment()
            )
        os.close(control)
        os.close(status)
        self._reader = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        with open(self._status, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123  a descriptor
            for line in lines:
                self._say(f"tracker {self.name}: {line.rstrip()}")

    def end(self, state: End) -> None:
        """Tell the process how the run ended."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._control, f"{state}\n".encode())

    def ends_within(self, limit_s: float) -> bool:
        """Wait for the end of the process, and return whether it has ended."""
        return self._process.ends_within(limit_s)

    def wait(self, limit_s: float | None) -> int:
        """Wait for the end of the process, then kill it with everything that it started; return its code."""
        self._process.ends_within(limit_s)
        code = self._process.end_all()
        with contextlib.suppress(OSError):
            os.close(self._control)
        self._reader.join(1.0)
        return code

    def left(self) -> str:
        """Return what the tracker does not have, in words; empty if it has everything."""
        try:
            position = position_of(self._run, self.name, self._settings)
        except TrackerError:
            return "all records"
        steps = [each.step for each in RunRecords(self._run).new(position) if each.set is None]
        evaluations = [each for each in RunRecords(self._run).new(position) if each.set is not None]
        parts = [f"{len(steps)} steps"] if steps else []
        parts += [f"{len(evaluations)} evaluations"] if evaluations else []
        return " and ".join(parts)


class Trackers:
    """The trackers of a run, as its observer: they read the run directory in processes of their own.

    Args:
        run: the run directory.
        named: settings of each tracker.
        base: folder of the recipe.
        say: shows the user a line.
    """

    def __init__(
        self, run: Path, named: Mapping[str, Mapping[str, Any]], base: Path, say: Callable[[str], None]
    ) -> None:
        self._run, self._named, self._base, self._say = run, named, base, say
        self._processes: list[TrackerProcess] = []

    def start(self) -> None:
        """Start the processes; the run directory has this start's environment."""
        for name, settings in self._named.items():
            try:
                self._processes.append(TrackerProcess(self._run, name, settings, self._base, self._say))
            except (OSError, RunDirectoryError) as error:
                self._say(f"tracker {name}: {error}; the run goes on without it")

    def step(self, step: int, phase: str, metrics: Metrics) -> None:
        """Leave the step to the processes, which read metrics.jsonl."""

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Leave the evaluation to the processes, which read evaluations.jsonl."""

    def finish(self, state: End) -> None:
        """Tell the processes how the run ended, wait for them in a bounded time, and end them."""
        for each in self._processes:
            each.end(state)
        began, killed = time.monotonic(), False
        for each in self._processes:
            try:
                if not (killed or each.ends_within(min(_QUIET_S, each.wait_s))):
                    self._say(f"waiting for the tracker {each.name}, {each.wait_s:g} s at most")
                spent_s = time.monotonic() - began
                code = each.wait(0.0 if killed else max(0.0, each.wait_s - spent_s))
            except KeyboardInterrupt:  # a signal during the wait: nothing is left to wait for
                killed, code = True, each.wait(0.0)
            self._tell(each, code)
        self._processes.clear()

    def _tell(self, process: TrackerProcess, code: int) -> None:
        left = process.left() if code != NOTHING_LEFT else ""
        if left or code not in (NOTHING_LEFT, CANNOT):
            why = "" if code == CANNOT else f" within {process.wait_s:g} s"
            what = f"{left} were not sent{why}" if left else f"it did not finish{why}"
            self._say(f"tracker {process.name}: {what}; rillflow track {self._run} sends the rest")


def export(
    run: Path, name: str, settings: Mapping[str, Any], base: Path, state: End, say: Callable[[str], None]
) -> bool:
    """Send a run directory to one tracker; return whether it has everything.

    Raises:
        ConfigError: the process could not be started.
    """
    try:
        process = TrackerProcess(run, name, settings, base, say, is_export=True)
    except OSError as error:
        raise ConfigError(f"the tracker {name} cannot be started", why=str(error)) from None
    process.end(state)
    try:
        return process.wait(None) == NOTHING_LEFT
    except KeyboardInterrupt:
        process.wait(0.0)
        raise


def position_of(run: Path, name: str, settings: Mapping[str, Any]) -> Position:
    """Return what a tracker has."""
    return Sent.read(state_file(run, name), settings).position
