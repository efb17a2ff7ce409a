"""Detection of text execution in a function's source, and the choice of ``auto``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.function import FunctionPath, parse_files
from rillflow.rewards.harmless_source import doubts
from rillflow.rewards.text_execution import decide, is_shut_in, text_uses, visible_to

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "services"))
from attacks import TEXTS, unnoticed

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


KNOWN = {
    "text": """
        import re, json, math
        from collections import Counter
        PATTERN = re.compile("a")
        LINE = "{}: {}"
        def reward(completions, answer, input, **columns):
            found = [PATTERN.search(each) for each in completions]
            print(LINE.format(len(found), Counter(input)), f"{math.pi:.2f}", getattr(answer, "name", None))
            return [float(each is not None and each.group(0) == right) for each, right in zip(found, answer)]
        """,
    "an object": """
        from dataclasses import dataclass
        @dataclass
        class Near:
            width: float = 1.0
            def __call__(self, completions, **columns):
                self._calls = 1
                return [self._calls * self.width for _ in completions]
        reward = Near(2.0)
        """,
    "numpy and a file": """
        import numpy as np
        from pathlib import Path
        WORDS = set(Path(__file__).with_name("words.txt").read_text().split()) | set(open("more.txt", "r"))
        def reward(completions, **columns):
            return list(np.clip(np.array([len(WORDS & set(each.split())) for each in completions]), 0, 1))
        """,
    "what it does not reach": """
        import argparse, subprocess
        def agent(base_url):
            return subprocess
        def reward(completions):
            return [len(each.replace("a", "b")) / 9 for each in completions]
        """,
    "a coroutine": """
        import asyncio
        async def one(text):
            await asyncio.sleep(0)
            return 1.0
        async def reward(completions):
            return await asyncio.gather(*[one(each) for each in completions])
        """,
}


@pytest.mark.parametrize("kind", KNOWN)
def test_a_reward_that_is_known_to_be_harmless_needs_no_sandbox(write: Write, kind: str) -> None:
    assert [str(doubt) for doubt in doubts(write(KNOWN[kind]))] == []


def test_every_way_to_run_text_is_shut_in_or_refused(tmp_path: Path) -> None:
    assert unnoticed(tmp_path, TEXTS) == []


def test_an_agent_is_shut_in_only_if_it_is_recognised(write: Write) -> None:
    unknown = write(body("import sympy; sympy.sympify(completions[0])"))
    assert decide(unknown, "auto", unless_harmless=True).is_shut_in
    assert not decide(unknown, "auto", unless_harmless=False).is_shut_in
    assert [str(doubt) for doubt in decide(unknown, "auto", unless_harmless=True).doubts] == [
        "rewards.py:2 uses sympy.sympify"
    ]


def test_a_compiled_module_beside_the_function_is_a_doubt(write: Write, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def judge(text): return 1.0\n")
    function = write(
        "import helper\ndef reward(completions): return [helper.judge(each) for each in completions]\n"
    )
    assert doubts(function) == []
    (tmp_path / "helper.so").write_bytes(b"")
    assert [doubt.what for doubt in doubts(function)] == ["imports helper, of which there is a compiled file"]
