"""Code tests: run the program of a completion in the sandbox; the score is the share of tests it passes.

    completion ─ last ```python block, else all of it ─ after the column prefix ─> program
    inputs, outputs ─> program with each input ─> its output is the expected one
    tests ─┬─ assert f(x) == literal ─> program prints f(x) ─> compared here
           ├─ def check(f) with asserts on f(...) ─> run apart from the program; see ``check_calls``
           └─ any other test ─> run after the program ─> it reached the end

Expected outputs, and the literals that asserts compare with, stay in the reward's process: a program cannot
print what it has not computed. A function ``check`` runs in a process of its own. Any other test runs in the
program's process. A program that ends early does not pass it, but one that looks for the test can cheat it;
``num_exposed`` counts such tests.
"""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rillflow.rewards.programs import run_python
from rillflow.rewards.syntax import parsed
from rillflow_parts.scorers.check_calls import is_literal, is_separable, passes, printed_values

LIMIT_S = 3.0
"""Longest run time of a program in seconds; after the first run that takes longer the other tests count as
failed."""
_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def code_tests(
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    tests: Sequence[object] | None = None,
    inputs: Sequence[Sequence[str] | None] | None = None,
    outputs: Sequence[Sequence[str] | None] | None = None,
    prefix: Sequence[str | None] | None = None,
    setup: Sequence[object] | None = None,
    entry_point: Sequence[str | None] | None = None,
) -> list[float | None]:
    """Return the share of its tests that each program passes; None for a row without tests.

    Args:
        completions: [B], each a text or a list of one assistant message.
        tests: [B], each a list of assert statements, or one text of statements, such as a function check.
        inputs: [B], the standard input of each test; without ``tests``.
        outputs: [B], the expected standard output of each test.
        prefix: [B], text before each program, such as the prompt that it continues.
        setup: [B], code or a list of lines that run before the tests, such as imports.
        entry_point: [B], name of the function that ``check`` of the tests receives.
    """
    if tests is None and (inputs is None or outputs is None):
        raise ValueError("code-tests needs a column 'tests', or the columns 'inputs' and 'outputs'")
    nothing = [None] * len(completions)
    columns = (column or nothing for column in (prefix, tests, inputs, outputs, setup, entry_point))
    return [
        _score(program_of(completion, before or ""), test, given, expected, _lines(code), name)
        for completion, before, test, given, expected, code, name in zip(completions, *columns, strict=True)
    ]


def program_of(completion: str | Sequence[Mapping[str, Any]], prefix: str = "") -> str:
    """Return the code of a completion: its last Python block, or all of it if there is no block."""
    text = completion if isinstance(completion, str) else str(completion[-1]["content"])
    blocks = _BLOCK.findall(text)
    return prefix + (blocks[-1] if blocks else text)


def _score(
    program: str, tests: object, inputs: Any, outputs: Any, setup: str, entry_point: str | None
) -> float | None:
    if tests:
        return _asserted(program, _statements(tests), setup, entry_point)
    return _printed(program, inputs, outputs) if inputs else None


def _printed(program: str, inputs: Sequence[str], outputs: Sequence[str]) -> float:
    right = 0
    for text, expected in zip(inputs, outputs, strict=True):
        finished = run_python(program, stdin=text, timeout_s=LIMIT_S)
        right += finished.exit_code == 0 and finished.stdout.split() == expected.split()
        if finished.timed_out:
            break
    return right / len(inputs)


def _asserted(program: str, statements: Sequence[str], setup: str, entry_point: str | None) -> float:
    """Return the share of asserts that hold; statements that are not one assert each count as one test."""
    compared = [_comparison(each) for each in statements]
    whole = [each for each, pair in zip(statements, compared, strict=True) if pair is None]
    pairs = [pair for pair in compared if pair is not None]
    printed = printed_values(program, [left for left, _ in pairs], setup, _output)
    right = sum(map(_is_right, printed, (expected for _, expected in pairs)))
    for each in whole:
        if entry_point and is_separable(each):
            right += passes(each, program, setup, entry_point, _output)
            continue
        call = f"\ncheck({entry_point})" if entry_point else ""
        done = secrets.token_hex(16)
        finished = run_python(f"{program}\n{setup}\n{each}{call}\nprint({done!r})", timeout_s=LIMIT_S)
        right += finished.stdout.rstrip("\n").rpartition("\n")[2] == done
        if finished.timed_out:
            break
    return right / len(statements)


def _output(program: str) -> str:
    return run_python(program, timeout_s=LIMIT_S).stdout


def num_exposed(tests: object, entry_point: object) -> int:
    """Return how many tests of a row run in the program's process, where a program may cheat them."""
    statements = _statements(tests) if tests else []
    whole = [each for each in statements if _comparison(each) is None]
    return sum(not (entry_point and is_separable(each)) for each in whole)


def _is_right(printed: str, expected: object) -> bool:
    return is_literal(printed) and bool(ast.literal_eval(printed) == expected)


def _comparison(statement: str) -> tuple[str, object] | None:
    """Return the two sides of ``assert call == literal``, the right one as its value; None for other code."""
    try:
        (only,) = parsed(statement).body
        if not (isinstance(only, ast.Assert) and isinstance(only.test, ast.Compare)):
            return None
        if len(only.test.ops) != 1 or not isinstance(only.test.ops[0], ast.Eq):
            return None
        return ast.unparse(only.test.left), ast.literal_eval(only.test.comparators[0])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _statements(tests: object) -> list[str]:
    """Return the asserts of a list, or of a text that holds nothing else; other texts are one test."""
    if isinstance(tests, list):
        return [str(each) for each in tests]
    try:
        parts = parsed(str(tests)).body
    except (SyntaxError, ValueError):
        return [str(tests)]
    if parts and all(isinstance(each, ast.Assert) for each in parts):
        return [ast.unparse(each) for each in parts]
    return [str(tests)]


def _lines(code: object) -> str:
    return "\n".join(map(str, code)) if isinstance(code, list) else str(code or "")
