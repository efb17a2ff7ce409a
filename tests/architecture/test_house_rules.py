"""Rules for every file: no data run as code, no utils module, no print, no algorithm's name, no long file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import pytest

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.sections import Recipe
from rillflow.config.schema import walk

FILE_LINES = 500
FUNCTION_LINES = 60

BANNED_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load"}
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_OPTIONS = {
    "weights_only": False,
    "trust_remote_code": True,
    "allow_pickle": True,
    "shell": True,
}
MESSAGES = {"rillflow/workers/messages.py"}
"""Messages between ranks of one run use cloudpickle, inside the run's own cluster, never in a file."""
DRAWERS = {"utils", "util", "common", "base", "types", "manager", "experimental", "helpers", "misc"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
ORDINARY_WORDS = {"preference", "pairwise", "dpo"}
"""Names of algorithms that are also common terms.

Records, losses and formulas use them, and so does a function of itertools.
"""
PRINTING = re.compile(r"rillflow/cli/|(plugins/\w+/rillflow_\w+|rillflow_parts/\w+)/(commands|plugin)\.py$")
"""Files of commands."""
CLASSIC_ALGORITHMS = "plugins/classic/rillflow_classic/algorithms/"
"""Folder of the classic algorithms."""
ALGORITHM_FILES = {f"rillflow/algorithms/{name}.py" for name in ("registry", *ALGORITHMS)} | {
    "plugins/training_service/rillflow_training_service/losses.py"
}
"""Files that name an algorithm; the protocol of the training service names its losses so."""


def dotted(node: ast.AST) -> str:
    """Return ``torch.load`` for the syntax tree of torch.load, or an empty text."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def runs_data_as_code(source: Any) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            names -= {"cloudpickle", "pickle"} if source.path in MESSAGES else set()
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & BANNED_CALLS
            names |= {alias.name for alias in node.names} & BANNED_MODULES
        elif isinstance(node, ast.Attribute):
            names = {node.attr} if source.path not in MESSAGES else set()
            names &= BANNED_MODULES
        elif isinstance(node, ast.Call):
            names = {dotted(node.func)} & BANNED_CALLS
            for option in node.keywords:
                value = option.value.value if isinstance(option.value, ast.Constant) else None
                if option.arg in BANNED_OPTIONS and value is BANNED_OPTIONS[option.arg]:
                    yield f"{source.path}:{node.lineno} {option.arg}={value}"
        else:
            continue
        yield from (f"{source.path}:{node.lineno} {name}" for name in names & (BANNED_MODULES | BANNED_CALLS))


def prints(source: Any) -> Iterator[str]:
    if PRINTING.match(source.path):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield f"{source.path}:{node.lineno} print"


def is_a_drawer(source: Any) -> Iterator[str]:
    yield from (
        f"{source.path} is called {part}"
        for part in PurePath(source.path).with_suffix("").parts
        if part in DRAWERS
    )


def is_too_long(source: Any) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield f"{source.path} has {lines} lines"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{source.path}:{node.lineno} {node.name} has {length} lines"


def is_unfinished(source: Any) -> Iterator[str]:
    if not UNFINISHED.search(source.text):  # the tokens of all files take seconds
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
            yield f"{source.path}:{token.start[0]} {token.string}"


def names_an_algorithm(source: Any) -> Iterator[str]:
    """Yield identifiers and texts that contain an algorithm's name; docstrings may contain it."""
    if source.path in ALGORITHM_FILES or source.path.startswith(CLASSIC_ALGORITHMS):
        return
    documentation = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text))
            ):
                pass
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.alias(name=text):
                pass
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                pass
            case _:
                continue
        words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower())
        for name in (ALGORITHMS.keys() - ORDINARY_WORDS) & set(words):
            yield f"{source.path}:{node.lineno} {name}"


Scan = Callable[[Any], Iterator[str]]


@pytest.mark.parametrize("scan", [prints, names_an_algorithm, runs_data_as_code])
def test_the_package_its_parts_and_the_plugins_keep_the_rule(
    package: list[Any], parts: list[Any], plugins: list[Any], scan: Scan
) -> None:
    assert [line for source in (*package, *parts, *plugins) for line in scan(source)] == []


@pytest.mark.parametrize("scan", [is_a_drawer, is_too_long, is_unfinished])
def test_everything_keeps_the_rule(everything: list[Any], scan: Scan) -> None:
    assert [line for source in everything for line in scan(source)] == []


def test_settings_are_described() -> None:
    values = [key for key in walk(Recipe) if not key.is_section]
    silent = [key.dotted for key in values if not key.field.description and key.path[-1] != "name"]
    assert silent == []


def test_data_is_not_code_in_what_is_shipped_beside_the_package(everything: list[Any]) -> None:
    shipped = [source for source in everything if "tests" not in PurePath(source.path).parts]
    assert [line for source in shipped for line in runs_data_as_code(source)] == []


@pytest.mark.parametrize(
    ("scan", "path", "text"),
    [
        (runs_data_as_code, "a.py", "eval('1')"),
        (runs_data_as_code, "a.py", "import os\nos.system('ls')"),
        (runs_data_as_code, "a.py", "from os import system"),
        (runs_data_as_code, "a.py", "def f():\n    import pickle"),
        (runs_data_as_code, "a.py", "from pickle import loads"),
        (runs_data_as_code, "a.py", "import ray\nray.cloudpickle.loads(data)"),
        (runs_data_as_code, "a.py", "from ray import cloudpickle"),
        (runs_data_as_code, "a.py", "torch.load(file)"),
        (runs_data_as_code, "a.py", "load(file, weights_only=False)"),
        (runs_data_as_code, "a.py", "AutoModel.from_pretrained(name, trust_remote_code=True)"),
        (runs_data_as_code, "a.py", "subprocess.run(text, shell=True)"),
        (prints, "rillflow/training/a.py", "print(1)"),
        (prints, "plugins/planner/rillflow_planner/search.py", "print(1)"),
        (is_a_drawer, "rillflow/training/utils.py", ""),
        (is_a_drawer, "rillflow/common/loss.py", ""),
        (is_too_long, "a.py", "def f():\n" + "    x = 1\n" * 60),
        (is_too_long, "a.py", "x = 1\n" * 501),
        (is_unfinished, "a.py", "x = 1  # TODO later"),
        (names_an_algorithm, "rillflow/controller/a.py", "if config.name == 'grpo': pass"),
        (names_an_algorithm, "rillflow/controller/a.py", "from rillflow.algorithms import sft"),
        (names_an_algorithm, "rillflow/controller/a.py", "def run_grpo_step(): pass"),
        (names_an_algorithm, "rillflow/controller/a.py", "GrpoLoop()"),
    ],
)
def test_the_scans_can_fail(source: Any, scan: Scan, path: str, text: str) -> None:
    assert len(list(scan(source(path, text)))) == 1


@pytest.mark.parametrize(
    ("scan", "path", "text"),
    [
        (runs_data_as_code, "a.py", "model.eval()\nre.compile('x')\nload(file, weights_only=True)"),
        (prints, "rillflow/cli/a.py", "print(1)"),
        (is_a_drawer, "rillflow/training/loss.py", ""),
        (is_too_long, "a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 59),
        (is_unfinished, "a.py", "x = 'TODO'"),
        (
            names_an_algorithm,
            "rillflow/controller/a.py",
            '"""As in docs/algorithms/grpo.md."""\nx = "softer"',
        ),
        (names_an_algorithm, "rillflow/algorithms/grpo.py", "name = 'grpo'"),
    ],
)
def test_the_scans_do_not_cry_wolf(source: Any, scan: Scan, path: str, text: str) -> None:
    assert list(scan(source(path, text))) == []
