"""Slots in child processes, several in each; actions and results lie in shared memory.

    actions ─> shared rows      command ─> child: its environments, one after the other ─> shared rows
                                <─ answer ──┘

``step`` and ``reset``
    consumes      actions of all slots
    waits for     one answer of every child
    unblocked by  the answers, the end of a child, or ``step_timeout_s``
    produces      the rows of all slots
    shuts down    ``close``, or the end of this process: the children end with it, hanging ones too

A child that dies or hangs is killed and replaced: its slots are truncated where they were, and reset at the
next step. The environments of the other children are not affected.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from rillflow.errors import RillflowError
from rillflow.workers.watchdog import end_with
from rillflow_classic.environments.catalog import find, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.lanes import Lane, LaneGroup, LaneSlots, StepRows, lane_seed
from rillflow_classic.environments.vector import EnvironmentFailure, Stepped
from rillflow_classic.fragment import Array

START_TIMEOUT_S = 120.0
"""Longest wait for a child to import and make its environments, in seconds."""
_PAUSE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LaneShare:
    """What a child is told."""

    config: EnvironmentSettings
    """Settings of the environment, with its provider."""
    first: int
    """Index of its first lane."""
    last: int
    """Index after its last lane."""
    num_lanes: int
    """Lanes of all children."""
    descriptor: int
    """Open file of the shared rows."""


def row_type(lane: Lane) -> np.dtype[Any]:
    """Return the type of what a slot has in shared memory: its action, and the results of a step."""
    space, action = lane.observation_space, lane.action_space
    observations = ("observations", space.dtype, space.shape)
    flags = [("terminated", np.bool_), ("truncated", np.bool_)]
    columns = [observations, ("actions", action.dtype, action.shape), ("rewards", np.float32), *flags]
    return np.dtype(columns, align=True)


def shared_rows(lane: Lane, num_slots: int, descriptor: int) -> tuple[Any, list[StepRows]]:
    """Return the actions [N, ...] and two buffers of rows in an open file that several processes map.

    Steps write the buffers in turn, so a process that dies in a step leaves the last results whole.
    """
    table = np.ndarray((2, num_slots), row_type(lane), mmap.mmap(descriptor, 0))
    names = [field.name for field in fields(StepRows)]
    return table["actions"][0], [StepRows(**{name: rows[name] for name in names}) for rows in table]


def serve(link: Connection) -> None:
    """Step lanes in a child, until the parent closes the socket.

    The parent sends the buffer to write, and the seed of a reset or None for a step. The child answers None,
    or an error and ends.
    """
    share: LaneShare = link.recv()
    try:
        entry = find(share.config)
        lanes = [make_lane(share.config, entry) for _ in range(share.first, share.last)]
        group, width = LaneGroup(lanes, share.first), len(lanes[0].agents)
        every, buffers = shared_rows(lanes[0], share.num_lanes * width, share.descriptor)
        mine = slice(share.first * width, share.last * width)
        actions, parts = every[mine], [group.split(rows.part(mine)) for rows in buffers]
        while True:
            link.send(None)
            buffer, seed = link.recv()
            if seed is None:
                group.step(actions, parts[buffer])
            else:
                group.begin(seed, parts[buffer])
    except EOFError:
        return
    except RillflowError as error:
        link.send(error)


@dataclass(kw_only=True, eq=False)
class _Child:
    share: LaneShare
    process: subprocess.Popen[bytes]
    link: Connection
    seed: int | None = None
    """Seed of its next command, which is a reset; None: a step."""

    def send(self, buffer: int) -> None:
        """Send the next command; a dead child is noticed when its answer is read."""
        try:
            self.link.send((buffer, self.seed))
        except ConnectionError:
            return
        finally:
            self.seed = None

    def end(self, pause_s: float = 0.0) -> None:
        """Close the socket; kill the child if it has not ended after a pause."""
        self.link.close()
        try:
            self.process.wait(pause_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ProcessEnvironment(LaneSlots):
    """Slots in child processes.

    Args:
        config: settings, with the provider chosen; ``processes``, ``step_timeout_s`` and ``restarts`` too.
        probe: an environment of the id, for its spaces.
        num_lanes: number of environments.

    Raises:
        ConfigError: an environment cannot be made.
        EnvironmentFailure: a child does not start.
    """

    def __init__(self, config: EnvironmentSettings, probe: Lane, num_lanes: int) -> None:
        super().__init__(probe, num_lanes, clip=config.clip_actions)
        self.num_restarts = 0
        """How many children were replaced."""
        self._config, self._num_lanes, self._seed, self._turn = config, num_lanes, 0, 0
        memory = Path("/dev/shm")
        self._file = tempfile.TemporaryFile(dir=memory if memory.is_dir() else None)  # noqa: SIM115  kept open
        self._file.truncate(2 * self.num_slots * row_type(probe).itemsize)
        self._actions, self._buffers = shared_rows(probe, self.num_slots, self._file.fileno())
        count = min(config.processes or num_cores(), num_lanes)
        bounds = [num_lanes * index // count for index in range(count + 1)]
        self._children = [self._start(first, last) for first, last in pairwise(bounds)]
        for child, reason in self._answers(self._children, START_TIMEOUT_S):
            raise self._failure(child, f"{reason} before it had begun")

    def _start(self, first: int, last: int) -> _Child:
        ours, theirs = socket.socketpair()
        link, descriptor = theirs.fileno(), self._file.fileno()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(os.getpid()), str(link)],
                stdin=subprocess.DEVNULL,
                pass_fds=[link, descriptor],
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                start_new_session=True,  # Ctrl-C ends the parent, which ends its children
            )
        lanes = {"first": first, "last": last, "num_lanes": self._num_lanes}
        share = LaneShare(config=self._config, descriptor=descriptor, **lanes)
        child = _Child(share=share, process=process, link=Connection(ours.detach()))
        child.link.send(share)
        return child

    def _slots(self, child: _Child) -> slice:
        width = self.num_slots // self._num_lanes
        return slice(child.share.first * width, child.share.last * width)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._totals.clear()
        self._seed, self._turn, waiting = seed, 0, list(self._children)
        while waiting:
            for child in waiting:
                child.seed = seed % 2**63
                child.send(self._turn)
            failed = self._answers(waiting, self._config.step_timeout_s)
            waiting = [self._replace(child, reason) for child, reason in failed]
        return self._buffers[0].observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        self._actions[:] = self._check(actions)
        before, self._turn = self._buffers[self._turn], 1 - self._turn
        rows = self._buffers[self._turn]
        for child in self._children:
            child.send(self._turn)
        for child, reason in self._answers(self._children, self._config.step_timeout_s):
            new, slots = self._replace(child, reason), self._slots(child)
            new.seed = lane_seed(self._seed, self._num_lanes + self.num_restarts)
            self._totals.drop(slots)
            rows.observations[slots] = before.observations[slots]
            rows.rewards[slots], rows.terminated[slots], rows.truncated[slots] = 0.0, False, True
        return self._stepped(rows)

    def _answers(self, children: Sequence[_Child], timeout_s: float) -> list[tuple[_Child, str]]:
        """Wait for one answer of each child; return those that died or hung, with the reason.

        Raises:
            RillflowError: what an environment raised.
        """
        waiting, failed = {child.link: child for child in children}, list[tuple[_Child, str]]()
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return failed + [(child, f"did not answer for {timeout_s:g} s") for child in waiting.values()]
            for link in ready:
                child = waiting.pop(link)  # type: ignore[call-overload]
                try:
                    answer = child.link.recv()
                except (EOFError, ConnectionResetError):
                    failed.append((child, f"ended with exit code {child.process.wait(_PAUSE_S)}"))
                    continue
                if isinstance(answer, RillflowError):
                    raise answer
        return failed

    def _replace(self, child: _Child, reason: str) -> _Child:
        """Kill a child and start another one for its slots.

        Raises:
            EnvironmentFailure: ``restarts`` children have been replaced already.
        """
        child.end()
        if self.num_restarts >= self._config.restarts:
            raise self._failure(child, reason)
        self.num_restarts += 1
        new = self._start(child.share.first, child.share.last)
        self._children[self._children.index(child)] = new
        for _, why in self._answers([new], START_TIMEOUT_S):
            raise self._failure(child, f"{reason}; another one in its place {why}")
        return new

    def _failure(self, child: _Child, reason: str) -> EnvironmentFailure:
        slots = self._slots(child)
        return EnvironmentFailure(
            f"the process of slots {slots.start} to {slots.stop - 1} of {self._config.id!r} {reason}",
            why=f"environment.restarts is {self._config.restarts}, and {self.num_restarts} were replaced",
            fix="look for a crash or an endless loop in the environment; or raise environment.step_timeout_s "
            "or environment.restarts",
        )

    def close(self) -> None:
        """End all children."""
        for child in self._children:
            child.end(_PAUSE_S)
        self._children = []
        self._file.close()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    serve(Connection(int(sys.argv[2])))
