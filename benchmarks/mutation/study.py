"""Try a mutant: run the tests that may detect it, and report the first one that does.

    coverage ─ tests of its line, fast before slow ─ up to BUDGET_S CPU seconds ─> the first red test

A red test counts only if it passes without the fault: each witness runs once on clean code, in the same way.
A run that dies or exceeds its time counts only if the same tests do neither without the fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coverage_map import CoverageMap
from operators import Mutant
from pytest_runs import Runner
from studied import files

BUDGET_S = 30.0
"""CPU seconds, measured under coverage, of the tests that a mutant gets."""
LIMIT_S = 60.0
"""Largest seconds of a mutant's run on a free core."""


@dataclass(kw_only=True)
class Study:
    """A series of mutants that are tried in one copy."""

    runner: Runner
    """The copy and its warm pytest process."""
    coverage: CoverageMap
    """Tests by line."""
    patience: float
    """Factor on time limits for a busy machine."""
    sound: dict[str, bool] = field(default_factory=dict)
    """True for witnesses that passed on clean code, by test."""

    def witness(self, mutant: Mutant) -> str:
        """Return the test that detects the mutant, or the way the run ended; "" if nothing does."""
        tests = within_budget(self.coverage, self.coverage.tests(mutant.path, mutant.line), BUDGET_S)
        while tests:
            red = self._red(mutant, tests)
            if not red or self._is_sound(red, tests):
                return red
            left = remaining(tests, red)
            if left == tests:
                break
            tests = left
        return ""

    def _red(self, mutant: Mutant, tests: Sequence[str]) -> str:
        file = self.runner.copy / mutant.path
        text, stat = file.read_text(), file.stat()
        file.write_text(mutant.applied(text))
        try:
            return self.runner.run(tests, LIMIT_S * self.patience, "-x").first_red
        finally:
            file.write_text(text)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _is_sound(self, red: str, tests: Sequence[str]) -> bool:
        """Return whether the witness passes without the fault; a run that ended early is repeated whole."""
        alone = [red] if "::" in red else list(tests)
        if "::" not in red or red not in self.sound:
            self.sound[red] = not self.runner.run(alone, LIMIT_S * self.patience, "-x").first_red
        return self.sound[red]


def within_budget(coverage: CoverageMap, ranked: Sequence[str], budget_s: float) -> list[str]:
    """Return the first tests whose seconds fit in a budget, at least one."""
    chosen: list[str] = []
    spent = 0.0
    for test in ranked:
        spent += coverage.seconds[test]
        if chosen and spent > budget_s:
            break
        chosen.append(test)
    return chosen


def remaining(tests: Sequence[str], red: str) -> list[str]:
    """Return the tests that come after an unsound witness."""
    return list(tests[list(tests).index(red) + 1 :]) if red in tests else list(tests)


def tried(study: Study, mutant: Mutant) -> dict[str, object]:
    """Try a mutant and return its line of the results."""
    begun = time.monotonic()
    witness = study.witness(mutant)
    return {
        "file": mutant.path,
        "line": mutant.line,
        "operator": mutant.kind,
        "before": mutant.old,
        "after": mutant.new,
        "name": mutant.name,
        "seen_by": witness,
        "seconds": round(time.monotonic() - begun, 1),
    }


def texts_of(root: Path) -> dict[str, str]:
    """Return the text of every file of the package and its plugins."""
    return {str(path.relative_to(root)): path.read_text() for path in files(root)}
