"""Check calls: run a test function, such as HumanEval's ``check``, without the program that it tests.

    check ─ asserts record the arguments of candidate(...) ─> run apart from the program ─> arguments
    program ─ entry_point(*arguments) ──────────────────────> its process ──────────────> values, as literals
    check ─ candidate(...) returns the values in order ─────> run apart from the program ─> passed or not

Only literals cross between the processes, so an object that claims to equal everything is no answer, and the
program never runs beside the expected values. Standard library only.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Callable, Sequence

from rillflow.rewards.syntax import parsed

Run = Callable[[str], str]
"""Runs a program in the sandbox and returns its standard output."""


def is_separable(test: str) -> bool:
    """Return whether a test is a function ``check`` that calls its argument in asserts only."""
    return _recording(test, "") is not None


def passes(test: str, program: str, setup: str, entry_point: str, run: Run) -> bool:
    """Return whether a program passes a separable test.

    Args:
        test: source with a function ``check``.
        program: source that defines the entry point.
        setup: source that runs before the test and after the program.
        entry_point: name of the tested function.
        run: see ``Run``.
    """
    mark = secrets.token_hex(16)
    recording = _recording(test, mark)
    assert recording is not None, "the test is separable"
    calls = _marked(run(f"{setup}\n{recording}\ncheck(None)\n"), mark)
    values = printed_values(program, [f"{entry_point}(*{each})" for each in calls], setup, run)
    if not all(is_literal(each) for each in (*calls, *values)):
        return False
    replayed = f"_values = iter([{', '.join(values)}])\ndef _candidate(*_, **__):\n    return next(_values)\n"
    done = f"check(_candidate)\nprint({mark!r}, 'done')"
    return _marked(run(f"{setup}\n{test}\n{replayed}\n{done}\n"), mark)[-1:] == ["done"]


def printed_values(program: str, expressions: Sequence[str], setup: str, run: Run) -> list[str]:
    """Return the printed value of each expression after the program; empty where it raised or is missing."""
    if not expressions:
        return []
    mark = secrets.token_hex(16)
    tail = "".join(
        f"\ntry:\n    print({f'{mark} {place} '!r} + repr({each}), flush=True)\n"
        "except BaseException:\n    pass"
        for place, each in enumerate(expressions)
    )
    values = [""] * len(expressions)
    for line in _marked(run(f"{program}\n{setup}\n{tail}\n"), mark):
        place, _, value = line.partition(" ")
        if place.isdecimal() and int(place) < len(values):
            values[int(place)] = value
    return values


def _recording(test: str, mark: str) -> str | None:
    """Return a test whose asserts print the arguments of their calls; None if it cannot be separated."""
    try:
        tree = parsed(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        return None
    recorder = _Recorder(checks[0].args.args[0].arg, mark)
    recorder.visit(checks[0])
    uses = sum(isinstance(node, ast.Name) and node.id == recorder.name for node in ast.walk(checks[0]))
    return ast.unparse(ast.fix_missing_locations(tree)) if not uses and recorder.num_calls else None


class _Recorder(ast.NodeTransformer):
    """Replacement of each assert by prints of the arguments of its calls."""

    def __init__(self, name: str, mark: str) -> None:
        self.name, self.num_calls = name, 0
        self._mark = mark

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Replace an assert whose calls are always made and have positional arguments only."""
        calls = _calls(node.test, self.name)
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == self.name]
        if len(calls) != len(names) or any(call.keywords for call in calls):
            return node
        self.num_calls += len(calls)
        given = [ast.unparse(ast.Tuple(elts=call.args, ctx=ast.Load())) for call in calls]
        shown = [f"print({self._mark!r}, repr({arguments}))" for arguments in given]
        return parsed("if True:\n    " + "\n    ".join(shown or ["pass"])).body[0]


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a name in an expression, in the order of evaluation; none below a condition."""
    if isinstance(node, ast.Lambda | ast.BoolOp | ast.IfExp | ast.ListComp | ast.SetComp | ast.DictComp):
        return []
    if isinstance(node, ast.GeneratorExp) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
        return []
    found = [call for child in ast.iter_child_nodes(node) for call in _calls(child, name)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
        return [*found, node] if not found else []
    return found


def _marked(output: str, mark: str) -> list[str]:
    lines = [line.split(" ", 1) for line in output.splitlines() if line.split(" ", 1)[0] == mark]
    return [line[1] if len(line) > 1 else "" for line in lines]


def is_literal(text: str) -> bool:
    """Return whether a text is a Python literal."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return True
