"""Keys that are scored concurrently: begin, turn, cancel; late keys get more children; nothing is left."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rillflow.errors import RewardError
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.scheduler import MORE_CHILDREN, Key
from rillflow.rewards.workers import RewardWorkers, WeightedWorkers

Write = Callable[..., FunctionPath]
Mine = Callable[[], set[psutil.Process]]

ACTS = """
import os, time
from pathlib import Path
def reward(completions):
    scores = []
    for text in completions:
        if text == "hang": time.sleep(3600)
        if text == "crash": os._exit(7)
        if text == "bare": return 1.0
        while text.startswith("wait ") and not Path(text[5:]).exists(): time.sleep(0.01)
        scores.append(float(len(completions)))
    return scores
"""
"""A row's score is the number of rows in its call."""
PLENTY_S = 120.0
"""Longest wait of a test, in seconds; a quiet machine needs a hundredth."""


@pytest.fixture
def mine() -> Iterator[Mine]:
    """Yield a function for the processes below this one that started after the test."""
    before = set(psutil.Process().children(recursive=True))
    yield lambda: set(psutil.Process().children(recursive=True)) - before


def begin(workers: WeightedWorkers, key: Key, rows: Sequence[str]) -> None:
    workers.begin(key, ["p"] * len(rows), rows, {})


def finished(workers: WeightedWorkers, count: int) -> dict[Key, list[Score]]:
    """Take turns until ``count`` keys are finished; return them in this order."""
    found: dict[Key, list[Score]] = {}
    until = time.monotonic() + PLENTY_S
    while len(found) < count:
        assert time.monotonic() < until, f"only {[*found]} are finished"
        found.update(workers.turn(1.0))
    return found


def supervisors(processes: set[psutil.Process]) -> int:
    """Return the number of children: each has one supervisor, a child of this process."""
    found = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            found += process.ppid() == os.getpid()
    return found


def scores(rows: int) -> list[Score]:
    return [Score(outcome=Outcome.SCORE, value=float(rows))] * rows


def test_each_key_is_one_call_and_keys_finish_out_of_order(write: Write, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, workers=2, timeout_s=PLENTY_S)) as workers:
        begin(workers, "slow", [f"wait {gate}", "c"])
        begin(workers, "quick", ["c"] * 3)
        assert finished(workers, 1) == {"quick": scores(3)}
        assert workers.turn(0) == []
        gate.touch()
        assert finished(workers, 1) == {"slow": scores(2)}
        assert workers.turn(math.inf) == [], "nothing is waited for"


@pytest.mark.parametrize(("count", "hanging"), [(1, 1), (1, MORE_CHILDREN), (2, 2)])
def test_keys_that_hang_hold_up_no_other(write: Write, mine: Mine, count: int, hanging: int) -> None:
    with RewardWorkers(
        write(ACTS), RewardConfig(sandbox=False, workers=count, timeout_s=PLENTY_S)
    ) as workers:
        for key in range(hanging):
            begin(workers, ("hung", key), ["c", "hang"])
        for key in range(6):
            begin(workers, key, ["c"] * 2)
        found = finished(workers, 6)
        assert found == dict.fromkeys(range(6), scores(2))
        assert hanging < supervisors(mine()) <= count + hanging
        for key in range(hanging):
            workers.cancel(("hung", key))
        begin(workers, "last", ["c"])
        assert finished(workers, 1) == {"last": scores(1)}
        assert supervisors(mine()) == count, "further children end when no key is late"


@pytest.mark.slow
def test_children_are_bounded(write: Write, mine: Mine) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, timeout_s=PLENTY_S)) as workers:
        for key in range(MORE_CHILDREN + 1):
            begin(workers, key, ["hang"])
        begin(workers, "waiting", ["c"])
        until = time.monotonic() + PLENTY_S
        while supervisors(mine()) < 1 + MORE_CHILDREN and time.monotonic() < until:
            assert workers.turn(0.1) == []
        assert workers.turn(1.5) == []
        assert supervisors(mine()) == 1 + MORE_CHILDREN
        workers.cancel(1)
        assert finished(workers, 1) == {"waiting": scores(1)}


def test_a_key_that_hangs_alone_needs_no_further_child(write: Write, mine: Mine) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, timeout_s=2.5)) as workers:
        begin(workers, "hung", ["hang"])
        found: list[tuple[Key, list[Score]]] = []
        until = time.monotonic() + PLENTY_S
        while not found and time.monotonic() < until:
            found = workers.turn(0.05)
            assert supervisors(mine()) == 1
    assert [score.outcome for _, each in found for score in each] == [Outcome.TIMEOUT]


@pytest.mark.slow
def test_a_key_has_the_scores_of_a_batch_of_its_rows(write: Write) -> None:
    """Includes retries: the hanging row times out twice, and its neighbours are scored separately."""
    rows = ["c", "hang", "c"]
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, timeout_s=2.0)) as workers:
        batch = workers.score(["p"] * 3, rows, {})
        begin(workers, "key", rows)
        begin(workers, "other", ["c"])
        found = finished(workers, 2)
    assert [score.outcome for score in batch] == [Outcome.SCORE, Outcome.TIMEOUT, Outcome.SCORE]
    assert found["key"] == batch
    assert [*found] == ["other", "key"], "the retries leave the other key a child"


def test_a_crash_is_its_keys_alone(write: Write) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, timeout_s=PLENTY_S)) as workers:
        for key, rows in (("before", ["c"]), ("crash", ["crash", "c"]), ("after", ["c"] * 2)):
            begin(workers, key, rows)
        found = finished(workers, 3)
    assert (found["before"], found["after"]) == (scores(1), scores(2))
    assert [score.outcome for score in found["crash"]] == [Outcome.ERROR, Outcome.SCORE]
    assert found["crash"][0].message.startswith("exited with status 7")


def test_a_cancelled_call_ends_at_once_and_leaves_no_process(write: Write, mine: Mine) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, timeout_s=PLENTY_S)) as workers:
        begin(workers, "hung", ["hang"])
        assert workers.turn(0.5) == []
        held = mine()
        assert held
        begin(workers, "queued", ["c"])
        workers.cancel("hung")
        assert not [process for process in held if process.is_running()]
        workers.cancel("queued")
        begin(workers, "hung", ["c"] * 2)
        assert finished(workers, 1) == {"hung": scores(2)}
        with pytest.raises(KeyError):
            workers.cancel("hung")
    assert not mine()


def test_a_finished_key_can_be_cancelled_before_it_is_returned(write: Write) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False)) as workers:
        begin(workers, "empty", [])
        workers.cancel("empty")
        begin(workers, "empty", [])
        assert workers.turn(0) == [("empty", [])]


def test_close_while_keys_run_leaves_no_process(write: Write, mine: Mine) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, workers=2, timeout_s=PLENTY_S)) as workers:
        for key in range(4):
            begin(workers, key, ["hang"])
        until = time.monotonic() + PLENTY_S
        while supervisors(mine()) < 3 and time.monotonic() < until:
            workers.turn(0.1)
        assert supervisors(mine()) >= 3, "further children are among those that end"
    assert not mine()
    for call in (lambda: begin(workers, 5, ["c"]), lambda: workers.turn(0), workers.load):
        with pytest.raises(RewardError, match="called after close"):
            call()
    assert not mine()


def test_a_batch_is_scored_while_keys_run(write: Write, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, workers=2, timeout_s=PLENTY_S)) as workers:
        begin(workers, "slow", [f"wait {gate}"])
        begin(workers, "quick", ["c"])
        batch = workers.score(["p"] * 4, ["c"] * 4, {})
        assert {score.outcome for score in batch} == {Outcome.SCORE}
        assert finished(workers, 1) == {"quick": scores(1)}
        gate.touch()
        assert finished(workers, 1) == {"slow": scores(1)}


def test_an_error_of_the_function_forgets_all_keys(write: Write) -> None:
    with RewardWorkers(write(ACTS), RewardConfig(sandbox=False, timeout_s=PLENTY_S)) as workers:
        begin(workers, "bare", ["bare"])
        begin(workers, "other", ["c"])
        with pytest.raises(RewardError, match=r"returned 1\.0"):
            finished(workers, 2)
        assert workers.turn(0) == []
        begin(workers, "other", ["c"])
        assert finished(workers, 1) == {"other": scores(1)}


def test_several_functions_score_a_key_side_by_side(write: Write) -> None:
    """Each function ends its call only after the other one has begun, so sequential calls would never end."""
    function = write(
        """
        import time
        from pathlib import Path
        def meet(own, other):
            here = Path(__file__).parent
            (here / own).touch()
            while not (here / other).exists(): time.sleep(0.01)
        def first(completions):
            meet("first", "second")
            return [1.0 for _ in completions]
        def second(completions):
            meet("second", "first")
            return [None if text == "none" else 10.0 for text in completions]
        """,
        "first",
    )
    functions = (function, replace(function, name="second", weight=0.5))
    with WeightedWorkers(functions, RewardConfig(sandbox=False, timeout_s=PLENTY_S)) as workers:
        begin(workers, "key", ["c", "none"])
        (found,) = finished(workers, 1).values()
    assert [score.value for score in found] == [6.0, 1.0]
    assert [dict(score.parts) for score in found] == [{"first": 1.0, "second": 10.0}, {"first": 1.0}]
