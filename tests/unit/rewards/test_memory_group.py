"""A memory cgroup limits a whole sandbox: files in memory and the sum of its processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rillflow.isolation.sandbox import MemoryGroup
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome
from rillflow.rewards.workers import RewardWorkers

Write = Callable[..., FunctionPath]

LIMIT = 256 << 20
HUNGRY = """
import os

def reward(completions):
    if completions[0] == "memfd":
        file = os.memfd_create("x")
        for _ in range(512):
            os.write(file, bytes(1 << 20))
    if completions[0] == "many":
        for _ in range(8):
            if os.fork() == 0:
                held = bytearray(150 << 20)
                for place in range(0, len(held), 4096):
                    held[place] = 1
                os.read(os.pipe()[0], 1)
        for _ in range(8):
            if os.waitstatus_to_exitcode(os.wait()[1]):
                raise MemoryError("the kernel ended a process")
    return [1.0]
"""


def refusal() -> str:
    """Return the reason why this machine has no memory cgroup, or an empty text."""
    try:
        MemoryGroup.make(LIMIT).remove()
    except OSError as error:
        return f"no memory cgroup can be made: {error.strerror}"
    return ""


REFUSAL = refusal()
needs_a_group = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL or "a memory cgroup can be made")


@needs_a_group
@pytest.mark.parametrize(("kind", "told"), [("memfd", "SIGKILL"), ("many", "the kernel ended a process")])
def test_a_row_that_takes_more_than_the_group_has_is_an_error_alone(
    write: Write, kind: str, told: str
) -> None:
    config = RewardConfig(sandbox=True, memory_bytes=LIMIT, timeout_s=60)
    with RewardWorkers(write(HUNGRY), config) as workers:
        before, row, after = workers.score(["p"] * 3, ["little", kind, "little"], {})
        assert workers.shortcomings == ""
    assert (before.value, after.value) == (1.0, 1.0)
    assert row.outcome is Outcome.ERROR and told in row.message


@needs_a_group
def test_a_group_has_its_limit_and_is_removed() -> None:
    group = MemoryGroup.make(LIMIT)
    limits = [group.folder / name for name in ("memory.max", "memory.limit_in_bytes")]
    assert [int(each.read_text()) for each in limits if each.exists()] == [LIMIT]
    group.remove()
    os.close(group.members)
    assert not group.folder.exists()


@needs_a_group
def test_a_group_of_a_process_that_is_gone_is_removed_by_the_next() -> None:
    first = MemoryGroup.make(LIMIT)
    last = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    stale = first.folder.with_name(f"rillflow-{last}")
    stale.mkdir()
    first.remove()
    second = MemoryGroup.make(LIMIT)
    second.remove()
    for group in (first, second):
        os.close(group.members)
    assert not stale.exists()
