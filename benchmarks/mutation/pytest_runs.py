"""Run tests in a copy; report passed and failed tests, and the one that ran when the time ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from copies import interpreter
from studied import packages

FLAGS = ("-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "watch_plugin")

TOOLS = ("hypothesis", "coverage")
"""Libraries that are loaded once, in addition to the imports of the package."""
NOT_TWICE = ("ray", "__main__")
"""Modules that are not loaded in advance, in addition to the mutated code.

Importing Ray fixes settings of the tests that start it.
"""
_PROBE = """
import contextlib, importlib, json, sys
from pathlib import Path
from studied import packages
for package in packages(Path()):
    for file in sorted(package.rglob("*.py")):
        if file.stem not in ("__init__", "__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(file.relative_to(package.parent).with_suffix("").parts))
print(json.dumps(list(sys.modules)))
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one pytest run."""

    seconds: dict[str, float]
    """CPU seconds of every test that ended."""
    failed: tuple[str, ...]
    """Tests and files that failed, in order."""
    ended: str
    """"passed", "failed", "time limit", or how the process died."""

    @property
    def first_red(self) -> str:
        """The first test that failed; if none did, the way the run ended; "" if all passed."""
        return self.failed[0] if self.failed else "" if self.ended == "passed" else self.ended


class Runner:
    """One warm pytest process for one copy."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        modules = copy / "modules.json"
        modules.write_text(json.dumps([*TOOLS, *libraries(copy)]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [
            interpreter(copy),
            "-m",
            "pytest",
            *FLAGS[3:],
            "-p",
            "warm_plugin",
            "-s",
            f"--serve-runs={modules}",
        ]
        self._server = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tests: Sequence[str], limit_s: float, *more: str) -> Outcome:
        """Run tests in their order, with ``more`` flags for pytest and a limit in wall-clock seconds."""
        assert self._server.stdin and self._server.stdout
        events = self.copy / "events.jsonl"
        events.unlink(missing_ok=True)
        words = [*FLAGS, f"--watch-events={events}", *more]
        self._server.stdin.write(json.dumps([*words, *tests]) + "\n")
        self._server.stdin.flush()
        process = int(self._server.stdout.readline())
        late = threading.Event()

        def kill() -> None:
            late.set()
            os.killpg(process, signal.SIGKILL)

        timer = threading.Timer(limit_s, kill)
        timer.start()
        status = int(self._server.stdout.readline())
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # children that the tests left running
        return read(events, "time limit" if late.is_set() else ended(status))

    def close(self) -> None:
        """End the process."""
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()


def libraries(copy: Path) -> list[str]:
    """Return every module that the package's modules import, in the order of their first import."""
    text = subprocess.check_output([interpreter(copy), "-W", "ignore", "-c", _PROBE], cwd=copy, text=True)
    found: list[str] = json.loads(text.splitlines()[-1])
    left_out = {*NOT_TWICE, *(package.name for package in packages(copy))}
    return [name for name in found if name.split(".")[0] not in left_out]


def ended(status: int) -> str:
    """Name an exit status of pytest."""
    if status in (0, 1):
        return ("passed", "failed")[status]
    return f"pytest died by signal {-status}" if status < 0 else f"pytest ended with {status}"


def read(events: Path, how: str) -> Outcome:
    """Return the outcome from a run's events."""
    seconds: dict[str, float] = {}
    failed: dict[str, None] = {}
    running = ""
    for line in events.read_text().splitlines() if events.exists() else ():
        event = json.loads(line)
        match event:
            case {"started": test}:
                running = test
            case {"finished": test, "seconds": spent}:
                running, seconds[test] = "", spent
            case {"test": test, "failed": True}:
                failed[test] = None
    if running and how not in ("passed", "failed"):
        failed[running] = None
    return Outcome(seconds=seconds, failed=tuple(failed), ended=how)
