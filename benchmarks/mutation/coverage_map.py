"""Tests by line: measured once, and again for test files that have changed.

    test file ── run under coverage ──> record: lines by test, seconds, red tests, digests of files it runs
    record ── kept while the test file and its conftests are unchanged
    code changes ── diff of old and new text ──> lines keep their tests, new lines get their neighbours' tests

Child processes of a test are measured as well. Their lines belong to the test that started them. A fixture's
process can outlive its test, so the lines also belong to later tests of the file.

A carried line can name a test that no longer runs it: such a test costs time and detects nothing. Tests that
fail on unchanged code are no witnesses. A test that takes more than CPU_LIMIT_S CPU seconds is stopped. It
keeps the lines that it ran, as a witness that comes after the fast ones.
"""

from __future__ import annotations

import ast
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pytest_runs import Runner
from studied import files as files_of_code
from studied import is_studied, own_tests

CPU_LIMIT_S = {
    "tests/unit": 2.5,
    "tests/parts": 2.5,
    "plugins": 2.5,
    "tests/simulation": 15.0,
    "tests/flows": 15.0,
    "tests/distributed": 15.0,
}
"""CPU seconds under coverage after which a test of a folder is a slow witness."""
SLOW = 2.0
"""Assumed CPU time of a slow witness, in limits."""
CONTRACTS = (
    "tests/unit/config/test_public_settings.py",
    "tests/parts/endpoint/test_public_settings.py",
    "plugins/service/tests/test_public_settings.py",
)
"""Tests of declarations, which run when a module is imported."""
WALL_LIMIT_S = 60
"""The same limit in wall-clock seconds: a test may wait for its children."""


@dataclass(kw_only=True)
class CoverageMap:
    """Tests by line, and their costs."""

    lines: dict[str, dict[int, list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Tests by file and line."""
    started: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(dict))
    """Test files by file and line, for lines that a child ran."""
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of every witness."""
    in_functions: dict[str, set[int]] = field(default_factory=dict)
    """Lines of function bodies by file; the others run when a module is imported."""

    def tests(self, path: str, line: int) -> list[str]:
        """Return the witnesses of a line: tests that run it, then other tests of files whose children do.

        Declarations run at import, in whichever test comes first, so the tests of declarations are also their
        witnesses. A line that no test runs gets the tests of its file, or else of its package. Among equals,
        tests of the own package come first, then fast ones.
        """
        own, known = own_tests(path), self.lines.get(path, {})
        exact = set(known.get(line, ()))
        if line not in self.in_functions.get(path, {line}):
            exact |= {test for test in self.seconds if test.startswith(CONTRACTS)}
        files = self.started.get(path, {}).get(line, set())
        near = {test for test in self.seconds if test.split("::")[0] in files} - exact
        if line not in known:
            of_file = {test for tests in known.values() for test in tests}
            near |= of_file or {test for test in self.seconds if test.startswith(own)}

        def rank(test: str) -> tuple[bool, bool, bool, float]:
            return (
                test not in exact,
                not test.startswith(CONTRACTS),
                not test.startswith(own),
                self.seconds[test],
            )

        return sorted((exact | near) & self.seconds.keys(), key=rank)


def measured(runner: Runner, files: Sequence[str], folder: Path, *, backwards: bool = False) -> CoverageMap:
    """Return the map of test files; valid records in ``folder`` are reused.

    Two processes can share the work. One starts with the last folder of tests (``backwards``), and each skips
    the files that the other has recorded meanwhile.
    """
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for path in files_of_code(runner.copy):
        text_of(digest(path), folder).write_bytes(path.read_bytes())
    by_folder = defaultdict(list)
    for file in files:
        by_folder[Path(file).parent].append(file)
    folders = list(by_folder)[::-1] if backwards else list(by_folder)
    for number, where in enumerate(folders, 1):
        stale = [file for file in by_folder[where] if not holds(record_of(file, folder), runner.copy, folder)]
        if stale:
            print(f"coverage {number}/{len(folders)}: {where}, {len(stale)} files", flush=True)
            measure(runner, stale, folder)
    return merged(filter(None, (record_of(file, folder) for file in files)), runner.copy, folder)


def measure(runner: Runner, files: Sequence[str], folder: Path) -> None:
    """Run test files under coverage and write their records."""
    lines = runner.copy / "lines.json"
    lines.unlink(missing_ok=True)
    limit_s = next(limit for where, limit in CPU_LIMIT_S.items() if files[0].startswith(f"{where}/"))
    limits = (f"--watch-cpu={limit_s}", f"--watch-wall={WALL_LIMIT_S}", "--timeout=0")
    outcome = runner.run(files, 3600.0, f"--watch-lines={lines}", *limits)
    told = json.loads(lines.read_text()) if lines.exists() else {"own": {}, "children": {}}
    for file in files:
        mine = [test for test in outcome.seconds if test.split("::")[0] == file]
        own = {test: added(told["own"].get(test, {}), told["children"].get(test, {})) for test in mine}
        slow = [test for test in own if test in outcome.failed and outcome.seconds[test] > 0.9 * limit_s]
        red = [test for test in own if test in outcome.failed and test not in slow]
        inputs = {path for paths in own.values() for path in paths} | {file, *conftests(file, runner.copy)}
        record = {
            "file": file,
            "inputs": {path: digest(runner.copy / path) for path in sorted(inputs)},
            "seconds": {
                test: SLOW * limit_s if test in slow else outcome.seconds[test]
                for test in own
                if test not in red
            },
            "children": added(*(told["children"].get(test, {}) for test in own)),
            "red": red,
            "lines": {test: paths for test, paths in own.items() if test not in red},
        }
        part = folder / f"{os.getpid()}.part"  # the other process must read whole records
        part.write_text(json.dumps(record))
        part.replace(record_path(file, folder))
        if red or not own:
            print(f"  no witnesses: {', '.join(red) or 'all of ' + file}", flush=True)


def added(*lines: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the lines of several runs in one dict by file."""
    paths = {path for each in lines for path in each}
    return {path: sorted({line for each in lines for line in each.get(path, ())}) for path in sorted(paths)}


def merged(records: Iterable[dict[str, Any]], root: Path, folder: Path) -> CoverageMap:
    """Return the map of records for the current code below ``root``."""

    @cache
    def moves(path: str, known: str) -> dict[int, list[int]] | None:
        """Return a file's new line numbers by old one, or None if the file is unchanged."""
        if digest(root / path) == known:
            return None
        return carried(text_of(known, folder).read_text(), (root / path).read_text())

    def now(lines: dict[str, list[int]], inputs: dict[str, str]) -> Iterator[tuple[str, int]]:
        for path, old in lines.items():
            if (root / path).exists():
                moved = moves(path, inputs[path])
                new = old if moved is None else {each for line in old for each in moved.get(line, ())}
                yield from ((path, line) for line in new)

    whole = CoverageMap()
    for record in records:
        whole.seconds |= record["seconds"]
        for test, lines in record["lines"].items():
            for path, line in now(lines, record["inputs"]):
                whole.lines[path][line].append(test)
        for path, line in now(record["children"], record["inputs"]):
            whole.started[path].setdefault(line, set()).add(record["file"])
    for file in files_of_code(root):
        whole.in_functions[str(file.relative_to(root))] = lines_in_functions(file.read_text())
    return whole


def lines_in_functions(text: str) -> set[int]:
    """Return the lines of all function bodies in a file."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def carried(old: str, new: str) -> dict[int, list[int]]:
    """Return the new line numbers of each old one, from 1.

    Changed lines map from the old lines before, within and after the change.
    """
    one, other = old.splitlines(), new.splitlines()
    found: dict[int, list[int]] = defaultdict(list)
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                found[i + 1].append(j + 1)
        else:
            for i in range(max(0, i1 - 1), min(len(one), i2 + 1)):
                found[i + 1] += range(j1 + 1, j2 + 1)
    return found


def holds(record: dict[str, Any] | None, root: Path, folder: Path) -> bool:
    """Return whether a record is up to date: its tests are unchanged, and the code it ran was kept."""
    return record is not None and all(
        text_of(known, folder).exists()
        if is_studied(path)
        else (root / path).exists() and digest(root / path) == known
        for path, known in record["inputs"].items()
    )


def text_of(known: str, folder: Path) -> Path:
    """Return the path of the stored text with a digest."""
    return folder / "texts" / known


def conftests(file: str, root: Path) -> list[str]:
    """Return the conftest.py files that pytest loads for a test file."""
    folders = [folder for folder in Path(file).parents if (root / folder / "conftest.py").exists()]
    return [str(folder / "conftest.py") for folder in folders]


def digest(path: Path) -> str:
    """Return a digest of a file's bytes."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def record_path(file: str, folder: Path) -> Path:
    """Return the path of a test file's record."""
    return folder / f"{file.removesuffix('.py').replace('/', '.')}.json"


def record_of(file: str, folder: Path) -> dict[str, Any] | None:
    """Return a test file's record, if there is one."""
    path = record_path(file, folder)
    return json.loads(path.read_text()) if path.exists() else None
