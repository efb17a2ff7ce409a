"""The driver, and the process that starts cells, refuse frames that the open call does not expect."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator

import pytest

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import CALL_BYTES, ROW_BYTES, Answer, Child, State
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rewards.isolated_process import RESULT_BYTES
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]

FORGER = """
import os, struct, sys, time

def known(name):
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]

def forge(completions):
    number = known("request")["number"]
    written = b""
    for body in completions[0].split("|"):
        body = body.replace("NUMBER", f'"number": "{number}"').encode()
        written += struct.pack(">I", int(body)) if body.isdigit() else struct.pack(">I", len(body)) + body
    os.write(known("answers"), written)
    time.sleep(60)
"""
"""Replaces the answers of its process by given frames; a number gives only the length."""

SCORES = {
    "returned": (
        '{"type": "returned", "what": "1", NUMBER}',
        "an answer of type 'returned' to a call",
    ),
    "unknown": ('{"type": "paid", NUMBER}', "an answer of type 'paid' to a call"),
    "no list": (
        '{"type": "scores", "scores": 1.0, NUMBER}',
        "an answer of type 'scores' to a call",
    ),
    "no text": ('{"type": "raised", "what": 7, NUMBER}', "an answer of type 'raised' to a call"),
    "more": ('{"type": "scores", "scores": [1.0, 1.0], NUMBER}', "2 scores for 1 rows"),
    "fewer": ('{"type": "scores", "scores": [], NUMBER}', "0 scores for 1 rows"),
    "integer": ('{"type": "scores", "scores": [1], NUMBER}', "a verdict 1"),
    "truth": ('{"type": "scores", "scores": [true], NUMBER}', "a verdict True"),
    "list": ('{"type": "scores", "scores": [[1.0]], NUMBER}', "a verdict [1.0]"),
    "object": ('{"type": "scores", "scores": [{"late": 1}], NUMBER}', "a verdict {'late': 1}"),
    "beyond": ('{"type": "scores", "scores": [1e300], NUMBER}', "a verdict 1e+300"),
    "infinite": ('{"type": "scores", "scores": [-Infinity], NUMBER}', "a verdict -inf"),
    "nan": ('{"type": "scores", "scores": [NaN], NUMBER}', "a verdict nan"),
    "guess": (
        '{"type": "scores", "scores": [1.0], "number": "beef"}',
        "an answer to call 'beef', which",
    ),
    "none": ('{"type": "scores", "scores": [1.0]}', "an answer to call None, which is not the open one"),
    "twice": ('{"type": "x", NUMBER}|{"type": "y"}', "expected 1 frames, got 2"),
    "tail": ('{"type": "scores", "scores": [1.0], NUMBER}|9', "expected 1 frames, got 1 and 4 bytes"),
    "array": ("[1.0]", "a frame is not an object with a type"),
    "text": ("1.0 please", "a frame is not JSON"),
    "long": (str(CALL_BYTES + ROW_BYTES + 1), f"a frame announces {CALL_BYTES + ROW_BYTES + 1} bytes"),
    "gigabytes": ("4294967295", "a frame announces 4294967295 bytes"),
}
"""The frame for one row, and words of its error."""


@pytest.fixture(scope="module")
def forger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorkers]:
    folder = tmp_path_factory.mktemp("forger")
    (folder / "rewards.py").write_text(FORGER)
    with RewardWorkers(
        parse_function("rewards.py:forge", folder), RewardConfig(timeout_s=20, sandbox=False)
    ) as workers:
        yield workers


@pytest.mark.parametrize("kind", SCORES)
def test_a_forged_frame_is_an_error_that_names_the_value(forger: RewardWorkers, kind: str) -> None:
    written, told = SCORES[kind]
    (score,) = forger.score(["p"], [written], {})
    assert (score.outcome, score.value) == (Outcome.ERROR, None)
    assert f"wrote to the file descriptor of its results: {told}" in score.message


def answered(child: Child, until: Callable[[], bool]) -> Answer | None:
    """Transfer a child's bytes until a condition holds or it answers."""
    end = time.monotonic() + 60
    while not until() and time.monotonic() < end:
        poller = select.poll()
        for descriptor, mask in child.events().items():
            poller.register(descriptor, mask)
        poller.poll(1000)
        if (answer := child.advance()) is not None:
            return answer
    return None


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"type": "scores", "scores": [1.0], NUMBER}', "an answer of type 'scores' to a run"),
        ('{"type": "malformed", "what": "x", NUMBER}', "an answer of type 'malformed' to a run"),
        ('{"type": "returned", "what": 1, NUMBER}', "an answer of type 'returned' to a run"),
        ('{"type": "returned", "what": "{", NUMBER}', "the returned value is not JSON"),
    ],
)
def test_an_agents_forged_frame_is_an_error_that_names_the_value(
    write: Write, written: str, told: str
) -> None:
    child = Child(write(FORGER, "forge"), memory_bytes=10**9, level=Level.NONE)
    try:
        answered(child, lambda: child.state is State.IDLE)
        child.send({"type": "run", "rows": 1, "columns": {"completions": [written]}}, limit_s=20)
        answer = answered(child, lambda: False)
    finally:
        child.stop()
    assert isinstance(answer, Score) and answer.outcome is Outcome.ERROR
    assert told in answer.message


READY = (
    '{"type": "ready", "at_s": AT, "shortcomings": "", "level": "none", "accepted": ["completions"], '
    '"required": [], "takes_any": false}'
)


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ('"none"', '"best"', "an unknown level 'best'"),
        ("AT", "1e300", "loading ended at 1e\\+300 s, before it began or in the future"),
        ("AT", "-1.0", "loading ended at -1 s, before"),
        ('["completions"]', "[[1]]", "a parameter \\[1\\]"),
        ('"ready"', '"scores"', "an answer of type 'scores' to loading"),
        ('"takes_any": false', '"takes_any": 1', "an answer of type 'ready' to loading"),
    ],
)
def test_a_forged_start_is_refused_by_its_value(write: Write, was: str, now: str, told: str) -> None:
    body = READY.replace(was, now, 1)
    source = (
        FORGER
        + f"""
body = {body!r}.replace("AT", str(time.monotonic())).encode()
os.write(known("answers"), struct.pack(">I", len(body)) + body)
time.sleep(60)
"""
    )
    with (
        RewardWorkers(write(source, "forge"), RewardConfig()) as workers,
        pytest.raises(RewardError, match=told),
    ):
        workers.score(["p"], ["c"], {})


def test_an_answer_between_two_calls_is_an_error_of_the_next(write: Write) -> None:
    function = write(
        FORGER
        + """
import threading
def reward(completions):
    answers = known("answers")
    body = b'{"type": "scores", "scores": [1.0], "number": "x"}'
    late = lambda: os.write(answers, struct.pack(">I", len(body)) + body)
    threading.Timer(0.3, late).start()
    return [0.0] * len(completions)
"""
    )
    with RewardWorkers(function, RewardConfig()) as workers:
        assert [score.value for score in workers.score(["p"], ["c"], {})] == [0.0]
        time.sleep(1.0)
        assert [score.value for score in workers.score(["p"], ["c"], {})] == [0.0]


CELLS = """
import os, struct, sys

def reward(completions):
    answers = [each for each in map(int, os.listdir("/proc/self/fd")) if each >= 200]
    body = completions[0].encode()
    if body != b"honest":
        os.write(answers[0], struct.pack(">I", int(body) if body.isdigit() else len(body)) + body)
    return [1.0]
"""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"type": "scores", "scores": [2.0]}', "exited with status 0"),
        ("[1.0]", "a frame is not an object with a type"),
        (str(RESULT_BYTES + 1), f"a frame announces {RESULT_BYTES + 1} bytes"),
    ],
)
def test_a_cell_that_writes_more_than_one_frame_has_an_error_alone(
    write: Write, written: str, told: str
) -> None:
    with RewardWorkers(write(CELLS), RewardConfig(sandbox=True)) as workers:
        before, row, after = workers.score(["p"] * 3, ["honest", written, "honest"], {})
    assert (before.value, after.value) == (1.0, 1.0)
    assert (row.outcome, row.value) == (Outcome.ERROR, None)
    assert told in row.message
