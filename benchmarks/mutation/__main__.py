r"""Mutation testing: random mutants of the package and plugins, each run against the tests of its line.

    python benchmarks/mutation --mutants 300 --seed 20261124
    python benchmarks/mutation --mutants 300 --seed 7 --within rillflow/controller rillflow/workers \
        --tests tests/unit tests/simulation --lines L.jsonl

    package, plugins ─ parse ─> lines that can be changed ─ seeded draw ─> mutants
    tests ── once, under coverage ─> tests by line (coverage_map.py)
    mutant ─ in a copy of the repository ─> its tests until one fails (study.py)
          └─> a line in results/mutation.jsonl ─> the page results/mutation.md (page.py)

Started again with the same seed on the same commit, the study continues where it stopped. The JSONL holds one
study: every line has its commit, seed and paths. `--again` tries survivors on the current code and does not
change the JSONL. `--page` only writes the page, beside the JSONL. NAME_equivalent.toml beside it gives the
reasons for equivalent mutants.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tomllib
from pathlib import Path

from age import is_out_of_date
from copies import make_copy
from coverage_map import CPU_LIMIT_S, measured
from operators import Mutant, draw, mutants_of
from page import lines_of, page
from pytest_runs import Runner
from study import Study, texts_of, tried

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = ("rillflow*", "plugins", "tests")
"""Folders of code and tests."""
LINES = RESULTS / "mutation.jsonl"


def main() -> None:
    """Try mutants until the given number is reached, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout that is studied")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutation", help="copies and coverage")
    parser.add_argument(
        "--within", nargs="*", default=[], metavar="PATH", help="only mutants of these files and folders"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[*CPU_LIMIT_S], metavar="FOLDER", help="only tests of these folders"
    )
    parser.add_argument(
        "--lines", type=Path, default=LINES, help="results, one line a mutant; the page stands beside them"
    )
    parser.add_argument("--part", default="0/1", help="try every Nth mutant: 0/2 and 1/2 share a study")
    parser.add_argument(
        "--patience", type=float, default=4.0, help="time limits times this, on a busy machine"
    )
    parser.add_argument("--again", action="store_true", help="try survivors on the code as it is now")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    given = parser.parse_args()
    if not given.page:
        run(given)
    if not given.again:
        argued = given.lines.with_name(f"{given.lines.stem}_equivalent.toml")
        equivalent = tomllib.loads(argued.read_text() if argued.exists() else "")
        lines = lines_of(given.lines)
        is_old = bool(lines) and is_out_of_date(lines[0]["commit"], given.source)
        given.lines.with_suffix(".md").write_text(page(lines, equivalent, is_old=is_old))


def run(given: argparse.Namespace) -> None:
    """Try the mutants of one part that have no line yet, or the survivors with ``--again``."""
    commit = commit_of(given.source)
    part, parts = map(int, given.part.split("/"))
    copy = make_copy(given.source, given.folder.resolve() / f"copy-{part}")
    texts, runner = texts_of(copy), Runner(copy)
    tests = [
        str(path.relative_to(copy))
        for folder in given.tests
        for path in sorted((copy / folder).rglob("test_*.py"))
    ]
    coverage = measured(runner, tests, given.folder / "coverage", backwards=bool(part % 2))
    study = Study(runner=runner, coverage=coverage, patience=given.patience)
    known = lines_of(given.lines)
    if given.again:
        drawn = found_again(known, texts)
    else:
        stale = {(line["commit"], line["seed"]) for line in known} - {(commit, given.seed)}
        if stale:
            raise SystemExit(f"{given.lines} holds the study {stale.pop()}: move it away to begin another")
        drawn = draw(within(texts, given.within), given.mutants, given.seed)
        places = {mutant.name: place for place, mutant in enumerate(drawn)}
        tried_names = {line["name"] for line in known}
        drawn = [mutant for mutant in drawn[part::parts] if mutant.name not in tried_names]
    for number, mutant in enumerate(drawn, 1):
        line = tried(study, mutant)
        told = f"{mutant.path}:{mutant.line} {line['seen_by'] or 'SURVIVED'} {line['seconds']} s"
        print(f"{number}/{len(drawn)} {told}", flush=True)
        if not given.again:
            place = places[mutant.name]
            chosen = [] if given.tests == [*CPU_LIMIT_S] else given.tests
            study_of = {"commit": commit, "seed": given.seed, "within": given.within, "tests": chosen}
            write({**study_of, "place": place, **line}, given.lines)
    runner.close()


def within(texts: dict[str, str], paths: list[str]) -> dict[str, str]:
    """Return the texts of the files at or below some paths from the root; all without paths."""
    chosen = {
        file: text
        for file, text in texts.items()
        if not paths or any(Path(file).is_relative_to(path) for path in paths)
    }
    if not chosen:
        raise SystemExit(f"no file of the package or of a plugin is at or below {', '.join(paths)}")
    return chosen


def write(line: dict[str, object], path: Path) -> None:
    """Append a line in one write, because parts share the file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


def found_again(known: list[dict[str, object]], texts: dict[str, str]) -> list[Mutant]:
    """Return the survivors whose line is still in the code."""
    names = {line["name"] for line in known if not line["seen_by"]}
    files = {line["file"] for line in known if not line["seen_by"]} & texts.keys()
    return [
        each
        for file in sorted(map(str, files))
        for each in mutants_of(file, texts[file])
        if each.name in names
    ]


def commit_of(source: Path) -> str:
    """Return the studied commit; exit if the code has uncommitted changes."""
    words = ["git", "-C", str(source)]
    if subprocess.check_output([*words, "status", "--porcelain", "--", *FOLDERS], text=True):
        raise SystemExit(
            f"{source} has changes in {', '.join(FOLDERS)} that are not committed: commit them first"
        )
    return subprocess.check_output([*words, "rev-parse", "--short", "HEAD"], text=True).strip()


if __name__ == "__main__":
    main()
