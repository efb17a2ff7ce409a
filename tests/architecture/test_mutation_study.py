"""The operators of the mutation study: each makes the fault it is named for, and leaves words alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "mutation"))
from operators import mutants_of  # type: ignore[import-not-found]


def made(text: str) -> set[tuple[str, str]]:
    """Kinds and lines that change, of a snippet's mutants."""
    found = set()
    for mutant in mutants_of("snippet.py", text):
        changed = mutant.applied(text)
        ast.parse(changed)
        lines = zip(text.splitlines(), changed.splitlines(), strict=True)
        found.add((mutant.kind, next(new.strip() for old, new in lines if old != new)))
    return found


@pytest.mark.parametrize(
    ("text", "kind", "changed"),
    [
        ("x = a < b", "comparison", "x = (a <= b)"),
        ("x = a in b", "comparison", "x = (a not in b)"),
        ("x = a + b", "operator", "x = ((a) - (b))"),
        ("x = a // b", "operator", "x = ((a) * (b))"),
        ("x = a and b or c", "and or", "x = ((a) or (b)) or c"),
        ("x = not a", "sign", "x = (a)"),
        ("x = 3", "constant", "x = 4"),
        ("x = True", "constant", "x = False"),
        ("x = 0.5", "constant", "x = 1.0"),
        ("x = min(a, b)", "min max", "x = max(a, b)"),
        ("x = f(a, b=c)", "argument dropped", "x = f(a)"),
        ("if a: b()", "condition negated", "if (not (a)): b()"),
        ("x = [a for a in b if c]", "condition negated", "x = [a for a in b if (not (c))]"),
        ("a.append(b)", "statement removed", "pass"),
        ("a.b = c", "statement removed", "pass"),
        ("a += b", "statement removed", "pass"),
        ("if a: raise ValueError(1)", "statement removed", "if a: pass"),
        ("ä = 'ü'; x = a < b", "comparison", "ä = 'ü'; x = (a <= b)"),  # columns are bytes
    ],
)
def test_a_fault_of_every_kind_is_made(text: str, kind: str, changed: str) -> None:
    assert (kind, changed) in made(text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Three words, 3."""',
        "def f(a: Literal[3], b: int | None) -> Box[4]: ...",
        "x = f'{a + 3}'",
        "x = ConfigError('wrong', why='it is 3')",
        "@dataclass(frozen=True)\nclass A: ...",
        "x = y.to(device=device)",
        "x = 'a' + b",
    ],
)
def test_words_annotations_and_decorators_are_left_alone(text: str) -> None:
    assert made(text) == set()


def test_a_removed_raise_takes_its_words_with_it_and_no_other_fault_is_in_them() -> None:
    assert made("raise ValueError(a + 1)") == {("statement removed", "pass")}


def test_a_mutant_is_known_by_its_line_and_place() -> None:
    one, other = (mutant for mutant in mutants_of("a.py", "x = 1\ny = 1\n") if mutant.kind == "constant")
    assert one.name != other.name
    moved = mutants_of("a.py", "# more\nx = 1\ny = 1\n")[0]
    assert (moved.name, moved.line) == (one.name, 2)
