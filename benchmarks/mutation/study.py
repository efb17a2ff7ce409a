"""Try a mutant: run tests that would notice it, and say which one did.

    line round   tests of its line, own package's first, then fast before slow, up to LINE_S processor seconds
    wide round   for survivors of the first: the tests after those, up to WIDE_S, then the files named in
                 WIDER, which start processes that coverage does not see into

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

LINE_S = 10.0
"""Processor seconds, as measured under coverage, of the tests that a line gets in the first round."""
WIDE_S = 40.0
"""Likewise, in the wide round."""
LIMIT_S = 40.0
"""Seconds that a mutant's run may take where the machine has a core for it."""
WIDER = {
    "cluster": ("distributed/test_processes.py",),
    "workers": ("distributed/test_backends.py",),
    "parallel": ("distributed/test_parallel_training.py",),
    "training": ("distributed/test_parallel_training.py",),
    "weights": ("distributed/test_weights_files.py",),
    "models": ("distributed/test_sharded_generation.py",),
    "rollout": ("distributed/test_sharded_generation.py",),
    "roles": ("flows/test_algorithms.py",),
    "dataflow": ("flows/test_resume.py",),
    "pipeline": ("flows/test_resume.py",),
    "algorithms": ("flows/test_algorithms.py",),
    "rewards": ("flows/test_shaped_rewards.py",),
    "observe": ("flows/test_timeline.py",),
    "view": ("flows/test_timeline.py",),
    "assembly": ("flows/test_adapters.py", "flows/test_extended.py"),
    "tasks": ("flows/test_preference.py",),
    "service": ("flows/test_serve.py",),
    "cli": ("flows/test_extended.py",),
}
"""Test files by package that run its code in processes of their own, or a whole training run."""


@dataclass(kw_only=True)
class Study:
    """Mutants tried one after the other in one copy."""

    runner: Runner
    """The copy and its warm pytest process."""
    coverage: CoverageMap
    """Tests by line."""
    patience: float
    """How many times longer than on a free core a run may take by the clock."""
    sound: dict[str, bool] = field(default_factory=dict)
    """Witnesses that were run on clean code, and whether they passed."""

    def witness(self, mutant: Mutant, *, wide: bool) -> str:
        """Return the test that notices the mutant in a round, or how the run ended; "" if nothing does."""
        ranked = self.coverage.tests(mutant.path, mutant.line)
        own = within_budget(self.coverage, ranked, LINE_S)
        more = within_budget(self.coverage, ranked[len(own) :], WIDE_S)
        named = [f"tests/{name}" for name in WIDER.get(mutant.package, ())]
        for tests in (more, named) if wide else (own,):
            while tests:
                red = self._red(mutant, tests)
                if not red:
                    break
                if self._is_sound(red, tests):
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
        """Whether the witness passes without the fault; a run that ended early is run whole."""
        alone = [red] if "::" in red else list(tests)
        if "::" not in red or red not in self.sound:
            self.sound[red] = not self.runner.run(alone, LIMIT_S * self.patience, "-x").first_red
        return self.sound[red]


def within_budget(coverage: CoverageMap, ranked: Sequence[str], budget_s: float) -> list[str]:
    """Return the first tests whose seconds add up to a budget, one at least."""
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


def tried(study: Study, mutant: Mutant, *, wide: bool) -> dict[str, object]:
    """Try a mutant in one round and return its line of the results."""
    begun = time.monotonic()
    witness = study.witness(mutant, wide=wide)
    return {
        "round": "wide" if wide else "line",
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
    """Return the text of every file of the package."""
    return {
        str(path.relative_to(root)): path.read_text() for path in sorted((root / "rillflow").rglob("*.py"))
    }
