"""Watched runs: a run in its own process, with the times of its steps, its processes and its output.

command ─> process ─┬─ metrics.jsonl ─> steps at any time ─> steps per minute between two times
                    ├─ output ─> the time at which it reports a lost rank
                    ├─ replicas/PID, written by the engine ─> the time at which a new replica has its model
                    └─ its children ─> ranks to disturb; none may be left after the end
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns

PROGRAM = "import sys; from rillflow.cli.main import main; sys.exit(main(sys.argv[1:]))"
REPLICAS = "REPLICAS"
"""Environment variable that names the folder of replicas."""
GONE_S = 5.0
"""Seconds in which the other processes of a run end after the driver."""
LONG_S = 600.0
"""Longest wait for any condition, in seconds."""
TAKEN = "its groups are sampled again"
RESTARTED = "all ranks start again"


class Announced(NativeEngine):
    """The native engine; it creates a file that is named after its process id."""

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        (Path(os.environ[REPLICAS]) / str(os.getpid())).touch()


class WatchedRun:
    """A run of a recipe in its own process.

    Args:
        folder: an empty folder with the recipe ``run.toml``.
        settings: further settings.
        started: starts a command, for example on another node; None starts it on this machine.
        seen: path of the folder as the command sees it.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        started: Callable[[Sequence[str], Mapping[str, str]], subprocess.Popen[str]] | None = None,
        seen: Path | None = None,
    ) -> None:
        self.folder, self.run, self.output = folder, folder / "run", folder / "output.txt"
        (folder / "replicas").mkdir()
        at = seen or folder
        words = ["run", str(at / "run.toml"), "--dir", str(at / "run")]
        words += [word for each in settings for word in ("--set", each)]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {REPLICAS: str(at / "replicas"), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        if started is None:
            with self.output.open("w") as said:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *words],
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    text=True,
                )
        else:
            self.process = started([sys.executable, "-c", PROGRAM, *words], env)
        self.driver = psutil.Process(self.process.pid)
        self.seen = {self.driver}
        self._times, self._steps = [time.monotonic()], [0]

    def look(self) -> None:
        """Record the current steps and processes."""
        steps = self.steps
        if steps != self._steps[-1]:
            now = time.monotonic()
            if steps < self._steps[-1]:  # steps after the last checkpoint are lost at once
                self._times.append(now)
                self._steps.append(self._steps[-1])
            self._times.append(now)
            self._steps.append(steps)
        with suppress(psutil.NoSuchProcess):
            self.seen.update(self.driver.children(recursive=True))

    def until(self, is_so: Callable[[], bool], limit_s: float = LONG_S) -> float:
        """Watch until a condition holds; return the time.

        Raises:
            RuntimeError: the run has ended, or it took too long.
        """
        end = time.monotonic() + limit_s
        while not is_so():
            self.look()
            if self.process.poll() is not None or time.monotonic() > end:
                why = f"after {limit_s:g} s" if self.process.poll() is None else "the run has ended"
                raise RuntimeError(f"{why}\n{self.said[-4000:]}")
            time.sleep(0.1)
        self.look()
        return time.monotonic()

    def until_time(self, moment: float) -> float:
        """Watch until a time."""
        return self.until(lambda: time.monotonic() >= moment)

    @property
    def steps(self) -> int:
        """Finished steps of the run."""
        file = self.run / layout.METRICS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    @property
    def said(self) -> str:
        """Output of the run so far."""
        return self.output.read_text("utf-8", "replace") if self.output.exists() else ""

    @property
    def losses(self) -> int:
        """Number of lost ranks that the run has reported."""
        said = " ".join(self.said.split())
        return said.count(TAKEN) + said.count(RESTARTED)

    @property
    def replicas(self) -> list[int]:
        """Ids of running processes that have made an engine, in the order in which they made it."""
        files = sorted((self.folder / "replicas").iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return [int(file.name) for file in files if runs(int(file.name))]

    @property
    def made(self) -> int:
        """Number of engines made so far."""
        return len(list((self.folder / "replicas").iterdir()))

    @property
    def trainer(self) -> int:
        """Process id of the training rank: the one that is no replica and has no reward processes."""
        found = [
            each.pid
            for each in self.driver.children(recursive=True)
            if title(each).startswith("ray::Rank") and each.pid not in self.replicas and not each.children()
        ]
        (one,) = found
        return one

    def rate(self, first: float, last: float) -> float:
        """Return steps per minute between two times; repeated steps count once."""
        return per_minute(self._times, self._steps, first, last)

    def end(self, number: int) -> int:
        """Send a signal to the driver; return its exit code."""
        within = self.driver.children() if "nsenter" in title(self.driver) else [self.driver]
        within[0].send_signal(number)
        limit = time.monotonic() + LONG_S
        while self.process.poll() is None and time.monotonic() < limit:
            self.look()
            time.sleep(0.1)
        return int(self.process.wait(1))

    def left(self) -> list[int]:
        """Return the processes of the run that still exist some seconds after its end."""
        end = time.monotonic() + GONE_S
        while (found := [each.pid for each in self.seen if runs(each.pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def kill(self) -> None:
        """Kill the run at once; its cluster ends with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def per_minute(times: Sequence[float], steps: Sequence[int], first: float, last: float) -> float:
    """Return steps per minute between two times, from the number of steps at some times."""
    begin, end = (float(np.interp(each, times, steps)) for each in (first, last))
    return 60 * (end - begin) / (last - first)


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def runs(pid: int) -> bool:
    """Return whether a process is running or stopped."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wrong_rows(run: Path, samples: int, prompts: int, bound: int) -> dict[str, int]:
    """Return how many rows were trained twice, are missing in a trained group, or were never trained.

    A prompt of an epoch counts as never trained once a step trains rows of the second epoch after it. The
    count requires that ``bound`` steps are less than an epoch.

    Args:
        run: the directory of a run that has ended.
        samples: rows of a prompt.
        prompts: prompts of an epoch.
        bound: freshness of the run.
    """
    rows, steps = Counter[tuple[int, int, int]](), layout.rollout_files(run)
    for step in steps:
        columns = rollout_columns(run, step)
        rows.update(zip(columns["epoch"], columns["prompt_id"], columns["sample"], strict=True))
    groups = Counter((epoch, prompt) for epoch, prompt, _ in rows)
    last = max((epoch for epoch, _ in groups), default=0)
    whole = Counter(epoch for epoch, _ in groups)
    assert bound < 10, "the groups in flight are fewer than an epoch"
    return {
        "doubled": sum(count - 1 for count in rows.values()),
        "missing": sum(samples - count for count in groups.values()),
        "never trained": sum(prompts - whole[epoch] for epoch in range(last - 1)) * samples,
    }
