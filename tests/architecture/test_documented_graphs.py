"""Every algorithm's page shows the graph of its step as the command above it draws it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rillflow.algorithms.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_graphs", ROOT / "docs" / "draw_graphs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_shows_the_graph_of_today(
    name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (PAGES / f"{name}.md").read_text("utf-8")
    assert script.BLOCK.search(page), f"docs/algorithms/{name}.md shows no graph"
    assert page == script.redrawn(page), "make docs draws it anew"


def test_a_stale_graph_is_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (PAGES / "rloo.md").read_text("utf-8")
    stale = page.replace("[policy.generate]", "[policy.sample]")
    assert stale != page == script.redrawn(stale)
