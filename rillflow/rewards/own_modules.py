"""Own modules: find the user's files that a function loads, by parsing the sources.

    the function's file ── import ──> a module beside it, in a folder beside it, or in another folder
                                      of the user that Python finds ── import ──> further modules

A folder needs no ``__init__.py``. Installed packages and the standard library are not the user's own.
Standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from rillflow.isolation.sandbox import python_folders
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.syntax import parsed

_IMPORTING = ("import_module", "__import__")
"""Functions that import the module of a name."""


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """One parsed file of the user."""

    file: Path
    """The file."""
    root: Path
    """Folder in which Python looks for the modules that the file imports."""
    tree: ast.Module
    """Its syntax tree."""


def own_sources(function: FunctionPath) -> Iterator[OwnSource]:
    """Yield the function's file and the user's modules that it imports, each once."""
    waiting = [(function.file, function.file.parent)]
    seen = {function.file}
    while waiting:
        file, root = waiting.pop(0)
        try:
            text = function.text.encode() if function.text and file == function.file else file.read_bytes()
            source = OwnSource(file=file, root=root, tree=parsed(text))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # loading it will report the problem
        yield source
        for name in imported(source):
            where = root_of(name, root)
            for found in files_of(name, where) if where is not None else ():
                if found not in seen:
                    seen.add(found)
                    waiting.append((found, where or root))


def imported(source: OwnSource) -> Iterator[str]:
    """Yield the dotted names that a file imports: modules, or names in modules."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, source)
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            name = node.args[0].value
            if called in _IMPORTING and isinstance(name, str) and not name.startswith("."):
                yield name


def absolute(node: ast.ImportFrom, source: OwnSource) -> str:
    """Return the dotted name of the module from which a statement imports."""
    if not node.level:
        return node.module or ""
    folder = source.file.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    if not folder.is_relative_to(source.root):
        return node.module or ""
    return ".".join([*folder.relative_to(source.root).parts, *([node.module] if node.module else [])])


def root_of(name: str, folder: Path) -> Path | None:
    """Return the folder that holds the user's own module of a dotted name; None for a module of Python's.

    Args:
        name: dotted name; its first part decides.
        folder: folder that Python searches first.
    """
    first = name.split(".")[0]
    if (folder / f"{first}.py").is_file() or (folder / first / "__init__.py").is_file():
        return folder
    if first in sys.stdlib_module_names or not first.isidentifier():
        return None
    elsewhere = _installed(first)
    if elsewhere is None and (folder / first).is_dir():
        return folder
    return elsewhere if elsewhere is not None and not _is_pythons(elsewhere) else None


def files_of(name: str, root: Path) -> list[Path]:
    """Return the files that importing a dotted name loads: of its packages, and of the module itself."""
    files, place = list[Path](), root
    for part in name.split("."):
        found = [each for each in (place / part / "__init__.py", place / f"{part}.py") if each.is_file()]
        files += found[:1]  # a package comes before a module
        place = place / part
    return files


def is_found(name: str) -> bool:
    """Return whether the top-level module of a dotted name is part of Python or installed."""
    first = name.split(".")[0]
    return first in sys.stdlib_module_names or _installed(first) is not None


def is_compiled(name: str, root: Path) -> bool:
    """Return whether Python may load a compiled file for a part of a dotted name instead of its source."""
    place = root
    for part in name.split("."):
        if any((place / f"{part}{suffix}").is_file() for suffix in (*EXTENSION_SUFFIXES, ".pyc")):
            return True
        place = place / part
    return False


@cache
def _installed(first: str) -> Path | None:
    """Return the folder in which Python finds a top-level module; None if it finds none."""
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.origin and Path(spec.origin).name == "__init__.py":
        return Path(spec.origin).parents[1]
    places = list(spec.submodule_search_locations or ())
    if spec.origin:
        return Path(spec.origin).parent
    return Path(places[0]).parent if places else None


def _is_pythons(folder: Path) -> bool:
    """Return whether a folder belongs to Python, its installed packages or this package."""
    held = [Path(each) for each in python_folders()]
    return any(
        folder.is_relative_to(each) or (folder == each.parent and each.name == "rillflow") for each in held
    )
