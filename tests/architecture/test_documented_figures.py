"""Figures of a page are those of its results: what was published, and what the planner predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design/planner.md").read_text()
RESULTS = (ROOT / "benchmarks/results/planner.md").read_text()
_SUMMARY = r"(\d+) predicted: median error (\d+%), worst (\d+%); within 15%: (\d+), within 30%: (\d+)"


def section(title: str) -> str:
    """A section of the results."""
    return next(part for part in RESULTS.split("\n## ") if part.startswith(title))


def row(beginning: str) -> list[str]:
    """The cells of a row of the page."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("title", ["NeMo-RL", "verl", "RollPacker"])
def test_errors_by_source(title: str) -> None:
    found = re.search(_SUMMARY, section(title))
    assert found is not None
    assert row(title)[2:] == list(found.groups()[:3])


def test_errors_of_all() -> None:
    found = re.search(r"together: " + _SUMMARY, RESULTS)
    assert found is not None
    count, median, worst, near, nearly = found.groups()
    assert nearly == count
    assert row("all three together")[2:] == [f"{count}: {near} within 15%, all within 30%", median, worst]


def test_the_last_rows_that_force_a_term_are_those_of_the_results() -> None:
    found = re.search(_SUMMARY, section("NeMo-RL"))
    assert found is not None
    _, median, worst, near, nearly = found.groups()
    assert row("and weights moved")[1:] == [median, worst, f"{near}, {nearly}"]


def test_signs() -> None:
    verdicts = re.findall(r"\| (yes|\*\*no\*\*) \|$", section("NeMo-RL"), flags=re.MULTILINE)
    described, _, told, *_ = row('"doubling gains little"')
    assert f"{len(verdicts)} pairs" in described
    assert told == f"{verdicts.count('yes')} with the right sign"


def test_placements() -> None:
    found = re.search(r"Of (\d+) published, the same of the three wins in (\d+)", RESULTS)
    assert found is not None
    assert row("HybridFlow: best of three")[2].startswith(f"{found[2]} of {found[1]}: ")
