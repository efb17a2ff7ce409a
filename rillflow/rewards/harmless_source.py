"""Harmless source: show that a function's source cannot run text, start a process or write a file.

    file ── every name, attribute, import and call is known to be harmless ──> no doubts: no sandbox is needed
         └─ any other ──> Doubt(file, line, what)

The rule is an allow list, because a list of dangerous names is never whole. A name must be bound in the file
or be a harmless builtin. A module may only be used by its harmless names, never as a value. An attribute may
not lead from a value to its code, module or class hierarchy. Everything else is a doubt. Functions that the
called one does not reach are not read. The source is read, never run. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from rillflow.rewards.function import FunctionPath
from rillflow.rewards.harmless_names import (
    ASSIGNED,
    HARMLESS_BUILTINS,
    LEADING,
    SPECIAL,
    WRITING,
    harmless_names,
    is_listed,
)
from rillflow.rewards.own_modules import (
    OwnSource,
    absolute,
    files_of,
    imported,
    is_compiled,
    is_found,
    own_sources,
    root_of,
)

_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
"""Builtins that take the name of an attribute: harmless if it is a harmless literal."""


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """One place for which it is not known that it cannot run text.

    Example:
        Doubt(file=Path("/home/me/rewards.py"), line=3, what="imports sympy")
    """

    file: Path
    """The file."""
    line: int
    """Line number, from 1."""
    what: str
    """What the place does."""

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line} {self.what}"


def doubts(function: FunctionPath) -> list[Doubt]:
    """Return the places because of which a function is not known to be harmless; empty if it is."""
    sources = list(own_sources(function))
    if not sources:
        return [Doubt(file=function.file, line=1, what="cannot be read as Python")]
    exports = {source.file: _exports(source.tree) for source in sources}
    is_imported = any(
        function.file in files_of(name, source.root) for source in sources[1:] for name in imported(source)
    )
    first = _Reader(sources[0], exports, start=None if is_imported else function.name)
    return [*first.doubts(), *(each for source in sources[1:] for each in _Reader(source, exports).doubts())]


def _exports(tree: ast.Module) -> set[str]:
    """Return the names that a file binds at its top level, without modules."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names - {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }


class _Reader(ast.NodeVisitor):
    """Reader of one file.

    Args:
        source: the file.
        exports: names that each of the user's files binds.
        start: the function that is called; functions that it does not reach are not read. None: read all.
    """

    def __init__(self, source: OwnSource, exports: dict[Path, set[str]], start: str | None = None) -> None:
        self._source, self._exports, self._start = source, exports, start
        self._unread: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._suspects: dict[str, str] = {}
        self._doubts: list[Doubt] = []
        self._modules: dict[str, str] = {}
        self._parameters: list[set[str]] = []
        self._in_class = False
        self._has_text_annotations = False
        self._bound = set(_bound(source.tree))
        self._own_attributes = set(_own_attributes(source.tree))
        self._called = {id(node.func) for node in ast.walk(source.tree) if isinstance(node, ast.Call)}

    def doubts(self) -> list[Doubt]:
        """Read the file."""
        unused = {id(each) for block in self._unused() for each in ast.walk(block)}
        for node in ast.walk(self._source.tree):
            if id(node) in unused:
                continue
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        try:
            for statement in self._source.tree.body:
                if self._may_wait(statement):
                    self._unread.setdefault(statement.name, []).append(statement)
                else:
                    self.visit(statement)
            self._read(self._start)
            if self._start is not None and self._start not in self._bound | set(self._modules):
                self._doubt(self._source.tree, f"binds {self._start} in a way that reading does not show")
        except RecursionError:
            self._doubt(self._source.tree, "is nested too deeply to be read")
        unique = {(doubt.line, doubt.what): doubt for doubt in self._doubts}
        return [unique[key] for key in sorted(unique)]

    def _may_wait(self, node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return whether a function need only be read if its name is used; its defaults are evaluated now."""
        if self._start is None or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        has_defaults = node.args.defaults or any(each is not None for each in node.args.kw_defaults)
        return not has_defaults and not node.decorator_list and not node.name.startswith("__")

    def _read(self, name: str | None) -> None:
        """Read the functions of a name, unless they have been read."""
        scopes, self._parameters = self._parameters, []
        in_class, self._in_class = self._in_class, False
        for node in self._unread.pop(name or "", []):
            self.visit(node)
        self._parameters, self._in_class = scopes, in_class

    def _doubt(self, node: ast.AST, what: str) -> None:
        line = node.lineno if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.pattern) else 1
        self._doubts.append(Doubt(file=self._source.file, line=line, what=what))

    # ---- imports

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.split(".")[0]
            self._bind(node, alias.asname or first, alias.name if alias.asname else first)
            self._require_known(node, alias.name)

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = absolute(node, self._source)
        if module == "__future__":
            self._has_text_annotations |= any(alias.name == "annotations" for alias in node.names)
            return
        for alias in node.names:
            name = alias.asname or alias.name
            whole = f"{module}.{alias.name}" if module else alias.name
            if alias.name == "*":
                self._doubt(node, f"imports every name of {module}")
            elif self._is_module(whole):
                self._bind(node, name, whole)
                self._require_known(node, whole)
            elif not self._has(module, alias.name):
                self._suspects[name] = whole
                self._require_known(node, module)
            elif name.startswith("__"):
                self._doubt(node, f"binds {name}")

    def _bind(self, node: ast.stmt, name: str, module: str) -> None:
        if self._modules.setdefault(name, module) != module or name.startswith("__"):
            self._doubt(node, f"binds {name} to more than one module")

    def _require_known(self, node: ast.stmt, module: str) -> None:
        """Doubt a module that cannot be found, has no source, or hides one of Python's."""
        if root_of(module, self._source.root) is None:
            if not is_found(module):
                self._doubt(node, f"imports {module}, which is not there")
        elif is_listed(module.split(".")[0]):
            self._doubt(node, f"imports {module}, a file of its own that hides Python's")
        if is_compiled(module, self._source.root):
            self._doubt(node, f"imports {module}, of which there is a compiled file")

    def _is_module(self, name: str) -> bool:
        root = root_of(name, self._source.root)
        if root is None:
            return is_listed(name) and not self._has(name.rpartition(".")[0], name.rpartition(".")[2])
        place = root.joinpath(*name.split("."))
        return place.with_name(f"{place.name}.py").is_file() or place.is_dir()

    def _has(self, module: str, name: str) -> bool:
        """Return whether a name of a module is known to be harmless."""
        root = root_of(module, self._source.root) if module else self._source.root
        if root is None:
            return name in harmless_names(module) and not is_listed(f"{module}.{name}")
        files = files_of(module, root)
        own = [self._exports[file] for file in files[-1:] if file in self._exports]
        return bool(own) and name in own[0]

    # ---- scopes

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        if isinstance(node, ast.Lambda):
            body: list[ast.AST] = [node.body]
        else:
            body = [*node.body]
            for decorator in node.decorator_list:
                self.visit(decorator)
            if node.name.startswith("__") and not self._in_class:
                self._doubt(node, f"binds {node.name}")
            self._annotation(node.returns)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        for value in (*node.args.defaults, *node.args.kw_defaults, *(each.annotation for each in every)):
            if value is not None and value in (each.annotation for each in every):
                self._annotation(value)
            elif value is not None:
                self.visit(value)
        self._parameters.append({each.arg for each in every})
        in_class, self._in_class = self._in_class, False
        for each in body:
            self.visit(each)
        self._in_class = in_class
        self._parameters.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def _annotation(self, node: ast.expr | None) -> None:
        if node is not None and not self._has_text_annotations:
            self.visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(each)
        in_class, self._in_class = self._in_class, True
        for statement in node.body:
            self.visit(statement)
        self._in_class = in_class

    def visit_If(self, node: ast.If) -> None:
        """Skip blocks that the child never runs."""
        if _is_unused(node.test, self._bound):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def _unused(self) -> Iterator[ast.stmt]:
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.If) and _is_unused(node.test, self._bound):
                yield from node.body

    # ---- names, attributes and calls

    def visit_Name(self, node: ast.Name) -> None:
        name = node.id
        self._read(name if isinstance(node.ctx, ast.Load) else None)
        if not isinstance(node.ctx, ast.Load):
            if name.startswith("__") and name not in ASSIGNED:
                self._doubt(node, f"binds {name}")
        elif any(name in parameters for parameters in self._parameters):
            return
        elif name in self._suspects:
            self._doubt(node, f"uses {self._suspects[name]}")
        elif name in self._modules:
            self._doubt(node, f"uses the module {self._modules[name]} as a value")
        elif name in HARMLESS_BUILTINS:
            return
        elif name in vars(builtins):
            self._doubt(node, f"uses {name}")
        elif name not in self._bound:
            self._doubt(node, f"uses the unknown name {name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = [node]
        while isinstance(chain[-1].value, ast.Attribute):
            chain.append(chain[-1].value)
        base = chain[-1].value
        if not (isinstance(base, ast.Name) and self._is_module_name(base.id)):
            self._attribute(node)
            self.visit(node.value)
            return
        module = self._modules[base.id]
        while chain:
            link = chain.pop()
            if self._is_module(f"{module}.{link.attr}"):
                module = f"{module}.{link.attr}"
                continue
            if not self._has(module, link.attr) or not isinstance(link.ctx, ast.Load):
                self._doubt(link, f"uses {module}.{link.attr}")
            for rest in chain:
                self._attribute(rest)
            return
        self._doubt(node, f"uses the module {module} as a value")

    def _is_module_name(self, name: str) -> bool:
        return name in self._modules and not any(name in parameters for parameters in self._parameters)

    def _attribute(self, node: ast.Attribute) -> None:
        name = node.attr
        if name in ("format", "format_map") and not self._is_literal(node.value):
            self._doubt(node, f"formats by a text that is no literal (.{name})")
        elif name in ("open", "replace") and id(node) not in self._called:
            self._doubt(node, f"uses .{name} as a value")
        else:
            self._attribute_name(node, name)

    def _is_literal(self, node: ast.expr) -> bool:
        """Return whether a value is a literal, or a name that the file binds once, to a literal."""
        if not isinstance(node, ast.Name):
            return isinstance(node, ast.Constant)
        is_parameter = any(
            each.arg == node.id for each in ast.walk(self._source.tree) if isinstance(each, ast.arg)
        )
        bound = [
            statement.value
            for statement in self._source.tree.body
            if isinstance(statement, ast.Assign)
            and node.id in {ast.unparse(each) for each in statement.targets}
        ]
        is_once = sum(each == node.id for each in _bound(self._source.tree)) == 1 and not is_parameter
        return is_once and len(bound) == 1 and isinstance(bound[0], ast.Constant)

    def _attribute_name(self, node: ast.AST, name: str) -> None:
        is_special = name.startswith("__") and name.endswith("__")
        is_private = name.startswith("_") and not is_special and name not in self._own_attributes
        if (is_special and name not in SPECIAL) or is_private or name in LEADING or name in WRITING:
            self._doubt(node, f"uses the attribute {name}")

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self._attribute_name(node, name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if self._makes_object(node):
            return
        is_spread = any(isinstance(each, ast.Starred) for each in node.args) or any(
            keyword.arg is None for keyword in node.keywords
        )
        if isinstance(function, ast.Name) and not any(function.id in each for each in self._parameters):
            if function.id == "open":
                is_harmless = not is_spread and _reads(node, place=1)
            elif function.id in _BY_NAME:
                is_harmless = not is_spread and self._takes_name(node)
            elif function.id == "type":
                is_harmless = not is_spread and len(node.args) == 1 and not node.keywords
            else:
                is_harmless = False
                self.visit(function)
            if function.id in ("open", "type", *_BY_NAME) and not is_harmless:
                self._doubt(node, f"calls {function.id} in a way that is not known to be harmless")
        else:
            self.visit(function)
        if isinstance(function, ast.Attribute):
            self._method(node, function, is_spread=is_spread)
        for each in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(each)

    def _method(self, node: ast.Call, function: ast.Attribute, *, is_spread: bool) -> None:
        if isinstance(function.value, ast.Name) and self._is_module_name(function.value.id):
            return
        if function.attr == "open" and (is_spread or not _reads(node, place=0)):
            self._doubt(node, "opens a file in a way that is not known to be harmless")
        if function.attr == "replace" and (is_spread or (len(node.args) == 1 and not node.keywords)):
            self._doubt(node, "may move a file (.replace with one argument)")

    def _makes_object(self, node: ast.Call) -> bool:
        """Return whether a call only makes an object of a class or sets one attribute of the object."""
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=kind), attr="__new__"), args=[ast.Name(id=of)]
            ):
                return kind == of and not node.keywords
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="object"), attr="__setattr__"),
                args=[ast.Name() as target, ast.Constant(value=str(name)), ast.Name() as value],
            ):
                self._attribute_name(node, name)
                self.visit(target)
                self.visit(value)
                return True
        return False

    def _takes_name(self, node: ast.Call) -> bool:
        if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
            return False
        name = node.args[1].value
        if isinstance(name, str) and name not in ("format", "format_map", "open", "replace"):
            if isinstance(node.args[0], ast.Name) and self._is_module_name(node.args[0].id):
                return False
            self._attribute_name(node, name)
            return True
        return False


def _is_unused(test: ast.expr, bound: set[str]) -> bool:
    """Return whether a block is for type checkers, or for the file as a program."""
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(value=ast.Name(id="typing"), attr="TYPE_CHECKING"):
            return True
        case ast.Compare(
            left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]
        ):
            return "__name__" not in bound
    return False


def _reads(node: ast.Call, place: int) -> bool:
    """Return whether a call opens a file for reading, by a mode that is a literal."""
    modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"] or node.args[
        place : place + 1
    ]
    if not modes:
        return not any(keyword.arg == "opener" for keyword in node.keywords)
    mode = modes[0]
    is_text = isinstance(mode, ast.Constant) and isinstance(mode.value, str)
    return is_text and not set(str(ast.literal_eval(mode))) & set("wax+")


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file binds, in any scope."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name


def _own_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes that a file defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            yield from (str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant))
        elif isinstance(node, ast.ClassDef):
            for statement in ast.walk(node):
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield statement.name
                elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
                    yield statement.id
