"""Limits: lines of a file, lines of a function, settings that a recipe shows."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.check import setting_lines
from rillflow.app.recipe import Recipe, load_recipe
from rillflow.config.schema import walk

FILE_LINES = 500
FUNCTION_LINES = 60
SETTINGS = 90
"""A recipe of any one algorithm shows fewer."""
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.toml"))


def over_budget(source: Any) -> list[str]:
    """The file and the functions in it that are too long."""
    lines = len(source.text.splitlines())
    found = [f"{source.path} has {lines} lines"] if lines > FILE_LINES else []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{source.path}:{node.lineno} {node.name} has {length} lines")
    return found


def test_no_file_and_no_function_is_too_long(everything: list[Any]) -> None:
    assert [line for source in everything for line in over_budget(source)] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_shows_few_settings(path: Path) -> None:
    assert 30 < len(setting_lines(load_recipe(path))) < SETTINGS


def test_settings_are_described() -> None:
    values = [key for key in walk(Recipe) if not key.is_section]
    silent = [key.dotted for key in values if not key.field.description and key.path[-1] != "name"]
    assert silent == []


def test_the_scan_can_fail(source: Any) -> None:
    long_function = "def f():\n" + "    x = 1\n" * 60
    assert over_budget(source("a.py", long_function)) == ["a.py:1 f has 61 lines"]
    assert over_budget(source("a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 59)) == []
    assert over_budget(source("a.py", "x = 1\n" * 501)) == ["a.py has 501 lines"]
