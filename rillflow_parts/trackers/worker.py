"""Worker: the process of one tracker. It reads the run directory and calls the tracker.

    RUN/metrics.jsonl ... ── every half second ──> Tracker.log ──> RUN/trackers/NAME.json: what was sent
    driver ── finished | stopped | failed ──> the rest, Tracker.finish, end
                                              └ the driver waits wait_s, then kills this process group

    main thread      consumes new records; waits for the next look or the driver's word; an exception repeats
                     the call after a pause, so nothing is left out and nothing is sent twice
    control thread   consumes the driver's word; the end of its pipe means that the driver died, and the
                     process group is killed ``wait_s`` later; it also cuts the log of a tracker that prints
    shuts down       after ``finish``; or after a TrackerError, which no repetition would mend

What the tracker prints goes to RUN/trackers/NAME.log.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from rillflow.errors import RillflowError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.ending_signals import ENDING
from rillflow.runs.json_lines import JSON, encode, read_json
from rillflow.runs.lock import Lock
from rillflow.runs.observers import End
from rillflow.runs.reader import read_config, read_starts
from rillflow_parts.trackers.config import CLASS, TrackerConfig
from rillflow_parts.trackers.records import Position, RunRecords
from rillflow_parts.trackers.tracker import TrackedRun, Tracker, TrackerError

SHIPPED = {"wandb": "WandbTracker", "tensorboard": "TensorBoardTracker", "mlflow": "MlflowTracker"}
"""Class of each shipped tracker, in the module of its name."""
LOG_BYTES = 1 << 20
"""Size of a log at which it is emptied."""
NOTHING_LEFT, SOME_LEFT, CANNOT = 0, 1, 2
"""Exit codes: the tracker has everything, some records are left, it cannot work."""

_LOOK_S = 0.5
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TrackerPlan:
    """What a worker is told on its command line."""

    run: str
    """Run directory."""
    name: str
    """Name of the tracker."""
    settings: Mapping[str, Any]
    """Its settings."""
    base: str
    """Folder that the file of a class is relative to."""
    control: int
    """Descriptor from which the driver's word is read."""
    status: int
    """Descriptor for lines to the driver."""
    is_export: bool = False
    """Whether the run is exported: the first exception ends the process."""

    @property
    def common(self) -> TrackerConfig:
        """Settings that every tracker has."""
        names = self.settings.keys() & TrackerConfig.model_fields.keys()
        return TrackerConfig.model_validate({name: self.settings[name] for name in names})


@dataclass(kw_only=True)
class Sent:
    """Content of RUN/trackers/NAME.json."""

    settings: Mapping[str, Any]
    """Settings with which it was sent; others begin a new run of the tracker."""
    kept: Mapping[str, JSON] = field(default_factory=dict)
    """What the tracker's ``start`` returned."""
    position: Position = field(default_factory=Position)
    """What it has."""
    state: str = "running"
    """``running``, or how it was finished."""

    @classmethod
    def read(cls, file: Path, settings: Mapping[str, Any]) -> Sent:
        """Return what was sent with these settings; nothing if they have changed.

        Raises:
            TrackerError: the file is damaged.
        """
        common = TrackerConfig.model_fields
        settings = {name: value for name, value in settings.items() if name not in common}
        if not file.exists():
            return cls(settings=settings)
        try:
            found = cast(Mapping[str, Any], read_json(file))
            if found["settings"] != json.loads(json.dumps(settings)):
                return cls(settings=settings)
            position = Position(**found["position"])
            return cls(settings=settings, kept=found["kept"], position=position, state=found["state"])
        except (RunDirectoryError, KeyError, TypeError) as error:
            raise TrackerError(
                f"{file} is damaged",
                why=f"{type(error).__name__}: {error}",
                fix="remove it: the tracker then gets a new run with all steps",
            ) from None

    def write(self, file: Path) -> None:
        """Replace the file."""
        fresh = file.with_suffix(".new")
        fresh.write_bytes(encode(asdict(self)))
        fresh.replace(file)


class Control(threading.Thread):
    """Thread that waits for the driver's word."""

    def __init__(self, plan: TrackerPlan, wait_s: float) -> None:
        super().__init__(daemon=True)
        self._plan, self._wait_s = plan, wait_s
        self.ended = threading.Event()
        """Set when the run has ended."""
        self.state: End = "failed"
        """How it ended."""

    def run(self) -> None:
        """Wait for the word, keep the log short, and kill a hanging process whose driver died."""
        deadline, word, is_open = float("inf"), b"", True
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self._plan.control] if is_open else [], [], [], 1.0)
            if ready:
                piece = os.read(self._plan.control, 64)
                word, is_open = word + piece, bool(piece)
                if word.endswith(b"\n"):
                    self.state = cast(End, word.decode().strip())
                    self.ended.set()
                if not is_open:
                    deadline = time.monotonic() + self._wait_s
                    self.ended.set()
            with contextlib.suppress(OSError):
                if os.fstat(1).st_size > LOG_BYTES:
                    os.ftruncate(1, 0)
        os.killpg(0, signal.SIGKILL)


class Worker:
    """Sends the records of a run to its tracker."""

    def __init__(self, plan: TrackerPlan) -> None:
        self._plan = plan
        self._run = Path(plan.run)
        self._file = state_file(self._run, plan.name)
        self._sent = Sent(settings=plan.settings)
        self._records = RunRecords(self._run)
        self._control = Control(plan, plan.common.wait_s)
        self._tracker: Tracker | None = None
        self._lock: Lock | None = None
        self._trouble = ""

    def run(self) -> int:
        """Send records until the run has ended; return the exit code."""
        self._control.start()
        pause_s = 0.0
        while True:
            is_last = self._control.ended.is_set()
            try:
                self._send()
                if self._trouble:
                    self._say("works again")
                    self._trouble = ""
                if is_last:
                    self._finish()
                    return NOTHING_LEFT
                pause_s = 0.0
            except TrackerError as error:
                self._say(one_line(error))
                return CANNOT
            except Exception as error:  # noqa: BLE001  a tracker may raise anything, and the run must not end
                self._troubled(error)
                if self._plan.is_export:
                    return SOME_LEFT
                pause_s = min(_LONGEST_PAUSE_S, max(1.0, 2 * pause_s))
            if is_last:
                time.sleep(pause_s)
            else:
                self._control.ended.wait(max(_LOOK_S, pause_s))

    def _send(self) -> None:
        """Send what is new."""
        tracker = self._started()
        for record in self._records.new(self._sent.position):
            tracker.log(record.step, record.values, record.time_s)
            self._sent.position.add(record)
            self._sent.write(self._file)
        count = self._plan.common.samples
        for step, rows in self._records.sampled(self._sent.position, count) if count else ():
            tracker.samples(step, rows)
            self._sent.position.sampled = step
            self._sent.write(self._file)

    def _started(self) -> Tracker:
        """Return the tracker, started."""
        if self._tracker is not None:
            return self._tracker
        self._lock = self._lock or Lock(self._file.with_suffix(".lock"))
        self._sent = Sent.read(self._file, self._plan.settings)
        tracker = tracker_class(self._plan.name, self._plan.settings, Path(self._plan.base))
        self._sent.kept = dict(tracker.start(self._described()))
        self._sent.state = "running"
        self._sent.write(self._file)
        self._tracker = tracker
        return tracker

    def _described(self) -> TrackedRun:
        config, starts = read_config(self._run), read_starts(self._run)
        began = str(starts[0].get("started", "")) if starts else ""
        identity = read_json(self._run / layout.ENVIRONMENT) if starts else {}
        tags = cast(Any, config.get("run") or {}).get("tags", ())
        return TrackedRun(
            path=self._run.absolute(),
            id=str(identity.get("run", "")),
            name=self._run.absolute().name,
            tags=tuple(map(str, tags)),
            config=config,
            started=datetime.fromisoformat(began).timestamp() if began else time.time(),
            step=self._sent.position.step,
            kept=self._sent.kept,
        )

    def _finish(self) -> None:
        self._started().finish(self._control.state)
        self._sent.state = self._control.state
        self._sent.write(self._file)

    def _troubled(self, error: Exception) -> None:
        told = one_line(error)
        if told != self._trouble:
            self._trouble = told
            again = "" if self._plan.is_export else "; it is tried again, and training goes on"
            self._say(f"{told}{again}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the driver has died
            os.write(self._plan.status, f"{text}\n".encode())


def one_line(error: Exception) -> str:
    """Return an error in one line."""
    parts = [error.what, error.why, error.fix] if isinstance(error, RillflowError) else [f"{error}"]
    text = "; ".join(" ".join(part.split()) for part in parts if part)
    return text[:500] if isinstance(error, RillflowError) else f"{type(error).__name__}: {text[:500]}"


def tracker_class(name: str, settings: Mapping[str, Any], base: Path) -> Tracker:
    """Return a tracker, made with its settings.

    Raises:
        TrackerError: its module or package is missing, or it has no such class.
    """
    own = settings.get(CLASS)
    if own is None:
        module = importlib.import_module(f"rillflow_parts.trackers.{name}")
        return cast(Tracker, vars(module)[SHIPPED[name]](settings))
    file, _, word = str(own).rpartition(":")
    made = vars(_module(base / file)).get(word)
    if not isinstance(made, type):
        raise TrackerError(
            f"{file} has no class {word!r}", fix=f"define it, or change run.trackers.{name}.class"
        )
    common = {CLASS, *TrackerConfig.model_fields}
    return cast(Tracker, made(**{key: value for key, value in settings.items() if key not in common}))


def _module(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise TrackerError(f"there is no Python file {file}", fix="correct the tracker's class")
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state_file(run: Path, name: str) -> Path:
    """Return the file that keeps what a tracker has."""
    return run / layout.TRACKERS / f"{name}.json"


def main(plan: str) -> int:
    """Run the worker of a plan in JSON; leave signals to the driver, and the processor to training."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    return Worker(TrackerPlan(**json.loads(plan))).run()


if __name__ == "__main__":
    code = main(sys.argv[1])
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # threads of a tracker must not hold the end
