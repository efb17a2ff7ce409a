"""Slots in child processes, several in each, with all arrays in one block of shared memory.

    parent                          shared record                         child of slots a ... b
    actions ──────────────────────> actions      ───────────────────────> Lane.step, in turn
    b"step" ────────────────────────── socket ──────────────────────────> wakes
    results <────────────────────── observations, rewards, ... <───────── Lane.rows
    done <──────────────────────────── socket ─────────────────────────── b"done", or a pickled error

A child imports no torch, so that it starts in a second. It ends with its parent, also after a kill -9 and
while its environment hangs. A child that dies or hangs is replaced: its slots are truncated where they were,
and reset at the next step. The environments of the other children are not affected.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rillflow.workers.watchdog import end_with
from rillflow_classic.environments.catalog import find, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.lanes import InlineEnvironment, Lane, record_type, rows_of
from rillflow_classic.environments.vector import EnvironmentFailure, SlotsBase, Stepped
from rillflow_classic.fragment import Array

START_S = 120.0
"""Longest start of a child."""
_CLOSE_S = 3.0
_DONE = b"done"
_MOST_BYTES = 2**17
_BOOT = "import sys; from rillflow_classic.environments.processes import serve; serve(*map(int, sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    """What a child makes."""

    config: EnvironmentSettings
    """The environment."""
    num_lanes: int
    """Number of environments of all children."""
    first: int
    """Its first environment."""
    last: int
    """The first environment of the next child."""

    def slots(self, lane: Lane) -> slice:
        """Return its slots among all."""
        return slice(self.first * len(lane.agents), self.last * len(lane.agents))


def serve(parent: int, descriptor: int, memory: int) -> None:
    """Run a child: step its environments whenever the parent asks, until it closes the socket."""
    end_with(parent)
    link = socket.socket(fileno=descriptor)
    try:
        task: ChildTask = pickle.loads(link.recv(_MOST_BYTES))  # noqa: S301  of our own parent
        entry = find(task.config)
        lanes = [make_lane(task.config, entry) for _ in range(task.first, task.last)]
        slots, num_slots = task.slots(lanes[0]), task.num_lanes * len(lanes[0].agents)
        record: Array = np.ndarray((), record_type(lanes[0], num_slots), mmap.mmap(memory, 0))
        environment, actions = InlineEnvironment(lanes, task.first, rows_of(record, slots)), record["actions"][slots]
        link.send(_DONE)
        while request := link.recv(_MOST_BYTES):
            if request == b"step":
                environment.advance(actions)
            else:
                environment.reset(int(request))
            link.send(_DONE)
        environment.close()
    except Exception as error:  # noqa: BLE001  the parent raises it
        with suppress(OSError):  # the parent has closed the socket
            link.send(pickle.dumps(error))


class ProcessEnvironment(SlotsBase):
    """Slots in child processes.

    Args:
        config: settings; ``processes``, ``step_timeout_s`` and ``restarts`` too.
        probe: an environment of the id, for its spaces.
        num_lanes: number of environments.

    Raises:
        ConfigError: an environment cannot be made.
        EnvironmentFailure: a child does not start.
    """

    def __init__(self, config: EnvironmentSettings, probe: Lane, num_lanes: int) -> None:
        super().__init__(probe.agents * num_lanes, probe.observation_space, probe.action_space)
        self.num_restarts = 0
        """How many children were replaced."""
        self._config = config
        kind, self._memory = record_type(probe, self.num_slots), open(os.memfd_create("slots"), "r+b")
        self._memory.truncate(kind.itemsize)
        self._record: Array = np.ndarray((), kind, mmap.mmap(self._memory.fileno(), 0))
        self._rows = rows_of(self._record)
        count = min(config.processes or num_cores(), num_lanes)
        bounds = pairwise(num_lanes * index // count for index in range(count + 1))
        tasks = (ChildTask(config=config, num_lanes=num_lanes, first=a, last=b) for a, b in bounds)
        self._tasks = [(task, task.slots(probe)) for task in tasks]
        self._starter = ThreadPoolExecutor(1)  # a child ends with the thread that has started it
        self.children = [self._started(task) for task, _ in self._tasks]
        """Process and socket of each child."""
        self._await(range(count), START_S)

    def _started(self, task: ChildTask) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            given = theirs.fileno(), self._memory.fileno()
            start = self._starter.submit(
                subprocess.Popen[bytes],
                [sys.executable, "-c", _BOOT, *map(str, (os.getpid(), *given))],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C ends the parent, which ends its children
            )
            process = start.result()
        ours.send(pickle.dumps(task))
        return process, ours

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._begun()
        waiting = range(len(self.children))
        while waiting := self._called(b"%d" % seed, waiting):
            pass
        return self._rows.observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        rows, self._record["actions"][...] = self._rows, self._checked(actions)
        for index in self._called(b"step", range(len(self.children))):
            slots = self._tasks[index][1]
            rows.rewards[slots], rows.terminated[slots], rows.truncated[slots] = 0.0, False, True
            self._starts[slots] = self._steps + 1  # no episode that counts
        return self._stepped(**rows.arrays(), ended=rows.terminated | rows.truncated)

    def _called(self, request: bytes, children: Iterable[int]) -> list[int]:
        """Send children a request and wait for all; return those that were lost, and are replaced."""
        for index in children:
            with suppress(OSError):  # it has died, which its answer says
                self.children[index][1].send(request)
        return self._await(children, self._config.step_timeout_s)

    def _await(self, children: Iterable[int], seconds: float) -> list[int]:
        """Wait until children have answered; replace those that have not, and return them.

        Raises:
            RillflowError: what an environment raised; or too many children were lost.
        """
        lost, failures, until = list[int](), list[bytes](), time.monotonic() + seconds
        for index in children:
            link, answer, reason = self.children[index][1], b"", "has died"
            try:
                link.settimeout(max(1e-3, until - time.monotonic()))
                answer = link.recv(_MOST_BYTES)
            except TimeoutError:
                reason = f"did not answer for {seconds:g} s"
            except ConnectionError:
                pass  # it has died
            if not answer:
                self._replace(index, reason)
                lost.append(index)
            elif answer != _DONE:
                failures.append(answer)
        for failure in failures:
            raise pickle.loads(failure)  # noqa: S301  of our own child
        return lost

    def _replace(self, index: int, reason: str) -> None:
        """Start another process for a child's slots.

        Raises:
            EnvironmentFailure: ``restarts`` children have been replaced already.
        """
        (task, slots), (process, link), limit = self._tasks[index], self.children[index], self._config.restarts
        process.kill()
        code = process.wait()
        link.close()
        if self.num_restarts >= limit:
            raise EnvironmentFailure(
                f"the process of slots {slots.start} to {slots.stop - 1} of {self._config.id!r} {reason}",
                why=f"its exit code is {code}; environment.restarts is {limit}, and {self.num_restarts} were replaced",
                fix="look for a crash or an endless loop in the environment; or raise "
                "environment.step_timeout_s or environment.restarts",
            )
        self.num_restarts += 1
        self.children[index] = self._started(task)
        self._await([index], START_S)

    def close(self) -> None:
        """End all children."""
        for _, link in self.children:
            link.close()
        until = time.monotonic() + _CLOSE_S
        for process, _ in self.children:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
        self._starter.shutdown()
        self._memory.close()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
