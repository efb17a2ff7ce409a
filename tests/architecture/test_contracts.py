"""Every contract of docs/architecture.md has a test whose name contains it; a class has one home."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = "\n".join(
    path.read_text("utf-8") for folder in ("tests", "plugins") for path in (ROOT / folder).rglob("test_*.py")
)
NAMED = re.compile(r"^\| ([a-z]+(?:-[a-z]+)+) \|", re.MULTILINE)


def contracts() -> list[str]:
    """Return the first column of the page's table."""
    return NAMED.findall((ROOT / "docs/architecture.md").read_text("utf-8"))


def test_every_contract_has_a_test_of_its_name() -> None:
    found = contracts()
    assert len(found) >= 11 and "zero-redundancy" in found
    named = re.findall(r"def (test_\w+)", TESTS)
    lacking = [each for each in found if not any(each.replace("-", "_") in test for test in named)]
    assert lacking == []


def test_a_class_name_stands_in_one_module(package: list[Any], plugins: list[Any]) -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for source in (*package, *plugins):
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(source.path)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
