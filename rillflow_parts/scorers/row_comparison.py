"""Row comparison: find where a reward function compares rows with each other, by parsing its source.

    def reward(prompts, completions, answer):       lists over the rows, by their parameters
        scores = [score(c) for c in completions]    a list over the rows, made of one
        return [s - max(scores) for s in scores]    max of it: row 1's reward depends on row 2

A function that scores each row alone returns the same rewards however its rows are divided into calls. One
that compares them does not: in a call of one row, a row meets only itself. Values are followed through
assignments, loops, comprehensions, and functions of the file and of modules next to it. What a library does
with a list is not known, and checks such as ``isinstance(completions[0], list)`` do not count. Standard
library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.rewards.function import FunctionPath
from rillflow.rewards.syntax import parsed

_JOINS = re.compile(
    r"max|min|f?sum|sorted|f?mean|median|mode|p?stdev|p?variance|std|var|arg(max|min|sort)|sort|topk|rank(data)?"
    r"|quantiles?|percentile|softmax|cumsum|unique|normalize|Counter|(frozen)?set|groupby|combinations"
    r"|permutations|product|pairwise|count|index|most_common|corrcoef"
)
"""Last names of calls whose result depends on several entries of a list."""
_KEEPS = re.compile(
    r"list|tuple|zip|enumerate|reversed|map|array|asarray|(as_)?tensor|\w+Tensor|tolist|copy|astype|float|values"
    r"|items|cpu|numpy|gather|run|wait_for"
)
"""Last names of calls that return a list over the same rows."""
_LOGS = frozenset({"log_metric", "print", "debug", "info", "warning"})
"""Last names of calls that return nothing to a reward."""


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """A place where a function compares rows.

    Example:
        RowComparison(file="reward.py", line=7, text="max(scores)")
    """

    file: str
    """Name of the file."""
    line: int
    """Line number in the file, from 1."""
    text: str
    """The compared expression."""

    def __str__(self) -> str:
        return f"{self.text}, {self.file}:{self.line}"


def row_comparisons(function: FunctionPath) -> list[RowComparison]:
    """Return where a function compares rows with each other; empty if it cannot be parsed."""
    if function.address:
        return []
    tree = _parsed(function.text.encode() if function.text else None, function.file)
    known = dict(_functions(function, tree))
    first = known.get(_started(function.name, tree)) or known.get("__call__")
    if first is None:
        return []
    start = first.function
    names = {each.arg for each in _parameters(start)} - {"self", *_LOGS}
    rows = {start.args.kwarg.arg} if start.args.kwarg is not None else set[str]()
    reader = _Reader(known=known)
    reader.read(first, frozenset(names), frozenset(rows))
    return sorted(reader.places, key=lambda each: (each.file, each.line))


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A function and the name of its file."""

    file: str
    """Name of the file."""
    function: Function
    """Its syntax tree."""


def _functions(function: FunctionPath, tree: ast.Module) -> Iterator[tuple[str, _Known]]:
    """Yield the functions of a file by name, after those of modules next to it that it imports."""
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            path = function.file.parent.joinpath(*module.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if module and file.is_file() and file != function.file:
                    yield from _defined(_parsed(None, file), file.name)
    yield from _defined(tree, function.file.name)


def _started(name: str, tree: ast.Module) -> str:
    """Return the name of the function that is called: of a ``partial`` it is the first argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and name in {ast.unparse(each) for each in node.targets}:
            if isinstance(node.value, ast.Name):
                return node.value.id
            if isinstance(node.value, ast.Call) and _last(node.value.func) == "partial" and node.value.args:
                return _last(node.value.args[0])
    return name


def _parsed(text: bytes | None, file: Path) -> ast.Module:
    try:
        return parsed(file.read_bytes() if text is None else text)
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])  # loading the function reports the problem


def _defined(tree: ast.Module, file: str) -> Iterator[tuple[str, _Known]]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node.name, _Known(file=file, function=node)


def _parameters(function: Function) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


@dataclass(kw_only=True)
class _Reader:
    """The functions that receive whole lists of rows."""

    known: Mapping[str, _Known]
    """Functions by name."""
    places: set[RowComparison] = field(default_factory=set)
    """Places where rows are compared."""
    read_before: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    """Functions that were read, with the parameters that are lists over rows."""

    def read(self, known: _Known, lists: frozenset[str], columns: frozenset[str]) -> None:
        """Read a function twice, because a loop may use a list that its later lines fill."""
        function = known.function
        if (function.name, lists) in self.read_before:
            return
        self.read_before.add((function.name, lists))
        body = _Body(self, known.file, {*lists}, columns)
        for statement in (*function.body, *function.body):
            body.visit(statement)


class _Body(ast.NodeVisitor):
    """One function.

    Args:
        reader: receives the places.
        file: name of its file.
        lists: names of lists over the rows; more are added as they are assigned.
        columns: names of dicts that have such lists as values.
    """

    def __init__(self, reader: _Reader, file: str, lists: set[str], columns: frozenset[str]) -> None:
        self._reader, self._file, self._lists, self._columns = reader, file, lists, columns
        self._inside = 0
        self._of_a_row, self._joined = set[str](), set[str]()

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._accumulates(node.targets[0], node.value):
            return
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        added = ast.BinOp(left=node.target, op=node.op, right=node.value)
        if not self._accumulates(node.target, added):
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self._joined:
            self._found(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        is_loop = self._enter(node.iter)
        self._lists -= _names(node.target)
        self._inside += is_loop
        for statement in node.body:
            self.visit(statement)
        self._inside -= is_loop
        for statement in node.orelse:
            self.visit(statement)

    visit_AsyncFor = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        before, count = {*self._lists}, 0
        for each in node.generators:
            self.visit(each.iter)
            entered = self._enter(each.iter)
            self._inside, count = self._inside + entered, count + entered
            self._lists -= _names(each.target)
            for test in each.ifs:
                self.visit(test)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self._inside, self._lists = self._inside - count, before

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_FunctionDef(self, node: Function | ast.Lambda) -> None:
        before = {*self._lists}
        self._lists -= {each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
        for part in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(part)
        self._lists = before

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        name = _last(node.func)
        if name in _LOGS:
            return
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        whole = [each for each in _arguments(node) if self._is_list(each)]
        if _JOINS.fullmatch(name) and (whole or (owner is not None and self._is_list(owner))):
            self._found(node)
        if name in ("append", "add") and self._inside and owner is not None:
            self._fill(node, owner)
        called = self._reader.known.get(name)
        if called is not None and whole:
            self._reader.read(called, self._passed(node, called.function), frozenset())
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, ast.In | ast.NotIn) and self._is_list(right):
                self._found(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.BinOp) and self._is_list(node.value):
            self._found(node)
        self.generic_visit(node)

    def _enter(self, iterated: ast.expr) -> bool:
        """Return whether a loop goes over the rows; a second loop inside compares rows."""
        is_loop = self._is_rows(iterated)
        if is_loop and self._inside:
            self._found(iterated)
        return is_loop

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and self._inside:
            self._lists.add(target.value.id)
        for name in _names(target):
            if self._is_list(value):
                self._lists.add(name)
            elif not _is_empty(value):  # an empty list or set may be filled with rows
                self._lists.discard(name)
            if self._inside:
                self._of_a_row.add(name)

    def _accumulates(self, target: ast.expr, value: ast.expr) -> bool:
        """Note a name, or a table, to which a loop over the rows adds what a row has, as a sum does."""
        owner = target.value if isinstance(target, ast.Subscript) else target
        if not (self._inside and isinstance(owner, ast.Name)) or owner.id in self._of_a_row:
            return False
        read = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
        if owner.id not in read:
            return False
        if isinstance(value, ast.BinOp) and isinstance(value.right, ast.List | ast.ListComp):
            self._lists.add(owner.id)  # entries for the rows, as ``append`` adds them
        elif read - {owner.id}:  # a constant counts the rows
            self._joined.add(owner.id)
        return True

    def _fill(self, node: ast.Call, owner: ast.expr) -> None:
        """Follow what a loop over the rows adds to a list or set from outside the loop."""
        if isinstance(owner, ast.Name) and owner.id not in self._of_a_row:
            self._lists.add(owner.id)
        elif isinstance(owner, ast.Subscript) and not _names(owner.value) & self._of_a_row:
            self._found(node)  # rows are sorted into groups

    def _passed(self, node: ast.Call, called: Function) -> frozenset[str]:
        """Return the parameters of a called function that receive lists over the rows."""
        names = [each.arg for each in _parameters(called)]
        given = dict(zip(names, node.args, strict=False))
        given |= {each.arg: each.value for each in node.keywords if each.arg}
        return frozenset(name for name, value in given.items() if self._is_list(value))

    def _is_rows(self, node: ast.expr) -> bool:
        """Return whether iteration goes over the rows, by their entries or by their numbers."""
        if isinstance(node, ast.Call) and _last(node.func) in ("range", "enumerate", "tqdm"):
            return self._is_list(node) or any(map(self._is_count, _arguments(node)))
        return self._is_list(node)

    def _is_count(self, node: ast.expr) -> bool:
        """Return whether a value is the number of rows, or a range of that length."""
        if not isinstance(node, ast.Call):
            return False
        if _last(node.func) == "len":
            return any(map(self._is_list, _arguments(node)))
        return _last(node.func) == "range" and self._is_rows(node)

    def _is_list(self, node: ast.expr) -> bool:
        """Return whether a value has an entry for each row."""
        match node:
            case ast.Name():
                return node.id in self._lists
            case ast.Subscript():
                is_column = isinstance(node.value, ast.Name) and node.value.id in self._columns
                return is_column or (isinstance(node.slice, ast.Slice) and self._is_list(node.value))
            case ast.Call():
                return self._returns_list(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return any(self._is_rows(each.iter) for each in node.generators)
            case ast.BinOp():
                sides = (node.left, node.right)
                return any(self._is_list(side) or self._is_count(side) for side in sides) and any(
                    self._is_list(side) or isinstance(side, ast.List) for side in sides
                )
            case ast.IfExp():
                return self._is_list(node.body) or self._is_list(node.orelse)
            case ast.Starred() | ast.Await() | ast.NamedExpr():
                return self._is_list(node.value)
        return False

    def _returns_list(self, node: ast.Call) -> bool:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        name, is_given = _last(node.func), any(map(self._is_list, _arguments(node)))
        if name == "get" and isinstance(owner, ast.Name) and owner.id in self._columns:
            return True
        is_own = owner is not None and self._is_list(owner)
        return (bool(_KEEPS.fullmatch(name)) and (is_given or is_own)) or (
            name in self._reader.known and is_given
        )

    def _found(self, node: ast.expr) -> None:
        self._reader.places.add(RowComparison(file=self._file, line=node.lineno, text=ast.unparse(node)[:60]))


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(each.value for each in node.keywords)]


def _last(node: ast.expr) -> str:
    """Return the last name of a called function."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_empty(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return not _arguments(node) and _last(node.func) in ("list", "set", "dict", "deque")
    return isinstance(node, ast.List | ast.Dict) and not ast.unparse(node)[1:-1]


def _names(node: ast.AST) -> set[str]:
    is_target = isinstance(node, ast.Name | ast.Tuple | ast.List | ast.Starred)
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if is_target else set()
