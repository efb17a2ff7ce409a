"""Limits on the lines of a file and of a function; every setting has a description."""

from __future__ import annotations

import ast
from typing import Any

from rillflow.app.recipe import Recipe
from rillflow.config.schema import walk

FILE_LINES = 500
FUNCTION_LINES = 60


def over_budget(source: Any) -> list[str]:
    """Return the file and its functions that are too long."""
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


def test_settings_are_described() -> None:
    values = [key for key in walk(Recipe) if not key.is_section]
    silent = [key.dotted for key in values if not key.field.description and key.path[-1] != "name"]
    assert silent == []


def test_the_scan_can_fail(source: Any) -> None:
    long_function = "def f():\n" + "    x = 1\n" * 60
    assert over_budget(source("a.py", long_function)) == ["a.py:1 f has 61 lines"]
    assert over_budget(source("a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 59)) == []
    assert over_budget(source("a.py", "x = 1\n" * 501)) == ["a.py has 501 lines"]
