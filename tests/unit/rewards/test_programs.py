"""run_python: results of programs, and the error if this machine cannot isolate them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome
from rillflow.rewards.programs import OUTPUT_BYTES, FinishedProgram, run_python
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]


def test_a_program_runs_outside_a_reward_too() -> None:
    finished = run_python("import sys\nprint(input()[::-1])\nsys.exit(3)", stdin="abc\n")
    assert finished == FinishedProgram(exit_code=3, stdout="cba\n", stderr="", timed_out=False)


ENDS = """
import json
from rillflow.rewards.programs import run_python

PROGRAMS = {
    "raises": "def f():\\n    return 1 / 0\\nf()",
    "syntax": "def",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "late": "while True: pass",
    "says": "raise SystemExit('no')",
    "main": "import sys, __main__\\nif __name__ == '__main__': print(sys.argv, __main__.__file__)",
    "thread": "import threading, time\\n"
              "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "memory": "x = bytearray(1 << 30)",
    "much": "print('x' * (3 << 20))",
    "child": "import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True).stdout)",
}

def reward(completions):
    out = run_python(PROGRAMS[completions[0]], timeout_s=1.0 if completions[0] == "late" else 20.0)
    told = [out.exit_code, out.stdout[-200:], len(out.stdout), out.stderr[-400:], out.timed_out]
    raise ValueError(json.dumps(told))
"""


def test_every_end_of_a_program_is_told(write: Write) -> None:
    function = write(ENDS)
    kinds = ["raises", "syntax", "killed", "late", "says", "main", "thread", "memory", "much", "child"]
    with RewardWorkers(function, RewardConfig(timeout_s=100)) as workers:
        told = dict(zip(kinds, workers.score(["p"] * len(kinds), kinds, {}), strict=True))
    messages = {kind: score.message for kind, score in told.items()}
    assert all(score.outcome is Outcome.ERROR for score in told.values())
    assert "[1, " in messages["raises"] and "ZeroDivisionError" in messages["raises"]
    assert "program.py" in messages["raises"] and "runner.py" not in messages["raises"]
    assert "[1, " in messages["syntax"] and "SyntaxError" in messages["syntax"]
    assert "[-9, " in messages["killed"]
    assert "[null, " in messages["late"] and "true]" in messages["late"]
    assert "[1, " in messages["says"] and '"no' in messages["says"]
    assert "/tmp/program.py" in messages["main"]
    assert "[0, " in messages["thread"] and "late" in messages["thread"]
    assert "MemoryError" in messages["memory"]
    assert f" {OUTPUT_BYTES}, " in messages["much"]
    assert "hi" in messages["child"]


def test_a_late_row_times_out_alone_and_its_neighbours_are_scored(write: Write) -> None:
    function = write(
        """
        import subprocess, sys, time
        def reward(completions):
            subprocess.run(["true"])
            while completions[0] == "hang": time.sleep(1)
            return [1.0]
        """
    )
    begun = time.monotonic()
    with RewardWorkers(function, RewardConfig(timeout_s=6.0)) as workers:
        scores = workers.score(["p"] * 4, ["a", "hang", "b", "c"], {})
    outcomes = [Outcome.SCORE, Outcome.TIMEOUT, Outcome.SCORE, Outcome.SCORE]
    assert [score.outcome for score in scores] == outcomes, scores
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import os; os._exit(0)", "exited with status 0"),
        ("import os, signal; signal.signal(15, 1); os._exit(7)", "exited with status 7"),
        ("raise KeyError('oh')", "KeyError: 'oh'"),
        ("return ['x']", "not a number"),
        ("return [1e300]", "outside the range of float32"),
    ],
)
def test_a_row_that_fails_in_its_cell_is_an_error_that_says_how(write: Write, body: str, told: str) -> None:
    function = write(f"def reward(completions):\n    {body}\n")
    with RewardWorkers(function, RewardConfig(sandbox=True)) as workers:
        (score,) = workers.score(["p"], ["c"], {})
    assert score.outcome is Outcome.ERROR and told in score.message


def test_state_does_not_pass_from_row_to_row_in_the_sandbox(write: Write) -> None:
    function = write("seen = []\ndef reward(completions):\n    seen.append(1)\n    return [len(seen)]\n")
    with RewardWorkers(function, RewardConfig(sandbox=True)) as workers:
        assert [score.value for score in workers.score(["p"] * 3, ["c"] * 3, {})] == [1.0, 1.0, 1.0]


def test_a_program_is_the_main_module_that_it_imports() -> None:
    finished = run_python("value = 41\nimport __main__\nprint(__main__.value + 1)")
    assert (finished.exit_code, finished.stdout) == (0, "42\n"), finished.stderr
