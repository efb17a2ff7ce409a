"""Which function scores: ``file.py:name``, checked by reading the file, never by running it.

    "rewards.py:exact" ── split ── file exists? ── ast: is the name bound at the top level? ──> FunctionPath

A decorated function, a lambda or an import under that name is as good as a ``def``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rillflow.errors import RewardError, nearest

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OWN_SCOPE = (*_DEFINITIONS, *_COMPREHENSIONS, ast.Lambda)


@dataclass(frozen=True, kw_only=True)
class FunctionPath:
    """A function in a Python file.

    Example:
        FunctionPath(file=Path("/home/me/rewards.py"), name="exact")
    """

    file: Path
    """The file, absolute."""
    name: str
    """The function's name at the file's top level."""
    text: str = ""
    """What is loaded in the file's place, where a function given in Python has no file of its own."""
    weight: float = 1.0
    """Of its scores, where several functions are summed."""
    files: tuple[Path, ...] = ()
    """Further files and folders that its sandbox shows, absolute."""

    def __str__(self) -> str:
        return self.name if self.text else f"{self.file.name}:{self.name}"


def parse_function(text: str, base: Path, what: str = "reward function") -> FunctionPath:
    """Read ``file.py:name``; a relative file is looked for under ``base``. Nothing in the file is executed.

    ``what`` is what errors call it.

    Raises:
        RewardError: the text has another form, the file is missing, is no file or no Python, or binds no
            such name.
    """
    written, colon, name = text.rpartition(":")
    if not colon or not written or not name.isidentifier():
        raise RewardError(
            f"{text!r} names no {what}",
            why="it is written as a file, a colon and the name of a function",
            fix="write it like rewards.py:exact",
        )
    file = _locate(base / written, f"{what} {text!r}")
    names = _bound_names(_parse(file))
    if name not in names and "*" not in names:
        raise RewardError(
            f"{file} has no function {name!r}", why="the file binds no such name", fix=nearest(name, names)
        )
    return FunctionPath(file=file, name=name)


def place_of(function: FunctionPath) -> str:
    """Where a function is bound: its file, and the line where a statement of the file itself binds it."""
    if function.text:
        return str(function)
    lines = [
        node.lineno
        for node in _top_level(_parse(function.file))
        if (isinstance(node, _DEFINITIONS) and node.name == function.name)
        or (isinstance(node, ast.Name) and node.id == function.name and isinstance(node.ctx, ast.Store))
    ]
    return f"{function.file}:{lines[-1]}" if lines else str(function.file)


def parse_files(names: Sequence[str], base: Path, setting: str) -> tuple[Path, ...]:
    """The files and folders that a setting lists, relative to ``base``.

    Raises:
        RewardError: there is none by a name.
    """
    found = []
    for name in names:
        path = (base / name).resolve()
        if not path.exists():
            beside = [other.name for other in path.parent.glob("*")]
            raise RewardError(
                f"{setting} lists {name!r}", why=f"there is no {path}", fix=nearest(path.name, beside)
            )
        found.append(path)
    return tuple(found)


def _locate(path: Path, named: str) -> Path:
    try:
        file = path.resolve()
        beside = [] if file.exists() else [other.name for other in file.parent.glob("*.py")]
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(f"the {named} has no usable path", why=str(error)) from None
    if not file.exists():
        raise RewardError(
            f"the {named} is in a file that does not exist",
            why=f"there is no {file}",
            fix=nearest(file.name, beside),
        )
    if not file.is_file():
        raise RewardError(f"the {named} is in no file", why=f"{file} is a folder or a device")
    return file


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise RewardError(
            f"{file} is not Python: {error.msg}",
            why=f"line {error.lineno}: {(error.text or '').strip()}",
        ) from None
    except (ValueError, OSError) as error:
        raise RewardError(f"{file} cannot be read as Python", why=str(error)) from None


def _bound_names(module: ast.Module) -> set[str]:
    """Names a module binds at its top level; ``*`` stands for names that only running it would tell."""
    names: set[str] = set()
    for node in _top_level(module):
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _OWN_SCOPE):
            yield from _top_level(child)
