"""Every algorithm's page shows the graph of its step as `rillflow graph` draws it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from rillflow.algorithms.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_shows_the_graph_of_today(
    name: str, drawing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (PAGES / f"{name}.md").read_text("utf-8")
    assert drawing.BLOCK.search(page), f"docs/algorithms/{name}.md shows no graph"
    assert page == drawing.redrawn(page), "make docs draws it anew"


def test_steps_are_traced_by_the_endpoints_of_today(drawing: ModuleType) -> None:
    today = drawing.as_file(drawing.endpoints_of_roles())
    assert drawing.ENDPOINTS.read_text("utf-8") == today, "make docs writes the file anew"


def test_what_is_read_beside_the_code_is_installed_with_it() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    named = {file for pattern in packed["rillflow"] for file in (ROOT / "rillflow").glob(pattern)}
    files = (file for file in (ROOT / "rillflow").rglob("*") if file.is_file())
    beside = {file for file in files if file.suffix not in (".py", ".pyc")}
    assert len(beside) >= 2 and beside == named


def test_a_stale_graph_is_found(drawing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (PAGES / "rloo.md").read_text("utf-8")
    stale = page.replace("[policy.generate]", "[policy.sample]")
    assert stale != page == drawing.redrawn(stale)
