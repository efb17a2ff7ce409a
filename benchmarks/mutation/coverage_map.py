"""Which tests run which line: measured once, and again for test files whose code has changed.

    test file ── run under coverage ──> record: lines by test, seconds, red tests, digests of files it runs
    record ── kept while the test file, its conftests and all files that it runs are the same

A test file counts as changed when a file changes whose lines one of its tests runs. Tests that fail here, on
code without a fault, or that take more than CPU_LIMIT_S processor seconds are no witnesses.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pytest_runs import Runner

CPU_LIMIT_S = 2.5
"""Processor seconds, under coverage, that a test may take to be a witness."""
WALL_LIMIT_S = 60
"""Seconds of the clock, likewise: a test may wait for its children."""


@dataclass(kw_only=True)
class CoverageMap:
    """Tests by line, and their costs."""

    lines: dict[str, dict[int, list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Tests by file and line."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Processor seconds of every test that passed."""

    def tests(self, path: str, line: int) -> list[str]:
        """Return tests of the line, or of its file where no test runs the line, fastest first.

        Lines that run at import belong to no test. Tests of the file's own package come first.
        """
        of_file = self.lines.get(path, {})
        found = set(of_file.get(line, ())) or {test for tests in of_file.values() for test in tests}
        own = own_tests(path)
        found = found or {test for test in self.seconds if test.startswith(own)}
        return sorted(
            found & self.seconds.keys(), key=lambda test: (not test.startswith(own), self.seconds[test])
        )


def own_tests(path: str) -> str:
    """Return the folder of unit tests that mirrors a file's package."""
    return f"tests/unit/{path.split('/')[1]}/"


def measured(runner: Runner, files: Sequence[str], folder: Path) -> CoverageMap:
    """Return the map of test files; records in ``folder`` that still hold are used."""
    folder.mkdir(parents=True, exist_ok=True)
    by_folder = defaultdict(list)
    for file in files:
        if not holds(record_of(file, folder), runner.copy):
            by_folder[Path(file).parent].append(file)
    for number, (where, stale) in enumerate(by_folder.items(), 1):
        print(f"coverage {number}/{len(by_folder)}: {where}, {len(stale)} files", flush=True)
        measure(runner, stale, folder)
    return merged(filter(None, (record_of(file, folder) for file in files)))


def measure(runner: Runner, files: Sequence[str], folder: Path) -> None:
    """Run test files under coverage and write their records."""
    lines = runner.copy / "lines.json"
    lines.unlink(missing_ok=True)
    limits = (f"--watch-cpu={CPU_LIMIT_S}", f"--timeout={WALL_LIMIT_S}")
    outcome = runner.run(files, 3600.0, f"--watch-lines={lines}", *limits)
    by_test = json.loads(lines.read_text()) if lines.exists() else {}
    for file in files:
        own = {test: by_test.get(test, {}) for test in outcome.seconds if test.split("::")[0] == file}
        red = [test for test in own if test in outcome.failed]
        inputs = {path for paths in own.values() for path in paths} | {file, *conftests(file, runner.copy)}
        record = {
            "inputs": {path: digest(runner.copy / path) for path in sorted(inputs)},
            "seconds": {test: outcome.seconds[test] for test in own if test not in red},
            "red": red,
            "lines": {test: paths for test, paths in own.items() if test not in red},
        }
        record_path(file, folder).write_text(json.dumps(record))
        if red or not own:
            print(f"  no witnesses: {', '.join(red) or 'all of ' + file}", flush=True)


def merged(records: Iterable[dict[str, Any]]) -> CoverageMap:
    """Return the map of records."""
    whole = CoverageMap()
    for record in records:
        whole.seconds |= record["seconds"]
        for test, paths in record["lines"].items():
            for path, lines in paths.items():
                for line in lines:
                    whole.lines[path][line].append(test)
    return whole


def holds(record: dict[str, Any] | None, root: Path) -> bool:
    """Whether all files that a record depends on are the same."""
    return record is not None and all(
        (root / path).exists() and digest(root / path) == known for path, known in record["inputs"].items()
    )


def conftests(file: str, root: Path) -> list[str]:
    """Return the conftest.py files that pytest loads for a test file."""
    folders = [folder for folder in Path(file).parents if (root / folder / "conftest.py").exists()]
    return [str(folder / "conftest.py") for folder in folders]


def digest(path: Path) -> str:
    """Return a digest of a file's bytes."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def record_path(file: str, folder: Path) -> Path:
    """Return the place of a test file's record."""
    return folder / f"{file.removesuffix('.py').replace('/', '.')}.json"


def record_of(file: str, folder: Path) -> dict[str, Any] | None:
    """Return a test file's record, if there is one."""
    path = record_path(file, folder)
    return json.loads(path.read_text()) if path.exists() else None
