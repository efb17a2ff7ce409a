"""Parsed sources for the scans of the architecture tests."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(kw_only=True)
class Source:
    """One Python file."""

    path: str
    """Path relative to the repository's root."""
    text: str
    """Text of the file."""

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text; computed only for scans that use it."""
        return ast.parse(self.text, self.path)


def parsed(path: str, text: str) -> Source:
    """Return a source from its text, for self-tests of the scans."""
    return Source(path=path, text=text)


def sources_of(*folders: str) -> list[Source]:
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [parsed(str(file.relative_to(ROOT)), file.read_text("utf-8")) for file in files]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def docs_script(name: str) -> ModuleType:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def size() -> ModuleType:
    """Return the module that counts lines of code."""
    return docs_script("size")


@pytest.fixture(scope="session")
def drawing() -> ModuleType:
    """Return the module that draws the graphs of pages."""
    return docs_script("draw_graphs")


@pytest.fixture(scope="session")
def package(everything: list[Source]) -> list[Source]:
    """Return every file of rillflow itself."""
    found = [source for source in everything if source.path.startswith("rillflow/")]
    assert len(found) > 40, "the scan found too little to mean anything"
    return found


@pytest.fixture(scope="session")
def parts(everything: list[Source]) -> list[Source]:
    """Return every file of the parts."""
    return [source for source in everything if source.path.startswith("rillflow_parts/")]


@pytest.fixture(scope="session")
def plugins(everything: list[Source]) -> list[Source]:
    """Return every file of the plugins' own packages."""
    found = [source for source in everything if re.match(r"plugins/\w+/rillflow_", source.path)]
    assert len(found) > 40, "the scan found too little to mean anything"
    return found


@pytest.fixture(scope="session")
def everything() -> list[Source]:
    """Return every Python file of the repository."""
    return sources_of("rillflow", "rillflow_parts", "plugins", "tests", "benchmarks", "recipes", "examples")


@pytest.fixture(scope="session")
def source():
    """Return a function that makes a source from a path and a text, for a scan's self-test."""
    return parsed
