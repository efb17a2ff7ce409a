"""Function: locate the reward function ``file.py:name`` by parsing the file, never by running it.

    "rewards.py:exact" ── split ── file exists? ── ast: is the name bound at the top level? ──> FunctionPath

    prompts, completions, columns ── parameters ──> those the function takes ──> call frame

The name may be bound by ``def``, a decorator, a lambda or an import. As in TRL, prompts and completions are
passed by these names, every column of the prompts file by its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rillflow.errors import RewardError, nearest
from rillflow.isolation.frames import Frame
from rillflow.rewards.syntax import parsed

Text = str | Sequence[Mapping[str, object]]
"""A prompt or a completion: a text, or a list of chat messages."""

Columns = Mapping[str, Sequence[object]]
"""JSON values by column name, each column [B]."""

V = TypeVar("V")

SCHEMES = ("http", "https")
"""Schemes of addresses of servers that score."""

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
    """Absolute path of the file."""
    name: str
    """Name of the function at the file's top level."""
    text: str = ""
    """Source to load instead of the file, for a function given in Python."""
    weight: float = 1.0
    """Weight of its scores in a sum of several functions."""
    files: tuple[Path, ...] = ()
    """Further files and folders that its sandbox shows, as absolute paths."""
    address: str = ""
    """URL of the server that it calls, so that it has no sandbox; it runs no text. Empty if it calls none."""

    def __str__(self) -> str:
        return self.address or (self.name if self.text else f"{self.file.name}:{self.name}")


def is_url(text: str) -> bool:
    """Return whether a text names a server, and not a function."""
    return text.partition("://")[0] in SCHEMES


def parse_function(
    text: str, base: Path, what: str = "reward function", names: Collection[str] = ()
) -> FunctionPath:
    """Parse ``file.py:name``. Nothing in the file is executed.

    Args:
        text: the file and the function's name.
        base: folder of a relative file.
        what: the function in errors.
        names: names that may stand there instead, for errors.

    Raises:
        RewardError: the text has another form, or the file is missing, is not a Python file, or does not bind
            the name.
    """
    written, colon, name = text.rpartition(":")
    if not colon or not written or not name.isidentifier():
        raise RewardError(
            f"the {what} {text!r} is not a path and a name",
            why="it must be a file, a colon and the name of a function",
            fix="write it like rewards.py:exact"
            + (f", or name a built-in function: {', '.join(names)}" if names else ""),
        )
    file = _locate(base / written, f"{what} {text!r}")
    names = _bound_names(_parse(file))
    if name not in names and "*" not in names:
        raise RewardError(
            f"{file} has no function {name!r}", why="the file does not define it", fix=nearest(name, names)
        )
    return FunctionPath(file=file, name=name)


def place_of(function: FunctionPath) -> str:
    """Return the file of a function, with the line of the last statement in it that binds the name."""
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
    """Return the files and folders that a setting lists, relative to ``base``.

    Raises:
        RewardError: one of them does not exist.
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


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of the user's function, all by name."""

    accepted: frozenset[str]
    """Named parameters."""
    required: tuple[str, ...]
    """Parameters without a default."""
    takes_any: bool
    """Whether the function has ``**columns``."""


def choose(columns: Mapping[str, V], parameters: Parameters, function: object) -> Mapping[str, V]:
    """Return the columns that the function takes, whether they hold a batch or one row.

    Raises:
        RewardError: a required column is missing.
    """
    for name in parameters.required:
        if name not in columns:
            raise RewardError(
                f"{function} needs a column {name!r}",
                why=f"the columns are {', '.join(sorted(columns))}",
                fix=f"{nearest(name, columns)}; or give the parameter a default value",
            )
    if parameters.takes_any:
        return columns
    return {name: values for name, values in columns.items() if name in parameters.accepted}


def call_frame(columns: Columns, rows: Sequence[int]) -> Frame:
    """Return the frame that requests the scores of these rows."""
    taken = {name: [values[row] for row in rows] for name, values in columns.items()}
    return {"type": "call", "rows": len(rows), "columns": taken}


def _locate(path: Path, named: str) -> Path:
    try:
        file = path.resolve()
        beside = [] if file.exists() else [other.name for other in file.parent.glob("*.py")]
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(f"the {named} has no usable path", why=str(error)) from None
    if not file.exists():
        fix = (
            nearest(file.name, beside)
            if beside
            else "correct the path; it is relative to the recipe's folder"
        )
        raise RewardError(f"the {named} is in a file that does not exist", why=f"there is no {file}", fix=fix)
    if not file.is_file():
        raise RewardError(f"the {named} is not in a regular file", why=f"{file} is a folder or a device")
    return file


def _parse(file: Path) -> ast.Module:
    try:
        return parsed(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise RewardError(
            f"{file} is not Python: {error.msg}",
            why=f"line {error.lineno}: {(error.text or '').strip()}",
        ) from None
    except (ValueError, OSError) as error:
        raise RewardError(f"{file} cannot be read as Python", why=str(error)) from None


def _bound_names(module: ast.Module) -> set[str]:
    """Return names bound at a module's top level; ``*`` stands for names that only running it reveals."""
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
