"""Slots in child processes, several in each, with all arrays in one block of shared memory.

    parent                          shared record                         child of slots a ... b
    actions ──────────────────────> actions      ───────────────────────> Lane.step, in turn
    b"step" ────────────────────────── socket ──────────────────────────> wakes
    results <────────────────────── observations, rewards, ... <───────── Lane.rows
    done <──────────────────────────── socket ─────────────────────────── b"done", or an error as JSON

A child imports no torch, so that it starts in a second. It ends with its parent, also after a kill -9 and
while its environment hangs. A child that dies or hangs is replaced: its slots are truncated where they were,
and reset at the next step. The environments of the other children are not affected.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from rillflow.errors import RillflowError
from rillflow.isolation.child_process import ChildProcess, end_with, start_python
from rillflow.runs.environment import usable_cores
from rillflow_classic.environments.catalog import find, make_lanes
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.copies import Copies
from rillflow_classic.environments.lanes import InlineEnvironment, Lane, record_type
from rillflow_classic.environments.vector import EnvironmentFailure, Stepped
from rillflow_classic.fragment import Array

START_S = 120.0
"""Longest start of a child."""
_CLOSE_S = 3.0
_DONE = b"done"
_DIED = "has died"
_MOST_BYTES = 2**17
_BOOT = (
    "import sys; from rillflow_classic.environments.processes import serve; serve(*map(int, sys.argv[1:]))"
)


def serve(parent: int, index: int, descriptor: int, memory: int) -> None:
    """Run a child: step its environments whenever the parent asks, until it closes the socket."""
    end_with(parent)
    link = socket.socket(fileno=descriptor)
    try:
        given, bounds, copy, most_steps = json.loads(link.recv(_MOST_BYTES))
        config, first, last = EnvironmentSettings.model_validate(given), bounds[index], bounds[index + 1]
        lanes = make_lanes(config, find(config), Copies(last - first, copy + first, most_steps))
        kind = record_type(lanes[0], bounds[-1] * len(lanes[0].agents))
        record: Array = np.ndarray((), kind, mmap.mmap(memory, 0))
        environment = InlineEnvironment(lanes, bounds[-1], first, record)
        actions = record["actions"][first * len(lanes[0].agents) : last * len(lanes[0].agents)]
        link.send(_DONE)
        while request := link.recv(_MOST_BYTES):
            if request == b"step":
                environment.advance(actions.copy())
            else:
                environment.begin(int(request))
            link.send(_DONE)
        environment.close()
    except RillflowError as error:  # the parent raises it
        with suppress(OSError):  # the parent has closed the socket
            link.send(json.dumps(error.args).encode())


class ProcessEnvironment(InlineEnvironment):
    """Slots in child processes.

    Args:
        config: settings; ``processes``, ``step_timeout_s`` and ``restarts`` too.
        probe: an environment of the id, for its spaces; it is closed.
        copies: the environments.

    Raises:
        EnvironmentFailure: a child does not start, or cannot make its environments.
    """

    def __init__(self, config: EnvironmentSettings, probe: Lane, copies: Copies) -> None:
        num_lanes = copies.count
        kind = record_type(probe, num_lanes * len(probe.agents))
        self._memory = os.fdopen(os.memfd_create("slots"), "r+b")
        self._memory.truncate(kind.itemsize)
        super().__init__([probe], num_lanes, 0, np.ndarray((), kind, mmap.mmap(self._memory.fileno(), 0)))
        probe.close()
        self.num_restarts = 0
        """How many children were replaced."""
        self._config, count = config, min(config.processes or num_cores(), num_lanes)
        self._bounds = [num_lanes * index // count for index in range(count + 1)]
        self._slots = [slice(a * self._width, b * self._width) for a, b in pairwise(self._bounds)]
        self._every = range(count)
        self.children = [self._started(index) for index in self._every]
        """Process and socket of each child."""
        self._task = json.dumps(
            (config.model_dump(mode="json"), self._bounds, copies.first, copies.most_steps)
        ).encode()
        self._called(self._task, self._every, START_S)

    def _started(self, index: int) -> tuple[ChildProcess, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            given = theirs.fileno(), self._memory.fileno()
            return start_python(_BOOT, index, *given, descriptors=given), ours

    def begin(self, seed: int) -> Array:
        """Reset the lanes of all children; see ``VectorEnvironment.begin``."""
        waiting: Sequence[int] = self._every
        while waiting := self._called(b"%d" % seed, waiting, self._config.step_timeout_s):
            pass
        self.absent[:] = self._rows.truncated
        return self._rows.observations

    def advance(self, actions: Array) -> Stepped:
        """Step the lanes of all children; see ``VectorEnvironment.advance``."""
        self._record["actions"][...] = actions
        for index in self._called(b"step", self._every, self._config.step_timeout_s):
            slots, rows = self._slots[index], self._rows
            rows.rewards[slots], rows.terminated[slots], rows.truncated[slots] = 0.0, False, True
            self._starts[slots] = self._steps + 1  # so that their episodes do not count
        return self._rows

    def _called(self, request: bytes, children: Sequence[int], seconds: float) -> list[int]:
        """Send children a request and wait for all; replace those that were lost, and return them.

        Raises:
            EnvironmentFailure: an environment raised; or too many children were lost.
        """
        for index in children:
            with suppress(ConnectionError):  # it has died, which its missing answer says
                self.children[index][1].send(request)
        lost, failures, until = list[int](), list[bytes](), time.monotonic() + seconds
        for index in children:
            link, answer, reason = self.children[index][1], b"", _DIED
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
            raise EnvironmentFailure(*json.loads(failure))
        return lost

    def _replace(self, index: int, reason: str) -> None:
        """Start another process for a child's slots.

        Raises:
            EnvironmentFailure: ``restarts`` children have been replaced already.
        """
        slots, limit = self._slots[index], self._config.restarts
        has_died = reason == _DIED
        code = self._end(index, 1.0 if has_died else 0.0)
        if self.num_restarts >= limit:
            last, signal = slots.stop - 1, f" (signal {-code})" if code < 0 else ""
            named = f"slot {last}" if slots.start == last else f"slots {slots.start} to {last}"
            ended = f" with exit code {code}{signal}" if has_died else ""
            fix = "look for an endless loop, or raise environment.step_timeout_s if a step takes so long"
            raise EnvironmentFailure(
                f"the process of {named} of {self._config.id!r} {reason}{ended}",
                why=f"environment.restarts is {limit}, and {self.num_restarts} processes were replaced",
                fix="look for a crash in the environment; its output is above" if has_died else fix,
            )
        self.num_restarts += 1
        self.children[index] = self._started(index)
        self._called(self._task, [index], START_S)

    def _end(self, index: int, seconds: float) -> int:
        """End a child that has some seconds to close its environments; return its exit code."""
        process, link = self.children[index]
        link.close()
        code = process.end(alone_s=seconds)
        assert code is not None, "the wait for a killed child has no limit"
        return code

    def close(self) -> None:
        """End all children."""
        for index in self._every:
            self._end(index, _CLOSE_S)
        self._memory.close()


def num_cores() -> int:
    """Return the number of whole cores that this process may use, at least 1."""
    return max(1, int(usable_cores()))
