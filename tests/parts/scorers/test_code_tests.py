"""The reward code-tests: programs of completions, run in the sandbox against asserts and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rillflow.isolation.sandbox import Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers
from rillflow_parts.scorers.code_tests import code_tests, num_exposed, program_of
from rillflow_parts.scorers.plugin import CODE_TESTS

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]


def scored(completions: Sequence[Any], **columns: list[Any]) -> list[Score]:
    """Score completions in the child process of a run."""
    with RewardWorkers(CODE_TESTS, RewardConfig(timeout_s=120)) as workers:
        scores = workers.score([""] * len(completions), completions, columns)
        assert workers.level is not Level.NONE
    return scores


def test_the_last_python_block_is_the_program_else_the_whole_text() -> None:
    text = "First:\n```python\nx = 1\n```\nBetter:\n```py\nx = 2\n```\nDone."
    assert program_of(text) == "x = 2\n"
    assert program_of("x = 3") == "x = 3"
    assert program_of("```\nx = 4\n") == "x = 4\n"
    assert program_of([{"role": "assistant", "content": text}], "y = 0\n") == "y = 0\nx = 2\n"


def test_asserts_score_by_the_share_that_holds() -> None:
    completions = [
        f"```python\n{ADD}```",
        "```python\ndef add(a, b):\n    return 3\n```",
        "I do not know.",
        f"{ADD}import sys\nsys.exit(0)",
        "class Equal:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Equal()",
    ]
    scores = scored(completions, tests=[ASSERTS] * 5)
    assert [score.value for score in scores] == pytest.approx([1.0, 1 / 3, 0.0, 0.0, 0.0])


def test_a_text_of_asserts_a_check_function_and_setup_are_run() -> None:
    check = "def check(add):\n    assert add(1, 2) == 3\n    assert abs(add(0.1, 0.2) - 0.3) < 1e-9"
    completions = [
        "    return a + b\n",
        "    return a - b\n",
        "    return a + b\n",
        "    import os; os._exit(0)\n",
    ]
    scores = scored(
        completions,
        prefix=["def add(a, b):\n"] * 4,
        tests=[check, check, "assert isclose(add(1, 2), 3)\nassert add(1, 1) == 3", check],
        setup=["", None, ["from math import isclose"], ""],
        entry_point=["add", "add", None, "add"],
    )
    assert [score.value for score in scores] == [1.0, 0.0, 0.5, 0.0]


def test_outputs_are_compared_word_by_word_and_an_endless_program_scores_0() -> None:
    double = "print(2 * int(input()))"
    completions = [double, "print(4)", "import time; time.sleep(1000)", double]
    inputs, outputs = ["2", "5"], ["4\n", " 10 "]
    scores = scored(completions, inputs=[inputs] * 3 + [[]], outputs=[outputs] * 3 + [[]])
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, None]
    assert scores[3].outcome is Outcome.ABSTAIN


def test_rows_without_a_column_of_tests_are_an_error_that_names_the_columns() -> None:
    with pytest.raises(ValueError, match="needs a column 'tests', or the columns 'inputs' and 'outputs'"):
        code_tests(["x"], inputs=[["1"]])


EVERYTHING = (
    "class All:\n    def __eq__(self, other): return True\n    def __lt__(self, other): return True\n"
)
EVERYTHING += "    def __sub__(self, other): return self\n    def __abs__(self): return self\n"
HUMAN_EVAL = """
METADATA = {"author": "x"}

def check(candidate):
    assert candidate([1, 2], 3) == 6, "sum"
    for n in (1, 2):
        assert abs(candidate([n], 0.5) - (n + 0.5)) < 1e-6
    assert True
"""


def test_a_check_function_cannot_be_cheated_by_an_object_that_equals_everything() -> None:
    completions = [
        "def total(values, more):\n    return sum(values) + more\n",
        f"{EVERYTHING}def total(values, more):\n    return All()\n",
        "def total(values, more):\n    return 6\n",
        "import sys\nprint(open(sys.argv[0]).read())\ndef total(values, more):\n    raise SystemExit\n",
        "def check(candidate): pass\ndef total(values, more): return 6\n",
    ]
    scores = scored(completions, tests=[HUMAN_EVAL] * 5, entry_point=["total"] * 5)
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_tests_that_run_beside_the_program_are_counted() -> None:
    assert num_exposed(HUMAN_EVAL, "total") == 0
    assert num_exposed(HUMAN_EVAL, None) == 1
    assert num_exposed(["assert f(1) == 2", "assert f(1) > 2"], None) == 1
    assert num_exposed("def check(f):\n    kept = f(1)\n    assert kept == 2", "f") == 1
    assert num_exposed(None, None) == 0


FORGE_BY_THE_GRANDPARENT = """0)
import json, os, re, struct
def parent(process):
    return int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
body = b'{"type":"scores","scores":[1.0]}'
for process in (os.getppid(), parent(os.getppid())):
    for name in range(300):
        try:
            os.write(os.open(f"/proc/{process}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK),
                     struct.pack(">I", len(body)) + body)
        except OSError:
            pass
for process in (parent(os.getppid()), os.getppid()):
    try:
        os.kill(process, 9)
    except OSError:
        pass
"""


def test_an_answer_that_forges_a_frame_gets_nothing_from_the_code_recipe() -> None:
    completions = ["a+b)", FORGE_BY_THE_GRANDPARENT, "a+b)", "a*b)"]
    columns = {
        "prefix": ["a, b = map(int, input().split())\nprint("] * 4,
        "inputs": [["2 3", "7 5"]] * 4,
        "outputs": [["5", "12"]] * 4,
    }
    with RewardWorkers(CODE_TESTS, RewardConfig(timeout_s=60)) as workers:
        scores = workers.score(["print a+b: print("] * 4, completions, columns)
        assert workers.level is not Level.NONE
    assert [score.outcome for score in scores] == [Outcome.SCORE] * 4, scores
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 0.0]
