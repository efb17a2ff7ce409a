"""Budgets: lines of files and functions, code lines of the trunk and of all, settings that a recipe shows."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import Any

import pytest

from rillflow.assembly.check import setting_lines
from rillflow.assembly.recipe import Recipe, load_recipe
from rillflow.config.schema import walk

FILE_LINES = 500
FUNCTION_LINES = 60
SETTINGS = 90
"""A recipe of any one algorithm shows fewer."""
TRUNK = [
    "records",
    "placement",
    "graph",
    "formulas",
    "cluster",
    "workers",
    "models",
    "parallel",
    "training",
    "weights",
    "rollout",
    "roles",
    "dataflow",
    "pipeline",
    "algorithms",
]
TRUNK_LINES = 10_917
"""Code lines of the trunk at most: no blank, no comment, no docstring; what it grew by since stands below."""
GROWN = {
    "several machines": 264,
    "models larger than a rank": 564,
    "a controller of many ranks": 370,
    "saving beside training, sums in buckets": 283,
    "judges and their evaluation": 616,
    "adapters, small mixtures": 348,
    "vLLM": 420,
    "vLLM as a server with adapters": 384,
    "sums that begin in the backward pass": 94,
    "offload refused in words": 9,
    "soft caps and sinks, rows side by side": 107,
    "a tail that is cut": 41,
    "agents' rows, rows that are looked at": 63,
    "mixtures whose routing is seen and said": 376,
    "memory by bands, a budget, shared beginnings, penalties": 569,
    "mixtures whose experts are shared out": 118,
    "gradients that add up in order": 3,
    "pairs and the best of sampled groups, iterations, moving references": 410,
    "a base of 8 bits": 143,
    "losses of pairs, totals kept with the data": 340,
    "headers of files that are written, settings that are read": 15,
    "a loss of single answers": 145,
    "attention that shared beginnings ask for once": 27,
    "frames that a chat template writes, vLLM's models without a head of their own": 12,
}
"""Code lines in the trunk by the capability that needed them; docs/architecture.md says why."""
PACKAGE_LINES = 32_451
"""Code lines of the whole package at most, the subsystems below aside; lowered whenever something goes."""
SUBSYSTEMS = {
    "data_plane/": 2_051,
    "service/": 1_160,
    "dataflow/parted.py": 121,
    "dataflow/ready_first.py": 239,
    "dataflow/tail_cut.py": 112,
    "merging/": 1_079,
}
"""What has a budget of its own; a run that streams no rows and cuts no tail does without."""
PLANNER = [
    "rillflow/planner/",
    *(f"rillflow/assembly/{name}.py" for name in ("planning", "planned", "rows")),
    *(f"rillflow/view/{name}.py" for name in ("plans", "predicted", "timeline")),
    "rillflow/cli/planning.py",
]
"""What plans, with what feeds and shows it."""
PLANNER_LINES = 4_600
"""Code lines of it at most; lowered whenever something goes."""
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.toml"))
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def over_budget(source: Any) -> list[str]:
    """The file and the functions in it that are too long."""
    lines = len(source.text.splitlines())
    found = [f"{source.path} has {lines} lines"] if lines > FILE_LINES else []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{source.path}:{node.lineno} {node.name} has {length} lines")
    return found


def code_lines(source: Any) -> int:
    """Lines with a token that is neither comment nor docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None
            found -= set(range(node.lineno, node.end_lineno + 1))
    return len(found)


def test_the_trunk_and_the_whole_are_small(package: list[Any]) -> None:
    lines = {source.path: code_lines(source) for source in package}
    apart = {
        name: sum(lines.pop(path) for path in [*lines] if path.startswith(f"rillflow/{name}"))
        for name in SUBSYSTEMS
    }
    assert (
        5_000
        < sum(lines[path] for path in lines if path.split("/")[1] in TRUNK)
        <= TRUNK_LINES + sum(GROWN.values())
    )
    assert all(0 < apart[name] <= most for name, most in SUBSYSTEMS.items())
    assert sum(lines.values()) <= PACKAGE_LINES
    assert 3_000 < sum(lines[path] for path in lines if path.startswith(tuple(PLANNER))) <= PLANNER_LINES


def test_no_file_and_no_function_is_too_long(everything: list[Any]) -> None:
    assert [line for source in everything for line in over_budget(source)] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_shows_few_settings(path: Path) -> None:
    assert 30 < len(setting_lines(load_recipe(path))) < SETTINGS


def test_settings_are_described() -> None:
    values = [key for key in walk(Recipe) if not key.is_section]
    silent = [key.dotted for key in values if not key.field.description and key.path[-1] != "name"]
    assert silent == []


def test_the_scan_can_fail(source: Any) -> None:
    long_function = "def f():\n" + "    x = 1\n" * 60
    assert over_budget(source("a.py", long_function)) == ["a.py:1 f has 61 lines"]
    assert over_budget(source("a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 59)) == []
    assert over_budget(source("a.py", "x = 1\n" * 501)) == ["a.py has 501 lines"]
    assert code_lines(source("a.py", '"""Says."""\n\n# why\nx = (\n    1\n)\n')) == 3
