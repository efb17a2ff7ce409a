"""Detection of text execution in a function's source, and the choice of ``auto``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.function import FunctionPath, parse_files
from rillflow.rewards.text_execution import is_shut_in, text_uses, visible_to

Write = Callable[..., FunctionPath]

IN_PROCESS = [
    "exec(completions[0])",
    "eval(completions[0])",
    "compile(completions[0], 'a', 'exec')",
    "run = exec",
    "__import__(completions[0])",
    "import builtins; builtins.exec(completions[0])",
    "import runpy; runpy.run_path(completions[0])",
    "import code; code.InteractiveInterpreter()",
    "from importlib import import_module; import_module(completions[0])",
]
STARTING = [
    "import subprocess; subprocess.run(completions)",
    "import subprocess as s; s.Popen(completions)",
    "from subprocess import check_output as c; c(completions)",
    "import os; os.system(completions[0])",
    "import os; os.fork()",
    "from os import posix_spawn; posix_spawn('a', [], {})",
    "import multiprocessing as m; m.Process()",
    "import asyncio; asyncio.create_subprocess_exec('a')",
    "import ctypes; ctypes.CDLL(None)",
    "from concurrent.futures import ProcessPoolExecutor as P; P()",
    "from rillflow.rewards.programs import run_python; run_python('1')",
]
HARMLESS = [
    "import re; re.compile('a')",
    "from re import compile; compile('a')",
    "model.eval()",
    "import ast; ast.literal_eval(completions[0])",
    "import importlib; importlib.import_module('json')",
    "import multiprocessing; multiprocessing.cpu_count()",
    "import os; os.getpid()",
    "eval('1 + 1')",
    "import subprocess",
]


def body(statement: str) -> str:
    return f"def reward(completions):\n    {statement}\n    return [1.0]\n"


@pytest.mark.parametrize("statement", IN_PROCESS)
def test_auto_refuses_text_in_the_functions_own_process(write: Write, statement: str) -> None:
    with pytest.raises(RewardError, match=r"rewards\.py, line 2") as caught:
        is_shut_in(write(body(statement)), "auto", unless_harmless=True)
    assert "run_python" in caught.value.fix


@pytest.mark.parametrize("statement", STARTING)
def test_auto_shuts_in_what_starts_processes(write: Write, statement: str) -> None:
    assert is_shut_in(write(body(statement)), "auto", unless_harmless=True)


@pytest.mark.parametrize("statement", HARMLESS)
def test_no_false_alarm(write: Write, statement: str) -> None:
    assert text_uses(write(body(statement))) == []


@pytest.mark.parametrize("setting", [True, False])
def test_a_setting_wins_over_what_is_recognised(write: Write, setting: bool) -> None:
    assert is_shut_in(write(body("exec(completions[0])")), setting, unless_harmless=True) is setting


def test_modules_beside_the_function_are_read_too(write: Write, tmp_path: Path) -> None:
    (tmp_path / "grading").mkdir()
    (tmp_path / "grading" / "__init__.py").write_text("")
    (tmp_path / "grading" / "run.py").write_text("import os\n\nos.system('x')\n")
    (tmp_path / "unused.py").write_text("exec(open('x').read())\n")
    function = write("import grading.run\ndef reward(completions): return [1.0]\n")
    assert [str(use) for use in text_uses(function)] == ["run.py:3 os.system"]
    names = {str(Path(file).relative_to(tmp_path)) for file in visible_to(function).copies}
    assert names == {"rewards.py", "grading/__init__.py", "grading/run.py"}


def test_a_listed_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    assert parse_files(["tests"], tmp_path, "reward.files") == (tmp_path / "tests",)
    with pytest.raises(RewardError, match=r"reward\.files lists 'test'") as caught:
        parse_files(["test"], tmp_path, "reward.files")
    assert "tests" in caught.value.fix
