"""Return values and failures of reward functions, and the outcome of each row."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.scheduler import RETRIES
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]

TIMEOUT_S = 3.0

ACTS = """
import decimal, os, signal, sys, time

class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __float__ = __str__

class Stubborn(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def fail():
    raise ValueError("unhappy")

VALUES = {
    "good": lambda: 1.0, "none": lambda: None, "true": lambda: True, "three": lambda: 3,
    "decimal": lambda: decimal.Decimal("0.25"), "nan": lambda: float("nan"), "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"), "large": lambda: 1e300, "huge int": lambda: 10**400,
    "text": lambda: "high", "digits": lambda: "1.0", "bytes": lambda: b"1", "list": lambda: [1.0],
    "complex": lambda: 1j, "unprintable": Unprintable, "long text": lambda: "x" * 10_000_000,
    "raises": fail, "stubborn": lambda: (_ for _ in ()).throw(Stubborn()),
    "long message": lambda: int("x" * 10_000_000), "sys.exit": lambda: sys.exit(3),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "recursion": lambda: recurse(), "memory": lambda: bytearray(1 << 40),
    "slow memory": lambda: list(range(1 << 40)),
    "stdin": lambda: float(len(sys.stdin.read())), "input": lambda: input(),
    "os._exit": lambda: os._exit(0), "os._exit 7": lambda: os._exit(7),
    "segfault": lambda: __import__("ctypes").string_at(0), "abort": lambda: os.abort(),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "loop": lambda: forever(),
    "nap": lambda: time.sleep(0.25) or 2.0, "sleep": lambda: time.sleep(1000),
    "deaf": lambda: (ignore_all(), forever()),
    "garbage": lambda: [os.write(fd, b"\\xff" * 100) for fd in descriptors()],
    "closes": lambda: os.closerange(3, 1000),
}

def ignore_all():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

def recurse():
    return recurse()

def forever():
    while True:
        pass

def descriptors():
    for fd in range(3, 1000):
        try:
            os.set_blocking(fd, True)
            os.write(fd, b"")
            yield fd
        except OSError:
            pass

def reward(prompts, completions):
    return [VALUES[completion]() for completion in completions]
"""


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorkers]:
    folder = tmp_path_factory.mktemp("acts")
    (folder / "acts.py").write_text(ACTS)
    config = RewardConfig(sandbox=False, timeout_s=TIMEOUT_S, memory_bytes=512 * 1024**2)
    with RewardWorkers(parse_function("acts.py:reward", folder), config) as workers:
        yield workers


def act(workers: RewardWorkers, *kinds: str) -> list[Score]:
    return workers.score(["p"] * len(kinds), list(kinds), {})


@pytest.mark.parametrize(("kind", "value"), [("good", 1.0), ("true", 1.0), ("three", 3.0), ("decimal", 0.25)])
def test_numbers_are_scores(actor: RewardWorkers, kind: str, value: float) -> None:
    assert act(actor, kind) == [Score(outcome=Outcome.SCORE, value=value)]


def test_none_for_all_abstains_for_all(actor: RewardWorkers) -> None:
    assert act(actor, "none", "none") == [Score(outcome=Outcome.ABSTAIN)] * 2


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("nan", "the score is nan, not a finite number"),
        ("inf", "the score is inf, not a finite number"),
        ("-inf", "the score is -inf, not a finite number"),
        ("large", "the score is 1e+300, outside the range of float32"),
        ("huge int", "not a number: int too large"),
        ("text", "the score is 'high' (str), not a number"),
        ("digits", "the score is '1.0' (str), not a number"),
        ("bytes", "the score is b'1' (bytes), not a number"),
        ("list", "the score is [1.0] (list), not a number"),
        ("complex", "the score is 1j (complex), not a number"),
        ("unprintable", "(Unprintable), not a number: no text"),
        ("long text", "the score is 'xxx"),
    ],
)
def test_what_is_no_number_is_an_error_of_its_row_alone(actor: RewardWorkers, kind: str, told: str) -> None:
    before, row, after = act(actor, "good", kind, "good")
    assert before == after == Score(outcome=Outcome.SCORE, value=1.0), "the call as a whole went well"
    assert (row.outcome, row.value) == (Outcome.ERROR, None)
    assert told in row.message
    assert len(row.message) < 1000


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("raises", 'raised ValueError: unhappy (acts.py, line 14, in fail: raise ValueError("unhappy"))'),
        ("stubborn", "raised acts.Stubborn: <exception str() failed>"),
        ("long message", "raised ValueError"),
        ("sys.exit", "raised SystemExit: 3"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("recursion", "raised RecursionError: maximum recursion depth exceeded"),
        ("memory", "raised MemoryError"),
        ("slow memory", "raised MemoryError"),
        ("input", "raised EOFError"),
        ("os._exit", "exited with status 0"),
        ("os._exit 7", "exited with status 7"),
        ("segfault", "was killed by signal 11 (SIGSEGV); its last output: Fatal Python error"),
        ("abort", "was killed by signal 6 (SIGABRT)"),
        ("killed", "was killed by signal 9 (SIGKILL), possibly because the machine ran out of memory"),
        ("garbage", "wrote to the file descriptor of its results"),
        ("closes", "exited with status 1; its last output: "),
    ],
)
def test_a_row_that_breaks_the_call_is_an_error_and_its_neighbours_are_scored(
    actor: RewardWorkers, kind: str, told: str
) -> None:
    before, row, after = act(actor, "good", kind, "three")
    assert (before.value, after.value) == (1.0, 3.0)
    assert "scored alone: the call of 3 rows " in before.message
    assert (row.outcome, row.value) == (Outcome.ERROR, None)
    assert told in row.message
    assert len(row.message) < 4000


@pytest.mark.parametrize("kind", ["loop", "sleep", "deaf"])
def test_a_row_that_never_ends_times_out(actor: RewardWorkers, kind: str) -> None:
    act(actor, "good")
    (row,) = act(actor, kind)
    assert row.outcome is Outcome.TIMEOUT
    assert row.message.startswith(f"gave no answer within {TIMEOUT_S:g} s")


def test_a_row_that_never_ends_leaves_its_neighbours_their_scores(actor: RewardWorkers) -> None:
    rows = act(actor, "good", "sleep", "none", "nap", "text", "three")
    assert [row.outcome for row in rows] == ["score", "timeout", "abstain", "score", "error", "score"]
    assert [row.value for row in rows] == [1.0, None, None, 2.0, None, 3.0]
    assert f"within {TIMEOUT_S:g} s" in rows[1].message, "alone, a row has the whole limit in the end"


def test_more_silent_rows_than_time_outs_are_kept_cost_no_neighbour_its_score(actor: RewardWorkers) -> None:
    rows = act(actor, *["sleep"] * (RETRIES + 1), *["good"] * 7)
    assert [row.outcome for row in rows] == [Outcome.TIMEOUT] * (RETRIES + 1) + [Outcome.SCORE] * 7


def test_standard_input_is_at_its_end(actor: RewardWorkers) -> None:
    assert act(actor, "stdin") == [Score(outcome=Outcome.SCORE, value=0.0)]


def test_a_fork_that_comes_back_does_not_answer_twice(write: Write) -> None:
    function = write(
        """
        import os
        calls = []
        def reward(completions):
            calls.append(os.fork())
            return [len(calls)]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False)) as workers:
        for call in (1.0, 2.0, 3.0):  # a second answer would be invalid and restart the child
            assert workers.score(["p"], ["c"], {}) == [Score(outcome=Outcome.SCORE, value=call)]
            time.sleep(0.05)


def test_many_silent_rows_are_bounded_in_time(write: Write) -> None:
    function = write("def reward(completions):\n    while completions != ['fine']: pass\n    return [1.0]")
    timeout_s = 0.2
    with RewardWorkers(function, RewardConfig(sandbox=False, timeout_s=timeout_s)) as workers:
        workers.score(["p"], ["fine"], {})
        begun = time.monotonic()
        scores = workers.score(["p"] * 401, ["hang"] * 200 + ["fine"] + ["hang"] * 200, {})
        spent = time.monotonic() - begun
    assert all(score.outcome is Outcome.TIMEOUT for row, score in enumerate(scores) if row != 200)
    assert scores[200].outcome is Outcome.SCORE or "no time was left" in scores[200].message
    # About 3 s on an idle machine; 400 rows of 0.2 s in sequence would take 80.
    assert spent < 40
    assert any("no time was left" in score.message for score in scores)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[1.0] * 3", "returned 3 scores for 4 rows"),
        ("[1.0]", "returned 1 scores for 4 rows"),
        ("[]", "returned 0 scores for 4 rows"),
        ("1.0", "returned 1.0 (float)"),
        ("None", "returned None (NoneType)"),
        ("{'score': [1.0] * 4}", "returned {'score': [1.0, 1.0, 1.0, 1.0]} (dict)"),
        ("'good'", "returned 'good' (str)"),
        ("{1.0, 2.0, 3.0, 4.0}", "(set)"),
    ],
)
def test_what_is_not_one_entry_a_row_stops_the_run(write: Write, body: str, told: str) -> None:
    function = write(f"def reward(completions): return {body}")
    with (
        RewardWorkers(function, RewardConfig(sandbox=False)) as workers,
        pytest.raises(RewardError) as caught,
    ):
        workers.score(["p"] * 4, ["c"] * 4, {})
    assert caught.value.what.startswith("rewards.py:reward returned")
    assert told in caught.value.what
    assert "len(completions)" in caught.value.fix


def test_arrays_tensors_and_generators_are_lists_of_scores(write: Write) -> None:
    function = write(
        """
        def reward(completions, kind):
            import numpy, torch
            values = [0.5, -1.0, 2.0]
            tensor = torch.tensor(values)
            return {"numpy": numpy.array(values), "scalars": list(numpy.float32(values)),
                    "torch": tensor, "graph": tensor.requires_grad_(kind[0] == "graph") * 1,
                    "items": [torch.tensor(value) for value in values], "column": tensor[:, None],
                    "integers": (tensor * 2).long() / 2, "generator": (value for value in values),
                    "tuple": tuple(values), "scalar": torch.tensor(1.0), "matrix": torch.ones(3, 2)}[kind[0]]
        """
    )
    kinds = ["numpy", "scalars", "torch", "graph", "items", "column", "integers", "generator", "tuple"]
    with RewardWorkers(
        function, RewardConfig(sandbox=False, timeout_s=60, memory_bytes=16 * 1024**3)
    ) as workers:
        for kind in kinds:
            scores = workers.score(["p"] * 3, ["c"] * 3, {"kind": [kind] * 3})
            assert [score.value for score in scores] == [0.5, -1.0, 2.0], kind
        matrix = workers.score(["p"] * 3, ["c"] * 3, {"kind": ["matrix"] * 3})
        assert [score.outcome for score in matrix] == [Outcome.ERROR] * 3
        with pytest.raises(RewardError, match=r"returned tensor\(1\.\) \(Tensor\)"):
            workers.score(["p"] * 3, ["c"] * 3, {"kind": ["scalar"] * 3})


def test_prints_are_allowed_and_shown_where_a_row_fails(write: Write) -> None:
    function = write(
        """
        import sys
        def reward(completions):
            print("seen", completions[-1])
            print("and to stderr", file=sys.stderr)
            return [1 / int(completion) for completion in completions]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False)) as workers:
        assert [score.value for score in workers.score(["p"] * 2, ["1", "2"], {})] == [1.0, 0.5]
        (row,) = workers.score(["p"], ["0"], {})
    assert "ZeroDivisionError" in row.message
    assert row.message.endswith("; its last output: seen 0\nand to stderr")


def test_the_message_names_the_line_of_the_users_file_below_library_frames(write: Write) -> None:
    function = write("import json\n\ndef reward(completions):\n    return [json.loads(completions[0])]\n")
    with RewardWorkers(function, RewardConfig(sandbox=False)) as workers:
        (row,) = workers.score(["p"], ["{"], {})
    assert "JSONDecodeError" in row.message
    assert "(rewards.py, line 4, in reward: return [json.loads(completions[0])])" in row.message


def test_the_child_is_small_and_limited(write: Write) -> None:
    function = write(
        """
        import os, resource, sys
        def reward(completions):
            heavy = {"torch", "numpy", "pydantic"} & set(sys.modules)
            core, memory = resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_AS)
            return [float(len(heavy)), core[0], memory[0], float(os.path.samefile(sys.argv[0], __file__))]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, memory_bytes=10**9)) as workers:
        assert [score.value for score in workers.score(["p"] * 4, ["c"] * 4, {})] == [0.0, 0.0, 1e9, 1.0]


def test_a_file_beside_the_function_and_the_drivers_packages_can_be_imported(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 2.0")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "package_of_the_driver.py").write_text("VALUE = 3.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "elsewhere")])
    function = write(
        """
        from dataclasses import dataclass
        from beside import VALUE
        import package_of_the_driver
        @dataclass
        class Uses:
            module: str = __name__
        def reward(completions): return [VALUE, package_of_the_driver.VALUE]
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False)) as workers:
        assert [score.value for score in workers.score(["p"] * 2, ["c"] * 2, {})] == [2.0, 3.0]
