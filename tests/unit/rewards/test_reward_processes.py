"""Processes of a reward function do not outlive its call, its workers or the driver; nothing leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rillflow.errors import RewardError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]

LEVELS = [Level.NONE, Level.NO_NAMESPACE]

SPAWNING = """
import os, subprocess, sys, time

def spawn(marker):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", marker]
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)
    if os.fork() == 0:  # a daemon: forked twice, out of the session, an orphan
        os.setsid()
        if os.fork() == 0:
            os.execv(sleeper[0], sleeper)
        os._exit(0)
    while sum(marker in line for line in commands()) < 3:
        time.sleep(0.01)

def commands():
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield open(f"/proc/{entry}/cmdline").read()
            except OSError:
                pass

def reward(completions, marker):
    spawn(marker[0])
    while completions[0] == "hang":
        pass
    if completions[0] == "die":
        os._exit(0)
    return [1.0] * len(completions)
"""


def runs(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive(marker: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [
        each for each in found if any(marker in part for part in each.info["cmdline"] or ()) and runs(each)
    ]


GONE_S = 10.0
"""The kernel and a supervisor end processes at once; a loaded machine schedules them late."""


def gone_in_time(left: Callable[[], list[psutil.Process]]) -> bool:
    until = time.monotonic() + GONE_S
    while left():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until, "it did not come to be in a minute"
        time.sleep(0.01)


def below(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


@pytest.fixture
def mine() -> Callable[[], list[psutil.Process]]:
    """Return a function for processes below this one that started after the test; others are helpers."""
    before = {process.pid for process in below(os.getpid())}
    return lambda: [process for process in below(os.getpid()) if process.pid not in before]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["hang", "die"])
def test_detached_processes_end_with_the_call_that_fails(write: Write, level: Level, kind: str) -> None:
    marker = f"marker-{uuid.uuid4()}"
    config = RewardConfig(sandbox=False, timeout_s=1.0 if kind == "hang" else 60.0)
    with RewardWorkers(write(SPAWNING), config, level=level) as rewards:
        (score,) = rewards.score(["p"], [kind], {"marker": [marker]})
        assert score.outcome is (Outcome.TIMEOUT if kind == "hang" else Outcome.ERROR)
        assert not alive(marker)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_after_close(write: Write, level: Level) -> None:
    marker = f"marker-{uuid.uuid4()}"
    before = {process.pid for process in below(os.getpid())}
    with RewardWorkers(write(SPAWNING), RewardConfig(sandbox=False, workers=2), level=level) as rewards:
        scores = rewards.score(["p"], ["c"], {"marker": [marker]})
        assert scores[0].outcome is Outcome.SCORE, scores[0].message
        assert len(alive(marker)) == 3
    assert not alive(marker)
    assert {process.pid for process in below(os.getpid())} == before


DRIVER = """
import sys
from pathlib import Path
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.isolation.sandbox import Level
from rillflow.rewards.workers import RewardWorkers

function = parse_function("rewards.py:reward", Path(sys.argv[1]))
config = RewardConfig(sandbox=False, workers=2, timeout_s=600)
with RewardWorkers(function, config, level=Level(sys.argv[2])) as rewards:
    rewards.score(["p"] * 2, ["c", "c"], {"marker": [sys.argv[3]] * 2})
    print("idle", flush=True)
    if sys.argv[4] == "idle":
        input()
    rewards.score(["p"] * 2, ["hang", "hang"], {"marker": [sys.argv[3]] * 2})
"""


@pytest.mark.parametrize(("level", "when"), [*((each, "busy") for each in LEVELS), (Level.NONE, "idle")])
def test_nothing_is_left_when_the_driver_is_killed(write: Write, level: Level, when: str) -> None:
    marker = f"marker-{uuid.uuid4()}"
    folder = write(SPAWNING).file.parent
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), level, marker, when],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert driver.stdin is not None and driver.stdout is not None
    try:
        assert driver.stdout.readline() == b"idle\n"
        if when == "busy":  # both children have begun the second call, and more processes
            wait_until(lambda: len(alive(marker)) >= 12)
        tree = below(driver.pid)
        assert len(tree) >= 6, "two supervisors, keepers and children"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait(10)
    driver.stdin.close()
    driver.stdout.close()
    assert gone_in_time(lambda: alive(marker) + [each for each in tree if runs(each)])


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_supervisor_takes_its_child_along(
    write: Write, level: Level, mine: Callable[[], list[psutil.Process]]
) -> None:
    function = write(
        """
        import threading
        from pathlib import Path
        def reward(completions, marker):
            if completions[0] == "c":
                return [1.0]
            Path(__file__).with_name("busy").touch()
            while True: pass
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, timeout_s=30), level=level) as rewards:
        columns = {"marker": ["m"]}
        assert rewards.score(["p"], ["c"], columns)[0].value == 1.0
        tree = mine()
        supervisor = next(process for process in tree if process.ppid() == os.getpid())
        busy = function.file.with_name("busy")
        killer = threading.Thread(target=lambda: (wait_until(busy.exists), supervisor.kill()))
        killer.start()
        (score,) = rewards.score(["p"], ["hang"], columns)
        killer.join()
        assert score.outcome is Outcome.ERROR
        assert gone_in_time(lambda: [each for each in tree if runs(each)])
        assert rewards.score(["p"], ["c"], columns)[0].value == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_a_fork_bomb_is_ended_and_its_neighbours_are_scored(
    write: Write, level: Level, mine: Callable[[], list[psutil.Process]]
) -> None:
    function = write(
        """
        import os, time
        def reward(completions):
            if "bomb" in completions:
                for _ in range(11):  # 2,048 processes that keep busy, should nothing end them
                    os.fork()
                until = time.monotonic() + 5
                while time.monotonic() < until: pass
                os._exit(1)
            return [1.0] * len(completions)
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, timeout_s=20), level=level) as rewards:
        rewards.score(["p"], ["c"], {})
        before, bomb, after = rewards.score(["p"] * 3, ["c", "bomb", "c"], {})
        assert (before.value, after.value) == (1.0, 1.0)
        assert bomb.outcome is Outcome.ERROR
        assert bomb.message.startswith("started ")
        assert len(mine()) < 10


def test_a_call_that_ends_before_its_last_row_leaves_no_process_in_the_sandbox(
    write: Write, mine: Callable[[], list[psutil.Process]]
) -> None:
    function = write("def reward(completions):\n    return [1.0] if completions == ['c'] else 'x'\n")
    with RewardWorkers(function, RewardConfig(sandbox=True)) as rewards:
        rewards.score(["p"], ["c"], {})
        before = mine()
        with pytest.raises(RewardError, match="returned 'x'"):
            rewards.score(["p"] * 3, ["malformed"] * 3, {})
        assert gone_in_time(lambda: [each for each in mine() if each not in before])


def test_an_eighth_of_a_gigabyte_of_output_is_read_and_let_go(write: Write) -> None:
    function = write(
        """
        import os
        def reward(completions):
            block = b"x" * 2**20
            for _ in range(128):
                os.write(1, block)
            return [1.0] * len(completions)
        """
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, timeout_s=60)) as rewards:
        before = psutil.Process().memory_info().rss
        assert [score.value for score in rewards.score(["p"] * 2, ["c"] * 2, {})] == [1.0, 1.0]
        assert psutil.Process().memory_info().rss - before < 32 * 1024**2


def test_endless_output_times_out(write: Write) -> None:
    function = write("def reward(completions):\n    while True: print('x' * 10000)")
    with RewardWorkers(function, RewardConfig(sandbox=False, timeout_s=0.5)) as rewards:
        (score,) = rewards.score(["p"], ["c"], {})
    assert score.outcome is Outcome.TIMEOUT
    assert len(score.message) < 4000


def test_fifty_calls_leak_no_descriptor_and_no_process(
    write: Write, mine: Callable[[], list[psutil.Process]]
) -> None:
    function = write(
        "import os\n"
        "def reward(completions):\n"
        "    return [1.0 if completion == 'c' else os._exit(1) for completion in completions]"
    )
    with RewardWorkers(function, RewardConfig(sandbox=False, workers=2)) as rewards:
        rewards.score(["p"] * 4, ["c"] * 4, {})
        descriptors = psutil.Process().num_fds()
        for call in range(50):
            rewards.score(["p"] * 4, ["c", "c", "c", "die" if call % 10 == 0 else "c"], {})
        rewards.score(["p"] * 4, ["c"] * 4, {})
        assert psutil.Process().num_fds() == descriptors
        assert len([each for each in mine() if each.ppid() == os.getpid()]) == 2
    assert psutil.Process().num_fds() < descriptors
