"""A pytest plugin: record every test's start, outcome and seconds, and optionally the lines that it runs.

child_lines.py records the lines of processes that a test starts.

The record survives a killed process: every event is one JSON line, written at once. A test with a start but
no outcome is the one that ran when the process died.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import coverage
import pytest
from coverage import Coverage, CoverageData
from coverage.exceptions import CoverageException
from studied import packages

_COVERAGE = Path(coverage.__file__).parent
_SIGNALS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options to pytest's command line."""
    parser.addoption("--watch-events", help="JSON lines of starts and outcomes")
    parser.addoption("--watch-lines", help="JSON of the lines that each test runs; slow")
    parser.addoption("--watch-cpu", type=float, default=0.0, help="processor seconds a test may take; 0: any")
    parser.addoption("--watch-wall", type=float, default=0.0, help="seconds that a test may take; 0: any")


def pytest_configure(config: pytest.Config) -> None:
    """Start watching before any import of the package."""
    if config.option.watch_events:
        watch = Watch(Path(config.option.watch_events), config.option.watch_lines, config.rootpath)
        watch.limit_s, watch.wall_s = config.option.watch_cpu, config.option.watch_wall
        config.pluginmanager.register(watch, "mutation-watch")


class Watch:
    """Events of one pytest process, and its coverage if a file for lines is given."""

    def __init__(self, events: Path, lines: str | None, root: Path) -> None:
        self._events = events.open("a")
        self._lines = Path(lines) if lines else None
        self._root = root
        self._coverage: Any = None
        self._begun_s = 0.0
        self.limit_s, self.wall_s = 0.0, 0.0
        if self._lines:
            self._coverage = Coverage(data_file=None, source=[*map(str, packages(root))], config_file=False)
            self._coverage.start()
            self._children = self._lines.with_suffix(".children")
            shutil.rmtree(self._children, ignore_errors=True)
            self._children.mkdir()
            os.environ |= {"WATCH_LINES": str(self._children), "WATCH_TEST": ""}

    def _write(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)
        self._begun_s = processor_s()
        for timer, limit_s in ((signal.ITIMER_PROF, self.limit_s), (signal.ITIMER_REAL, self.wall_s)):
            if limit_s:
                signal.signal(_SIGNALS[timer], stop_test)
                signal.setitimer(timer, limit_s)
        if self._coverage:
            self._coverage.switch_context(nodeid)
            os.environ["WATCH_TEST"] = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._write(test=nodeid(report), failed=report.failed)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        for timer in _SIGNALS if self.limit_s or self.wall_s else ():
            signal.setitimer(timer, 0)
        self._write(finished=nodeid, seconds=processor_s() - self._begun_s)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(test=nodeid(report) or "collection", failed=True)

    def pytest_unconfigure(self) -> None:
        if self._coverage and self._lines:
            self._coverage.stop()
            own = lines_by_test(self._coverage.get_data(), self._root)
            children = lines_of_children(self._children, self._root)
            self._lines.write_text(json.dumps({"own": own, "children": children}))


def processor_s() -> float:
    """Return the CPU seconds of this process and its ended children, which machine load does not change."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def stop_test(number: int, frame: FrameType | None) -> None:
    """Fail the running test because it exceeds a limit.

    An error inside coverage would leave its lock taken, so there the signal comes again a little later.
    """
    while frame is not None:
        if Path(frame.f_code.co_filename).parent == _COVERAGE:
            timer = next(timer for timer, each in _SIGNALS.items() if each == number)
            signal.setitimer(timer, 0.01)
            return
        frame = frame.f_back
    pytest.fail("takes longer than --watch-cpu or --watch-wall allows", pytrace=False)


def nodeid(report: Any) -> str:
    """Return a report's test id as a str, for mypy."""
    return str(report.nodeid)


def lines_by_test(data: Any, root: Path) -> dict[str, dict[str, list[int]]]:
    """Return the lines of every file by the test that runs them; "" is import time."""
    found: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        path = str(Path(file).relative_to(root))
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                found.setdefault(test, {}).setdefault(path, []).append(line)
    return found


def lines_of_children(folder: Path, root: Path) -> dict[str, dict[str, list[int]]]:
    """Return the lines that children ran, by the test that started them."""
    found: dict[str, dict[str, set[int]]] = {}
    for file in folder.iterdir():
        data = CoverageData(str(file))
        try:
            data.read()
        except CoverageException:
            continue  # its process was killed during the write
        for test, paths in lines_by_test(data, root).items():
            for path, lines in paths.items():
                found.setdefault(test, {}).setdefault(path, set()).update(lines)
    return {test: {path: sorted(each) for path, each in paths.items()} for test, paths in found.items()}
