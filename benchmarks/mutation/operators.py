"""Operators: the small faults of a file that still parses, each as the text that takes a place.

    comparison, operator, and or, sign, constant, min max    another value
    condition negated, statement removed, argument dropped   another way

What is said to people (errors, logs, f-strings), annotations and decorators are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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
"""What is called to say something; the words and whether they are said are another study."""


_UNHEARD = ("description", "device")
"""Arguments whose loss no processor can tell: words, and the device where there is only one."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    """From the repository's root."""
    line: int
    """Where it begins, from 1."""
    kind: str
    """The operator."""
    start: int
    """First character of the file that goes."""
    stop: int
    """The first that stays."""
    old: str
    """What stood there."""
    new: str
    """What stands there instead."""
    within: str
    """Its line, and which characters of it."""

    @property
    def package(self) -> str:
        """The package of the trunk."""
        return self.path.split("/")[1]

    @property
    def name(self) -> str:
        """How it is known from run to run; the same as long as its line's text stays."""
        return f"{self.path}: {self.within}: {' '.join(self.new.split())}"

    def applied(self, text: str) -> str:
        """The file's text with the change."""
        assert text[self.start : self.stop] == self.old
        return text[: self.start] + self.new + text[self.stop :]


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Every mutant of a file that still parses, in the order of its text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def place(line: int, column: int) -> int:  # columns are bytes of UTF-8
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node, kind, new in _changes(ast.parse(text)):
        start = place(node.lineno, node.col_offset)
        stop = place(node.end_lineno, node.end_col_offset)
        first = start - starts[node.lineno - 1]
        within = f"{lines[node.lineno - 1].strip()}: {first}-{first + stop - start}"
        old = text[start:stop]
        mutant = Mutant(
            path=path, line=node.lineno, kind=kind, start=start, stop=stop, old=old, new=new, within=within
        )
        try:
            ast.parse(mutant.applied(text))
        except SyntaxError:
            continue
        found.append(mutant)
    return sorted(found, key=lambda each: (each.start, each.stop, each.kind, each.new))


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str, str]]:
    """Nodes, the operator's name, and the text in the node's place."""
    for node in _code(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield (
                    node,
                    "comparison",
                    f"({ast.unparse(left)} {_COMPARISONS[type(op)]} {ast.unparse(right)})",
                )
            case ast.BinOp(op=op) if type(op) in _OPERATORS and not (
                _is_text(node.left) or _is_text(node.right)
            ):
                new = _OPERATORS[type(op)]
                yield node, "operator", f"(({ast.unparse(node.left)}) {new} ({ast.unparse(node.right)}))"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield node, "and or", f"({word.join(f'({ast.unparse(value)})' for value in values)})"
            case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
                yield node, "sign", f"({ast.unparse(operand)})"
            case ast.Constant(value=bool() as value):
                yield node, "constant", str(not value)
            case ast.Constant(value=int() as value):
                yield node, "constant", str(value + 1)
            case ast.Constant(value=float() as value):
                yield node, "constant", str(2 * value if value else 1.0)
            case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
                yield function, "min max", "max" if name == "min" else "min"
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                kept = [each for each in node.keywords if each is not keyword]
                fewer = ast.Call(func=node.func, args=node.args, keywords=kept)
                if keyword.arg not in (None, *_UNHEARD):
                    yield node, "argument dropped", ast.unparse(fewer)
        if isinstance(node, ast.If | ast.While | ast.IfExp) or (
            isinstance(node, ast.comprehension) and node.ifs
        ):
            test = node.ifs[0] if isinstance(node, ast.comprehension) else node.test
            yield test, "condition negated", f"(not ({ast.unparse(test)}))"
        if isinstance(node, ast.Raise | ast.Continue | ast.Break | ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield node, "statement removed", "pass"
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            yield node, "statement removed", "pass"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of code that computes: no annotation, no word of an error or of a log, no slice of a type."""
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
    """Whether a node makes words for people: an f-string, an error, a line of a log."""
    if isinstance(node, ast.JoinedStr):
        return True
    named = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return named.endswith("Error") or named.split(".")[0] in _SPOKEN or named in ("TypeVar", "cast", "Field")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
