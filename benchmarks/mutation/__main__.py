"""Would the tests notice? Random small faults of the trunk, each against the everyday tests of its line.

    python benchmarks/mutation --mutants 300 --seed 1 --folder runs/mutation

    trunk ─ parse ─> every place that can be changed ─ seeded draw ─> mutants
    tests ─ once, under coverage ─> lines that each test runs, and its seconds
    mutant ─ in a copy of the repository ─> tests of its line, its own package's first, then fast before slow
           └─ all passed ─> test files whose ranks are processes, which coverage does not see (WIDER)

Every run is a fork of one process that has torch loaded; it ends at the first failure or at its time limit.
A failure counts only if the same tests pass without the mutant, and running out of time or dying only where
they do neither without it. Processes share the mutants (--processes). What was found stands in results.jsonl
of the folder, a line a mutant; a second command goes on from there. The table goes to results/mutation.md.
Equivalent mutants are argued in results/mutation_equivalent.toml, leave the count, and are not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from operators import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COPIED = ("rillflow", "tests", "benchmarks", "recipes", "examples", "docs", "README.md", "pyproject.toml")
TRUNK = (
    *("records", "placement", "graph", "formulas", "cluster", "workers", "models", "parallel"),
    *("training", "weights", "rollout", "roles", "dataflow", "pipeline", "algorithms"),
)
WIDER = {
    "cluster": tuple(f"distributed/test_{name}.py" for name in ("processes", "backends", "failing_ranks")),
    "workers": ("distributed/test_backends.py",),
    "parallel": ("distributed/test_parallel_training.py", "distributed/test_parallel_state.py"),
    "training": ("distributed/test_parallel_training.py",),
    "weights": ("distributed/test_weights_resharding.py", "distributed/test_weights_files.py"),
    "models": ("distributed/test_sharded_generation.py",),
    "rollout": ("distributed/test_sharded_generation.py",),
    "roles": ("distributed/test_sampler.py", "flows/test_algorithms.py", "flows/test_meshes.py"),
    "dataflow": ("distributed/test_backends.py", "flows/test_resume.py"),
    "pipeline": ("flows/test_resume.py", "flows/test_preference.py"),
    "algorithms": ("flows/test_algorithms.py", "flows/test_preference.py"),
}
MOST_S = 60.0
"""Seconds of tests, as measured, that a mutant's line gets at most."""
PATIENCE = 20.0
"""How many times longer than measured a run may take, for the machine may be busy."""


class Watch:
    """A pytest plugin: who failed first, how long each test took, and whose lines coverage sees."""

    def __init__(self, coverage: Any = None) -> None:
        self.seconds: dict[str, float] = {}
        self.failed = ""
        self._coverage = coverage

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._coverage is not None:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid or "collection"


def forked(
    copy: Path, tests: Sequence[str], limit_s: float, *, covered: Path | None = None
) -> dict[str, Any]:
    """Run tests in a fork whose working directory is the copy; what Watch saw, or that time ran out."""
    said = copy / "said.json"
    said.unlink(missing_ok=True)
    if not (child := os.fork()):
        try:
            _run_tests(copy, tests, said, covered)
        finally:
            os._exit(1)  # the parent's life is not the child's, whatever was raised
    end = time.monotonic() + limit_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"failed": "time limit", "seconds": {}}
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # whoever it left behind
    found: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {"failed": "it died"}
    return found


def _run_tests(copy: Path, tests: Sequence[str], said: Path, covered: Path | None) -> None:
    """The child's life."""
    import pytest

    os.setsid()
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = [str(copy)]
    sys.dont_write_bytecode = True
    log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)
    coverage = None
    if covered is not None:
        from coverage import Coverage

        coverage = Coverage(data_file=None, source=[str(copy / "rillflow")], config_file=False)
        coverage.start()
    watch = Watch(coverage)
    flags = [
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *(() if covered else ("-x",)),
    ]
    status = pytest.main([*flags, *tests], plugins=[watch])
    if status > 1 and not watch.failed:
        watch.failed = f"pytest ended with {status}"
    if coverage is not None and covered is not None:
        coverage.stop()
        covered.write_text(json.dumps(_lines(coverage, copy)))
    said.write_text(json.dumps({"failed": watch.failed, "seconds": watch.seconds}))
    os._exit(0)


def _lines(coverage: Any, copy: Path) -> dict[str, dict[int, list[str]]]:
    """The tests of every line of every file."""
    data = coverage.get_data()
    return {
        str(Path(file).relative_to(copy)): {
            line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


@dataclass(kw_only=True)
class Coverage:
    """What runs what."""

    lines: dict[str, dict[str, list[str]]]
    """Tests by file and line."""
    seconds: dict[str, float]
    """Of every test that passed."""

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that run the mutant's line, or its file where it runs at import; its own package's first."""
        lines = self.lines.get(mutant.path, {})
        found = set(lines.get(str(mutant.line), ())) or {test for tests in lines.values() for test in tests}
        own = f"tests/unit/{mutant.package}/"
        ranked = sorted(found & self.seconds.keys(), key=lambda test: (own not in test, self.seconds[test]))
        chosen, spent = [], 0.0
        for test in ranked:
            spent += self.seconds[test]
            if chosen and spent > MOST_S:
                break
            chosen.append(test)
        return chosen


def collected(copy: Path, folder: Path) -> Coverage:
    """Coverage of the unit tests, one package after the other; of tests that did not change it is kept."""
    whole = Coverage(lines={}, seconds={})
    for package in TRUNK:
        tests, kept = copy / "tests" / "unit" / package, folder / f"coverage-{package}.json"
        if not tests.is_dir():
            continue
        changed = max(file.stat().st_mtime for file in tests.rglob("*.py"))
        if not kept.exists() or kept.stat().st_mtime < changed:
            found = forked(copy, [str(tests.relative_to(copy))], 3600, covered=folder / "lines.json")
            lines = json.loads((folder / "lines.json").read_text())
            kept.write_text(
                json.dumps({"lines": lines, "seconds": found["seconds"], "failed": found["failed"]})
            )
            print(
                f"{package}: {len(found['seconds'])} tests; failed: {found['failed'] or 'none'}", flush=True
            )
        known = json.loads(kept.read_text())
        whole.seconds |= {test: s for test, s in known["seconds"].items() if test != known["failed"]}
        for path, lines in known["lines"].items():
            for line, tests_of in lines.items():
                whole.lines.setdefault(path, {}).setdefault(line, []).extend(tests_of)
    return whole


def tried(mutant: Mutant, copy: Path, coverage: Coverage, sound: set[str]) -> str:
    """The test that failed, or how all ended; nothing where the same happens in a copy without the mutant."""
    file, tests = copy / mutant.path, coverage.tests(mutant)
    text = file.read_text()
    rounds = [(tests, 60 + PATIENCE * sum(coverage.seconds[test] for test in tests))] if tests else []
    rounds += [([f"tests/{name}" for name in WIDER.get(mutant.package, ())], 900.0)]
    for chosen, limit_s in rounds:
        if not chosen:
            continue
        file.write_text(mutant.applied(text))
        try:
            failed = str(forked(copy, chosen, limit_s)["failed"])
        finally:
            file.write_text(text)
        if failed in sound:
            return failed
        alone = [failed] if "::" in failed else chosen
        if failed and not forked(copy, alone, limit_s)["failed"]:
            sound |= {failed} & set(alone)
            return failed
    return ""


def table(
    found: Sequence[dict[str, Any]],
    first: Sequence[dict[str, Any]],
    equivalent: dict[str, str],
    seed: int,
) -> str:
    """The page: what was found of those drawn, and when each that ever was drawn was tried first."""
    counted = [each for each in found if each["name"] not in equivalent]
    seen = [each for each in counted if each["failed"]]
    share = len(seen) / max(1, len(counted))
    out = [
        "# Mutation study\n",
        f"`python benchmarks/mutation --mutants {len(found)} --seed {seed}`: {len(found)} random mutants of",
        f"the trunk, of which {len(found) - len(counted)} change nothing that can be seen (argued below). Of",
        f"the other {len(counted)} the everyday tests saw {len(seen)}: **{share:.0%}**.\n",
        f"When first tried, before survivors were closed, {sum(bool(each['failed']) for each in first)} of",
        f"{len(first)} were seen. What then survived was looked at one by one, so the share of another draw",
        "is nearer to that.\n",
        "| package | mutants | seen | share |\n|---|---|---|---|",
    ]
    for package in TRUNK:
        own = [each for each in counted if each["path"].split("/")[1] == package]
        if own:
            good = sum(bool(each["failed"]) for each in own)
            out.append(f"| {package} | {len(own)} | {good} | {good / len(own):.0%} |")
    out.append("\n## Unseen\n\n| place | operator | mutation |\n|---|---|---|")
    words = [
        f"| {each['path']}:{each['line']} | {each['kind']} | {_shown(each)} |"
        for each in counted
        if not each["failed"]
    ]
    out += [*words, "\n## Equivalent\n\n| mutation | why nothing can see it |\n|---|---|"]
    out += [
        f"| {_shown(each)} | {equivalent[each['name']]} |" for each in found if each["name"] in equivalent
    ]
    return "\n".join(out) + "\n"


def _shown(each: dict[str, Any]) -> str:
    old, new = (" ".join(str(each[end]).split()).replace("|", "\\|") for end in ("old", "new"))
    return f"`{old}` to `{new}`"


def main() -> None:
    """Try mutants until so many were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "mutation", help="what was found so far"
    )
    parser.add_argument("--again", action="store_true", help="try those once more that nothing saw")
    parser.add_argument("--processes", type=int, default=1, help="that try mutants side by side")
    given = parser.parse_args()
    folder = given.folder.resolve()
    copies = [_copied(folder / f"copy-{number}") for number in range(given.processes)]
    for module in ("torch", "transformers", "safetensors.torch", "hypothesis", "pytest", "pydantic"):
        __import__(module)
    files = sorted(path for package in TRUNK for path in (ROOT / "rillflow" / package).rglob("*.py"))
    every = [m for file in files for m in mutants_of(str(file.relative_to(ROOT)), file.read_text())]
    results, coverage = folder / "results.jsonl", collected(copies[0], folder)
    known, argued = _known(results), RESULTS / "mutation_equivalent.toml"
    equivalent = tomllib.loads(argued.read_text()) if argued.exists() else {}
    drawn = _drawn(every, known, given.seed)[: given.mutants]
    unseen = {name for name, each in known.items() if not each["failed"]} - equivalent.keys()
    left = [m for m in drawn if m.name not in known or (given.again and m.name in unseen)]
    children = []
    for number, copy in enumerate(copies):
        if not (child := os.fork()):
            _try_all(left[number :: len(copies)], copy, coverage, results)
            os._exit(0)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    known, first = _known(results), _known(results, first=True)
    if any(ended) or any(mutant.name not in known for mutant in drawn):
        raise SystemExit(f"processes ended with {ended}; the same command goes on from {results}")
    page = table([known[mutant.name] for mutant in drawn], list(first.values()), equivalent, given.seed)
    (RESULTS / "mutation.md").write_text(page)
    print(page)


def _copied(copy: Path) -> Path:
    """A copy of what tests need, as it is now."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    return copy


def _drawn(every: Sequence[Mutant], known: Collection[str], seed: int) -> list[Mutant]:
    """Those tried before whose line is as it was, then the others by a hash of seed and name.

    So a draw of more begins with a draw of fewer, and a change of the code changes it as little as can be.
    """

    def place(mutant: Mutant) -> tuple[bool, bytes]:
        return mutant.name not in known, blake2b(f"{seed} {mutant.name}".encode()).digest()

    return sorted({mutant.name: mutant for mutant in every}.values(), key=place)


def _known(results: Path, *, first: bool = False) -> dict[str, dict[str, Any]]:
    """What was found so far, by mutant; of one tried again the last, or the first."""
    kept = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {each["name"]: each for each in (reversed(kept) if first else kept)}


def _try_all(mutants: Sequence[Mutant], copy: Path, coverage: Coverage, results: Path) -> None:
    """A process's life: one mutant after the other, each a line at once."""
    sound = set(coverage.seconds)
    for number, mutant in enumerate(mutants, 1):
        begun = time.monotonic()
        failed = tried(mutant, copy, coverage, sound)
        with results.open("a") as lines:
            lines.write(json.dumps({**asdict(mutant), "name": mutant.name, "failed": failed}) + "\n")
        taken = f"{time.monotonic() - begun:.0f} s"
        said = f"{number}/{len(mutants)} {mutant.path}:{mutant.line} {failed or 'UNSEEN'} {taken}"
        print(said, flush=True)


if __name__ == "__main__":
    main()
