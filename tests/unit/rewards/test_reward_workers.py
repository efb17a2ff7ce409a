"""RewardWorkers: columns in, scores out in order; unusable files; children that restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import START_LIMIT_S, Child
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]

LENGTHS = "def reward(completions): return [float(len(completion)) for completion in completions]"


def values(scores: list[Score]) -> list[float | None]:
    return [score.value for score in scores]


@pytest.mark.parametrize("workers", [1, 3])
def test_order_is_kept_for_any_number_of_rows(write: Write, workers: int) -> None:
    with RewardWorkers(write(LENGTHS), RewardConfig(sandbox=False, workers=workers)) as rewards:

        @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(completions=st.lists(st.text(max_size=20), max_size=12))
        def check(completions: list[str]) -> None:
            scores = rewards.score(["p"] * len(completions), completions, {})
            assert values(scores) == [float(len(completion)) for completion in completions]

        check()


def test_one_worker_sees_the_whole_batch_and_more_share_it(write: Write) -> None:
    function = write("def reward(completions): return [len(completions)] * len(completions)")
    with RewardWorkers(function, RewardConfig(sandbox=False, workers=1)) as rewards:
        assert values(rewards.score(["p"] * 5, ["c"] * 5, {})) == [5.0] * 5
    with RewardWorkers(function, RewardConfig(sandbox=False, workers=2)) as rewards:
        assert values(rewards.score(["p"] * 5, ["c"] * 5, {})) == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_two_workers_score_side_by_side(write: Write) -> None:
    """Each call ends only after the other one has begun, so sequential calls would never end."""
    function = write(
        """
        import time
        from pathlib import Path
        def reward(completions):
            here = Path(__file__).parent
            (here / completions[0]).touch()
            while len(list(here.glob("call-*"))) < 2:
                time.sleep(0.01)
            return [1.0]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, workers=2, timeout_s=60)) as rewards:
        assert values(rewards.score(["p"] * 2, ["call-1", "call-2"], {})) == [1.0, 1.0]


def test_many_rows_of_a_failed_call_have_time_enough_each(write: Write) -> None:
    """A 120th of twice the timeout would be 13 ms; each row gets at least 50, and a good row takes 10."""
    function = write(
        """
        import time
        def reward(completions):
            time.sleep(0.01)
            return [float(completion) for completion in completions]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, timeout_s=0.8)) as rewards:
        scores = rewards.score(["p"] * 120, ["1"] * 119 + ["x"], {})
    assert scores[-1].outcome is Outcome.ERROR
    assert sum(score.outcome is Outcome.SCORE for score in scores) > 60  # all of them, on an idle machine


@pytest.mark.parametrize(
    ("signature", "seen"),
    [
        ("prompts, completions, **columns", "answer level"),
        ("completions, level=0, **others", "answer"),
        ("prompts, completions, *, answer", ""),
        ("*places, completions, level=None, absent=7", ""),
    ],
)
def test_the_function_gets_the_columns_it_takes(write: Write, signature: str, seen: str) -> None:
    function = write(
        f"""
        def reward({signature}):
            given = dict(locals())
            extra = given.get("columns", given.get("others", {{}}))
            named = {{name: value for name, value in given.items() if name not in ("columns", "others")}}
            print(" ".join(sorted(extra)), "|", named)
            1 / 0
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        (score,) = rewards.score(["p"], ["c"], {"answer": [42], "level": [None]})
    assert f"output: {seen}" in score.message or not seen
    assert "'completions': ['c']" in score.message
    assert ("'answer': [42]" in score.message) == ("*, answer" in signature)
    assert ("'level': [None]" in score.message) == ("level" in signature)


def test_chat_rows_arrive_as_messages(write: Write) -> None:
    function = write(
        "def reward(prompts, completions):\n"
        "    return [float(c[0]['content'] == p[-1]['content'] and c[0]['role'] == 'assistant')\n"
        "            for p, c in zip(prompts, completions)]"
    )
    prompt = [{"role": "system", "content": "echo"}, {"role": "user", "content": "ü\ud800\n"}]
    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        completion = [{"role": "assistant", "content": "ü\ud800\n"}]
        assert values(rewards.score([prompt], [completion], {})) == [1.0]


def test_rows_larger_than_a_pipe_arrive_whole(write: Write) -> None:
    with RewardWorkers(write(LENGTHS), RewardConfig(sandbox=False)) as rewards:
        assert values(rewards.score(["p"] * 3, ["x" * 10_000_000, "", "x"], {})) == [1e7, 0.0, 1.0]


def test_more_scores_than_a_pipe_holds_arrive_whole(write: Write) -> None:
    with RewardWorkers(
        write("def reward(completions): return ['bad'] * len(completions)"), RewardConfig(sandbox=False)
    ) as rewards:
        scores = rewards.score(["p"] * 5000, ["c"] * 5000, {})
    assert [score.outcome for score in scores] == [Outcome.ERROR] * 5000


def test_a_function_that_changes_its_input_changes_only_its_copy(write: Write) -> None:
    function = write(
        """
        def reward(prompts, completions, answer):
            value = float(answer[0]["list"].pop())
            prompts.clear(); answer.clear()
            completions[0] = "changed"
            return [value] * len(completions)
        """
    )
    prompts, completions, columns = ["p"], ["c"], {"answer": [{"list": [3]}]}
    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        assert values(rewards.score(prompts, completions, columns)) == [3.0]
        assert values(rewards.score(prompts, completions, columns)) == [3.0]
    assert (prompts, completions, columns) == (["p"], ["c"], {"answer": [{"list": [3]}]})


def test_a_coroutine_function_is_awaited(write: Write) -> None:
    function = write(
        "import asyncio\n"
        "async def one(c):\n    await asyncio.sleep(0.01)\n    return float(c)\n"
        "async def reward(completions):\n    return await asyncio.gather(*map(one, completions))"
    )
    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        assert values(rewards.score(["p"] * 2, ["1", "2"], {})) == [1.0, 2.0]


def test_a_functions_state_lives_on_from_call_to_call(write: Write) -> None:
    function = write("calls = []\ndef reward(completions):\n    calls.append(1)\n    return [len(calls)]")
    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        assert [values(rewards.score(["p"], ["c"], {})) for _ in range(3)] == [[1.0], [2.0], [3.0]]


def test_no_rows_need_no_call(write: Write) -> None:
    with RewardWorkers(write("1 / 0\ndef reward(completions): ..."), RewardConfig(sandbox=False)) as rewards:
        assert rewards.score([], [], {"answer": []}) == []


def test_a_parameter_without_a_column_is_named_with_the_columns_there_are(write: Write) -> None:
    function = write("def reward(prompts, completions, answr): ...")
    with (
        RewardWorkers(function, RewardConfig(sandbox=False)) as rewards,
        pytest.raises(RewardError) as caught,
    ):
        rewards.score(["p"], ["c"], {"answer": [1], "level": [2]})
    assert caught.value.what == "rewards.py:reward needs a column 'answr'"
    assert caught.value.why == "the columns are answer, completions, level, prompts"
    assert "did you mean 'answer'?" in caught.value.fix


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import absent\nreward = None", "ModuleNotFoundError: No module named 'absent' (rewards.py, line 1"),
        ("def reward(completions): ...\n1 / 0", "ZeroDivisionError: division by zero (rewards.py, line 2"),
        ("import sys\nreward = 1\nsys.exit('stop')", "cannot be loaded: SystemExit: stop"),
        ("import os\nreward = 1\nos._exit(5)", "cannot be loaded: the process exited with status 5"),
        ("reward = print('last words')\nimport os\nos.abort()", "(SIGABRT); its last output: last words"),
        ("reward = bytearray(1 << 40)", "cannot be loaded: MemoryError"),
        ("reward = 3", "rewards.py:reward is 3 (int), which cannot be called"),
        ("def reward(): ...\ndel reward", "rewards.py:reward is None (NoneType), which cannot be called"),
        ("def reward(completions, /): ...", "takes 'completions' by position"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_an_error_at_once(write: Write, source: str, told: str) -> None:
    function = write(source)
    with (
        RewardWorkers(function, RewardConfig(sandbox=False)) as rewards,
        pytest.raises(RewardError) as caught,
    ):
        rewards.score(["p"], ["c"], {})
    assert told in caught.value.what
    assert str(function.file) in caught.value.why


def test_a_file_that_does_not_finish_loading_is_an_error(write: Write) -> None:
    function = write("def reward(completions): ...\nwhile True: pass")
    child = Child(function, memory_bytes=10**9, level=Level.NONE)
    assert 0 < child.deadline - time.monotonic() <= START_LIMIT_S
    with pytest.raises(RewardError, match="was not loaded within 60 s"):
        child.expire()


def test_a_child_that_dies_between_calls_costs_no_row(write: Write, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    function = write(
        "import os, threading, time\n"
        "def leave():\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "    os._exit(1)\n"
        "def reward(completions):\n"
        "    threading.Thread(target=leave).start()\n"
        "    return [1.0] * len(completions)"
    )
    before = set(psutil.Process().children())
    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        for _ in range(3):
            assert rewards.score(["p"] * 2, ["c"] * 2, {}) == [Score(outcome=Outcome.SCORE, value=1.0)] * 2
            (supervisor,) = set(psutil.Process().children()) - before
            gate.touch()
            until = time.monotonic() + 60
            while supervisor.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
                time.sleep(0.01)
            gate.unlink()


def test_an_interrupted_score_leaves_no_old_answer_behind(write: Write) -> None:
    function = write(
        "import time\n"
        "def reward(completions):\n"
        "    time.sleep(float(completions[0]))\n"
        "    return [float(completions[0])]"
    )

    class Stop(Exception):
        pass

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    with RewardWorkers(function, RewardConfig(sandbox=False)) as rewards:
        rewards.score(["p"], ["0"], {})
        before = signal.signal(signal.SIGALRM, stop)
        try:
            with pytest.raises(Stop):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                rewards.score(["p"], ["1000"], {})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert values(rewards.score(["p"], ["0.01"], {})) == [0.01], "nobody waits for the interrupted call"


def test_after_close_nothing_is_scored(write: Write) -> None:
    rewards = RewardWorkers(write(LENGTHS), RewardConfig(sandbox=False))
    rewards.close()
    rewards.close()
    with pytest.raises(RewardError, match="called after close"):
        rewards.score(["p"], ["c"], {})


def test_what_does_not_hold_is_said(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    with RewardWorkers(write(LENGTHS), RewardConfig(sandbox=False), level=Level.NO_NAMESPACE) as rewards:
        rewards.score(["p"], ["c"], {})
        assert "no pid namespace" in rewards.shortcomings
    assert rewards.shortcomings in caplog.text


def test_the_package_needs_no_torch() -> None:
    code = "import sys, rillflow.rewards.workers; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, timeout=60).returncode == 0
