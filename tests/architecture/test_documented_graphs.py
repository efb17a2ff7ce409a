"""Every algorithm's page or section shows the graph of its step as `rillflow graph` draws it."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.recipe import open_recipe
from rillflow.app.resolved import Resolved

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"


def places() -> dict[str, tuple[Path, str]]:
    """Return the page and the text of each algorithm: a page of its name, or a section that names it."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text("utf-8")
        found[page.stem] = (page, text)
        for section in re.split(r"^## ", text, flags=re.M)[1:]:
            if named := re.search(r'`algorithm\.name = "(\w+)"`', section):
                found.setdefault(named[1], (page, section))
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_shows_the_graph_of_today(
    name: str, drawing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page, text = places()[name]
    shown = drawing.BLOCK.search(text)
    assert shown, f"{page.name} shows no graph of {name}"
    assert traced(shown[1]) == name
    assert text == drawing.redrawn(text), "make docs draws it anew"


def traced(command: str) -> str:
    """Return the algorithm of the recipe that ``rillflow graph`` of a page draws."""
    words = shlex.split(command)
    given = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
    loaded = open_recipe(ROOT / words[1], given)
    assert isinstance(loaded, Resolved)
    return loaded.recipe.algorithm.name


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
    _, page = places()["rloo"]
    stale = page.replace("[policy.generate]", "[policy.sample]")
    assert stale != page == drawing.redrawn(stale)
