"""Install lines: written by one helper, for extras and plugins that exist, and never for a package index."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FROM_AN_INDEX = re.compile(r"pip install (?:-\S+ )*\W{0,2}rillflow[\[-]")
"""An install line that asks a package index for Rillflow or a plugin; neither is on one."""
HELPERS = ("install_package", "install_plugin")


def asks_an_index(path: str, text: str) -> Iterator[str]:
    """Yield lines that install Rillflow or a plugin by its name."""
    for number, line in enumerate(text.splitlines(), start=1):
        if FROM_AN_INDEX.search(line):
            yield f"{path}:{number} {line.strip()}"


def test_no_file_installs_rillflow_by_name(root: Path, everything: list[Any]) -> None:
    pages = [root / "README.md", root / "CONTRIBUTING.md"]
    pages += [page for page in root.glob("plugins/**/*.md") if "classic" not in page.parts]
    texts = {source.path: source.text for source in everything}
    texts |= {str(page.relative_to(root)): page.read_text("utf-8") for page in pages}
    assert [line for path, text in texts.items() for line in asks_an_index(path, text)] == []


@pytest.mark.parametrize(
    "before", ["pip install '", 'pip install "', "pip install ", "pip install -e ", "pip install -U '"]
)
@pytest.mark.parametrize("name", ["rillflow" + "[ray]", "rillflow" + "-planner"])
def test_the_scan_can_fail(before: str, name: str) -> None:
    assert len(list(asks_an_index("a.py", f"x = 1\n{before}{name}"))) == 1


def test_lines_for_a_clone_pass() -> None:
    lines = ("pip install -e '.[ray]'", "pip install ./plugins/planner", "pip install -e '/a/rillflow[ray]'")
    assert list(asks_an_index("a.py", "\n".join(lines))) == []


def named(source: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the helper and the literal names of every call of a helper in a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HELPERS:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if len(texts) == len(node.args):
                yield node.func.id, texts


def test_the_named_extras_and_plugins_exist(
    root: Path, package: list[Any], parts: list[Any], plugins: list[Any]
) -> None:
    calls = [call for source in (*package, *parts, *plugins) for call in named(source)]
    assert len(calls) > 10
    for helper, names in calls:
        plugin = names.pop(0) if helper == "install_plugin" else None
        file = root / (f"plugins/{plugin}" if plugin else "") / "pyproject.toml"
        extras = tomllib.loads(file.read_text("utf-8"))["project"].get("optional-dependencies", {})
        assert set(names) <= extras.keys(), (helper, names)
