"""Every benchmark runs its smallest round, with the code that makes its figures.

benchmarks/AREA/NAME.py ─ SMALLEST, SLOW ─> benchmarks/smallest.py ─> a process for each command line
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import measured_at
import smallest

FOUND = smallest.found()
ROUNDS = {name: smallest.read_round(path) for name, path in FOUND.items()}


def test_the_folder_is_searched() -> None:
    assert {"engine/generation", "streaming/ahead", "classic/ring"} <= set(FOUND)
    assert not {"training/plain_updates", "mutation/__main__"} & set(FOUND), "these are no benchmarks"


@pytest.mark.parametrize("name", FOUND)
def test_a_smallest_round_is_stated_and_writes_no_page(name: str) -> None:
    small = smallest.read_round(FOUND[name])
    words = {word for command in (*small.commands, *small.slow) for word in command}
    assert not words & {"--write", "--out"}


def test_a_benchmark_without_a_smallest_round_is_named(tmp_path: Path) -> None:
    (tmp_path / "area").mkdir()
    (tmp_path / "area" / "fast.py").write_text('SMALLEST = []\nif __name__ == "__main__":\n    print(1)\n')
    assert list(smallest.found(tmp_path)) == ["area/fast"]
    with pytest.raises(LookupError, match=r"benchmarks/fast\.py states no smallest round"):
        smallest.read_round(tmp_path / "area" / "fast.py")


def test_the_index_has_every_benchmark_and_every_page_once() -> None:
    """A row of ``benchmarks/README.md``: question, command, and the pages that the command writes."""
    index = (smallest.FOLDER / "README.md").read_text("utf-8")
    commands = re.findall(r"^\| [^|]+\? \| `python benchmarks/([^`]+)` \| (.+) \|$", index, re.MULTILINE)
    assert sorted(command for command, _ in commands) == sorted(
        [*(f"{name}.py" for name in FOUND), "mutation"]
    )
    linked = [page for _, pages in commands for page in re.findall(r"\]\(results/([^)]+)\)", pages)]
    assert set(linked) == {page.name for page in (smallest.FOLDER / "results").glob("*.md")}
    assert all("](results/" in pages or pages == "printed" for _, pages in commands)


def test_the_index_has_a_heading_for_every_area() -> None:
    index = (smallest.FOLDER / "README.md").read_text("utf-8")
    areas = {name.partition("/")[0] for name in FOUND} | {"mutation"}
    assert set(re.findall(r"^## (\w+)$", index, re.MULTILINE)) == areas


def test_a_benchmark_that_fails_is_told_with_its_output(tmp_path: Path) -> None:
    broken = 'def main():\n    print("so far")\n    raise SystemExit("the peer is gone")\n'
    (tmp_path / "broken.py").write_text(broken)
    with pytest.raises(RuntimeError, match=r"(?s)broken\.py --fast: exit code 1.*so far.*the peer is gone"):
        smallest.run_command(tmp_path / "broken.py", ["--fast"], tmp_path)


def test_every_page_of_results_names_its_commit() -> None:
    pages = sorted((smallest.FOLDER / "results").glob("*.md"))
    said = (measured_at.BEGINNING, measured_at.OLDER)
    texts = {page.name: page.read_text("utf-8") for page in pages}
    named = re.compile(
        "|".join([*map(re.escape, said), r"(?m:^Commit [0-9a-f]{7,}, `python benchmarks/mutation)"])
    )
    unnamed = [name for name, text in texts.items() if not named.search(text)]
    assert not unnamed, "write measured_at.line() below the title"


def test_the_line_names_the_commit_of_a_page(tmp_path: Path) -> None:
    said = measured_at.below_title("# Title\n\nText.\n", "Measured at commit abc (2026-01-01).")
    assert said == "# Title\n\nMeasured at commit abc (2026-01-01).\n\nText.\n"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, small in ROUNDS.items() if small.commands])
def test_the_smallest_round_runs(name: str, tmp_path: Path) -> None:
    _run(ROUNDS[name], ROUNDS[name].commands, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, small in ROUNDS.items() if small.slow])
def test_the_slow_part_of_the_smallest_round_runs(name: str, tmp_path: Path) -> None:
    _run(ROUNDS[name], ROUNDS[name].slow, tmp_path)


def _run(small: smallest.Round, commands: list[list[str]], folder: Path) -> None:
    if small.missing:
        pytest.skip(f"{', '.join(small.missing)} is not installed")
    for place, command in enumerate(commands):
        (folder / str(place)).mkdir()
        assert smallest.run_command(small.path, command, folder / str(place)).said.strip()
