"""Operators: small faults that change a file's code, each as a replacement text for a place.

    values   comparison, operator, and or, sign, constant, min max, return value
    parts    operand dropped, argument dropped, arguments swapped
    flow     condition negated, statement removed, call deleted, break continue, except body

Messages for people (errors, logs, f-strings), annotations and decorators stay unchanged.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_SPOKEN = ("logger", "warnings")
"""Objects whose calls write messages for people."""
_UNHEARD = ("description", "device")
"""Arguments whose removal no CPU test can detect: texts, and the device if there is only one."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    """File, relative to the repository's root."""
    line: int
    """Line where the change begins, from 1."""
    kind: str
    """The operator."""
    start: int
    """First character of the file that is replaced."""
    stop: int
    """First character of the file that is kept after it."""
    old: str
    """Replaced text."""
    new: str
    """New text."""
    within: str
    """The text of the line, and the range of its characters that changes."""

    @property
    def package(self) -> str:
        """The package; for a file of the root, the file's name."""
        return self.path.split("/")[1].removesuffix(".py")

    @property
    def name(self) -> str:
        """A name that stays the same while the text of the line stays the same."""
        return f"{self.path}: {self.within}: {' '.join(self.new.split())}"

    def applied(self, text: str) -> str:
        """Return the file's text with the change."""
        assert text[self.start : self.stop] == self.old
        return text[: self.start] + self.new + text[self.stop :]

    def parses(self, text: str) -> bool:
        """Return whether the changed file is still valid Python."""
        try:
            ast.parse(self.applied(text))
        except SyntaxError:
            return False
        return True


def draw(texts: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """Draw lines uniformly without replacement, then an operator of the line, then one of its mutants.

    Lines whose drawn mutant does not parse are skipped. A larger draw begins with the smaller draw of the
    same seed.
    """
    lines: dict[tuple[str, int], dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for path, text in texts.items():
        for mutant in mutants_of(path, text):
            lines[path, mutant.line][mutant.kind].append(mutant)
    chance, drawn = random.Random(seed), []
    for place in chance.sample(sorted(lines), len(lines)):
        mutant = chance.choice(lines[place][chance.choice(sorted(lines[place]))])
        if mutant.parses(texts[mutant.path]):
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Return every mutant of a file, in text order; a few do not parse."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def place(line: int, column: int) -> int:  # columns are UTF-8 bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = {}
    for change in _changes(ast.parse(text)):
        start = place(change.first.lineno, change.first.col_offset)
        stop = place(change.last.end_lineno, change.last.end_col_offset)
        first = start - starts[change.first.lineno - 1]
        mutant = Mutant(
            path=path,
            line=change.first.lineno,
            kind=change.kind,
            start=start,
            stop=stop,
            old=text[start:stop],
            new=change.new,
            within=f"{lines[change.first.lineno - 1].strip()}: {first}-{first + stop - start}",
        )
        if mutant.old != mutant.new.strip("()"):
            found[start, stop, mutant.new] = mutant
    return sorted(found.values(), key=lambda each: (each.start, each.stop, each.kind, each.new))


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A replacement text for one node or a run of statements."""

    first: Any
    """The node where the place begins."""
    last: Any
    """The node at which it ends."""
    kind: str
    """The operator."""
    new: str
    """The text."""


def _changes(tree: ast.AST) -> Iterator[_Change]:
    """Yield the changes of a module."""
    for node in _code(tree):
        for kind, place, new in (*_values(node), *_parts(node), *_flow(node)):
            yield _Change(first=place, last=place, kind=kind, new=new)
        if isinstance(node, ast.ExceptHandler):
            for new in ("pass", "raise"):
                yield _Change(first=node.body[0], last=node.body[-1], kind="except body", new=new)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            for returned in _returns(node):
                if (new := _other_value(returned.value, ast.unparse(node.returns))) is not None:
                    yield _Change(first=returned.value, last=returned.value, kind="return value", new=new)


def _values(node: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield operators that change a value."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", node, f"({ast.unparse(left)} {_COMPARISONS[type(op)]} {ast.unparse(right)})"
        case ast.BinOp(op=op) if _computes(node):
            new = _OPERATORS[type(op)]
            yield "operator", node, f"(({ast.unparse(node.left)}) {new} ({ast.unparse(node.right)}))"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield "and or", node, f"({word.join(f'({ast.unparse(value)})' for value in values)})"
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "sign", node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", node, str(value + 1)
            yield "constant", node, f"({value - 1})"
        case ast.Constant(value=float() as value):
            yield "constant", node, str(2 * value if value else 1.0)
        case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
            yield "min max", function, "max" if name == "min" else "min"


def _parts(node: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield operators that drop or exchange a part of an expression."""
    match node:
        case ast.BinOp() if _computes(node):
            yield from (("operand dropped", node, f"({ast.unparse(e)})") for e in (node.left, node.right))
        case ast.BoolOp(values=values):
            for dropped in values:
                kept = [value for value in values if value is not dropped]
                new = ast.unparse(kept[0] if len(kept) == 1 else ast.BoolOp(op=node.op, values=kept))
                yield "operand dropped", node, f"({new})"
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for keyword in keywords:
                if keyword.arg not in (None, *_UNHEARD):
                    kept = [each for each in keywords if each is not keyword]
                    new = ast.unparse(ast.Call(func=function, args=arguments, keywords=kept))
                    yield "argument dropped", node, new
            for place, (one, other) in enumerate(pairwise(arguments)):
                if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                    swapped = [*arguments[:place], other, one, *arguments[place + 2 :]]
                    new = ast.unparse(ast.Call(func=function, args=swapped, keywords=keywords))
                    yield "arguments swapped", node, new
            if len(arguments) == 1 and not isinstance(arguments[0], ast.Starred | ast.GeneratorExp):
                yield "call deleted", node, f"({ast.unparse(arguments[0])})"


def _flow(node: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield operators that change which statements run."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition negated", node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.comprehension(ifs=[test, *_]):
            yield "condition negated", test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(value=ast.Call()):
            yield "call deleted", node, "pass"
        case ast.Raise() | ast.AugAssign():
            yield "statement removed", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "statement removed", node, "pass"
        case ast.Break():
            yield from (("break continue", node, new) for new in ("continue", "pass"))
        case ast.Continue():
            yield from (("break continue", node, new) for new in ("break", "pass"))


def _other_value(value: Any, annotation: str) -> str | None:
    """Return another value of the returned value's type, or None if another operator changes the value."""
    if value is None or isinstance(value, ast.Constant | ast.JoinedStr) or annotation in ("None", "NoReturn"):
        return None
    text = ast.unparse(value)
    match annotation.split("[")[0]:
        case "bool":
            return f"(not ({text}))"
        case "int" | "float":
            return f"(({text}) + 1)"
        case "str":
            return '""'
        case "list" | "dict" | "set" | "tuple":
            return {"list": "[]", "dict": "{}", "set": "set()", "tuple": "()"}[annotation.split("[")[0]]
    return "None"


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """Yield a function's own returns, without those of nested functions."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returns(child)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code that computes, without annotations and the texts of errors and logs."""
    yield tree
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.Raise | ast.Assert):
                yield from [child] if isinstance(child, ast.Raise) else []
            elif not _says(child):
                yield from _code(child)


def _says(node: ast.AST) -> bool:
    """Return whether a node makes a text for people: an f-string, an error, a log line."""
    match node:
        case ast.JoinedStr():
            return True
        case ast.Expr(value=call):
            return _says(call)
        case ast.Call(func=function):
            named = ast.unparse(function)
            spoken = named.endswith("Error") or named.split(".")[0] in _SPOKEN
            return spoken or named in ("TypeVar", "cast")
    return False


def _computes(node: ast.BinOp) -> bool:
    """Return whether an operation is arithmetic, not a concatenation of texts or lists."""
    return type(node.op) in _OPERATORS and not (_is_text(node.left) or _is_text(node.right))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
