"""Source: turn a function held in Python into source text that a child can load.

function ─ its own text ─ the names in it ─┬─ modules and their attributes ──> imports
                                           ├─ functions of the same file ────> their text, recursively
                                           ├─ partials, objects with __call__ > their parts, recursively
                                           ├─ plain values, patterns ────────> assignments
                                           └─ anything else ─────────────────> RewardError

Functions from notebook cells, scripts and closures work like those of a module. The child receives Python
source, like the file of a function; values are taken as they are now. Nothing is pickled.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from keyword import iskeyword
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from rillflow.errors import RewardError
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.syntax import parsed

_WEIGHT = "# weight "
_HEAD = "from __future__ import annotations\n"
_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


def shipped(function: Callable[..., Any], weight: float = 1.0) -> FunctionPath:
    """Return a function together with source text that defines the same function.

    Args:
        function: a function made by ``def`` or ``lambda``, anywhere; a ``functools.partial`` of one; or an
            object of a class with ``__call__``, with its attributes.
        weight: weight of its scores in a sum.

    Raises:
        RewardError: it is no such function, its text is not available, or it reads a value without text.
    """
    plain = inspect.unwrap(function)
    while isinstance(plain, partial):
        plain = inspect.unwrap(plain.func)
    if not (inspect.isfunction(plain) or _is_object(plain)):
        raise RewardError(
            f"the reward {function!r} is a {type(function).__name__}",
            why="the reward runs in its own process, which needs the source text of a function",
            fix="write a function that calls it, or name a function in a file: reward='rewards.py:exact'",
        )
    named = plain.__name__ if inspect.isfunction(plain) else type(plain).__name__.lower()
    if not (isinstance(weight, int | float) and math.isfinite(weight)):
        raise RewardError(f"the weight of {named} is {weight!r}", why="a weight must be finite")
    name = named if named.isidentifier() and not iskeyword(named) else "reward"
    text = _Text(name)
    text.add(name, function)
    said = [f"{_WEIGHT}{weight}"] if weight != 1 else []
    return FunctionPath(
        file=Path.cwd() / f"<{name}>",
        name=name,
        text="\n".join([*said, _HEAD, *text.statements, ""]),
        weight=float(weight),
    )


def restored(name: str, text: str) -> FunctionPath:
    """Return the function that ``shipped`` turned into a source text."""
    first = text.partition("\n")[0]
    weight = float(first.removeprefix(_WEIGHT)) if first.startswith(_WEIGHT) else 1.0
    return FunctionPath(file=Path.cwd() / f"<{name}>", name=name, text=text, weight=weight)


class _Text:
    """Statements that recreate a function, its dependencies first."""

    def __init__(self, root: str) -> None:
        self.statements: list[str] = []
        self._root = root
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Bind a name to a value."""
        if name in self._values:
            if self._values[name] is not value:
                raise self._refusal(name, value, "and another object by the same name")
            return
        self._values[name] = value
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, ModuleType):
            self.statements.append(f"import {value.__name__} as {name}")
        elif _is_importable(value):
            self.statements.append(
                f"from {value.__module__} import {value.__name__} as {name}{_version(value)}"
            )
        elif inspect.isfunction(function):
            self._add_function(name, function)
        elif isinstance(value, partial):
            self._add_partial(name, value)
        elif isinstance(value, type):
            self._add_class(name, value)
        elif _is_object(value):
            self._add_object(name, value)
        elif isinstance(value, re.Pattern):
            self.statements.append(f"import re as {name}_re")
            self.statements.append(f"{name} = {name}_re.compile({value.pattern!r}, {value.flags})")
        elif _is_plain(value):
            self.statements.append(f"{name} = {value!r}")
        else:
            raise self._refusal(name, value, "which has no source text")

    def _add_function(self, name: str, function: FunctionType) -> None:
        text = _definition(name, function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        known = {**function.__globals__, **{variable: cell.cell_contents for variable, cell in cells}}
        for read in dict.fromkeys(_names(compile(_HEAD + text, self._root, "exec"))):
            if read in known:
                self.add(read, known[read])
        self.statements.append(text)
        own = function.__code__.co_name
        if own not in (name, "<lambda>"):
            self.statements.append(f"{name} = {own}")

    def _add_partial(self, name: str, value: partial[Any]) -> None:
        parts = {f"{name}_function": value.func}
        parts |= {f"{name}_argument_{place}": each for place, each in enumerate(value.args)}
        parts |= {f"{name}_{keyword}": each for keyword, each in value.keywords.items()}
        for part, each in parts.items():
            self.add(part, each)
        first, *rest = parts
        given = [*rest[: len(value.args)], *(f"{keyword}={name}_{keyword}" for keyword in value.keywords)]
        self.statements.append(f"import functools as {name}_functools")
        self.statements.append(f"{name} = {name}_functools.partial({', '.join([first, *given])})")

    def _add_class(self, name: str, kind: type) -> None:
        text, known = _class_definition(kind), dict[str, Any]()
        for method in filter(inspect.isfunction, vars(kind).values()):
            known |= method.__globals__
        if not text:
            raise self._refusal(name, kind, "whose source text is not available")
        for read in dict.fromkeys(_names(compile(_HEAD + text, self._root, "exec"))):
            if read in known and read not in (kind.__name__, "__name__"):  # a class body reads __name__
                self.add(read, known[read])
        self.statements.append(text)
        if name != kind.__name__:
            self.statements.append(f"{name} = {kind.__name__}")

    def _add_object(self, name: str, value: Any) -> None:
        """Recreate an object by its attributes, without a call of its class."""
        kind = type(value).__name__
        self.add(kind, type(value))
        self.statements.append(f"{name} = {kind}.__new__({kind})")
        for attribute, each in vars(value).items():
            part = f"{name}_{attribute}"
            self.add(part, each)
            self.statements.append(f"object.__setattr__({name}, {attribute!r}, {part})")

    def _refusal(self, name: str, value: Any, what: str) -> RewardError:
        return RewardError(
            f"the reward {self._root} reads {name!r}, a {type(value).__name__}, {what}",
            why="the reward runs in its own process, which gets its source text and the modules, functions "
            "and plain values that it reads",
            fix=f"create it inside the function, or move both to a file: reward='rewards.py:{self._root}'",
        )


def _definition(name: str, function: FunctionType) -> str:
    """Return the statement that makes a function, including decorators."""
    code, kinds = function.__code__, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    try:
        tree = parsed("".join(inspect.findsource(function)[0]))
    except (OSError, SyntaxError) as error:
        raise RewardError(
            f"the source text of the reward function {name} is not available",
            why=str(error),
            fix=f"move it to a file: reward='rewards.py:{name}'",
        ) from None
    found = [
        node for node in ast.walk(tree) if isinstance(node, kinds) and _line(node) == code.co_firstlineno
    ]
    found = [node for node in found if isinstance(node, ast.Lambda) == (code.co_name == "<lambda>")]
    if len(found) != 1:
        raise RewardError(
            f"the source text of the reward function {name} is not available",
            why=f"line {code.co_firstlineno} of {code.co_filename} has {len(found)} matching functions",
            fix="define it with def on its own line; reload its file if the file has changed",
        )
    text = ast.unparse(found[0])
    return f"{name} = {text}" if isinstance(found[0], ast.Lambda) else text


def _class_definition(kind: type) -> str:
    """Return the statement that makes a class, found by the lines of its methods; empty if there is none."""
    for method in filter(inspect.isfunction, vars(kind).values()):
        try:
            tree = parsed("".join(inspect.findsource(method)[0]))
        except (OSError, SyntaxError):
            continue
        line = method.__code__.co_firstlineno
        for node in ast.walk(tree):
            is_it = isinstance(node, ast.ClassDef) and node.name == kind.__name__
            if is_it and isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
                return ast.unparse(node)
    return ""


def _line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """Return the first line of a function's code: a decorator's line, or that of ``def``."""
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return decorators[0].lineno if decorators else node.lineno


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names that code, and the code nested in it, reads."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _READS)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_importable(value: Any) -> bool:
    """Return whether a child can import a class or function by its module and name."""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType) or value.__module__ == "__main__":
        return False
    module = sys.modules.get(value.__module__)
    if module is None or vars(module).get(value.__name__) is not value:
        return False
    file = vars(module).get("__file__")
    return file is None or any(Path(file).is_relative_to(Path(entry).absolute()) for entry in sys.path)


def _version(value: type | FunctionType | BuiltinFunctionType) -> str:
    """Return a comment with a hash of the imported file if the file is the user's own."""
    file = Path(vars(sys.modules[value.__module__]).get("__file__") or sys.prefix)
    if file.is_relative_to(sys.prefix) or file.is_relative_to(sys.base_prefix):
        return ""
    return f"  # {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def _is_object(value: object) -> bool:
    """Return whether a value is an object that can be called, of a class written in Python."""
    kind = type(value)
    return "__call__" in dir(kind) and inspect.isfunction(kind.__call__) and "__dict__" in dir(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value can be parsed back from its own repr."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
