"""Slots in child processes, several in each; actions and results lie in shared memory.

    actions ─> shared rows        command byte ─> child: its environments, one after the other ─> shared rows
                                   <─ answer ──┘

``step`` and ``reset``
    consumes      actions of all slots
    waits for     one answer of every child
    unblocked by  the answers, the end of a child, or ``step_timeout_s``
    produces      the rows of all slots
    shuts down    ``close``, or the end of this process: the children see the end of their pipe

A child that dies or hangs is killed and replaced: its slots are truncated where they were, and reset at the
next step. The environments of the other children are not affected.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rillflow.errors import ConfigError
from rillflow_classic.environments.actions import ActionCheck
from rillflow_classic.environments.catalog import CatalogEntry
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.inline import LaneResult, lane_seed
from rillflow_classic.environments.lanes import Lane
from rillflow_classic.environments.process_child import COMMAND, DONE
from rillflow_classic.environments.shared_rows import SharedRows
from rillflow_classic.environments.vector import EnvironmentFailure, Stepped
from rillflow_classic.fragment import Array

START_TIMEOUT_S = 120.0
"""Longest wait for a child to import and make its environments, in seconds."""
_PAUSE_S = 5.0


@dataclass(kw_only=True)
class _ChildProcess:
    """A child and its slots."""

    told: dict[str, Any]
    process: subprocess.Popen[bytes]
    seed: int | None = None
    """Seed of its next command, which is a reset; None: a step."""

    @property
    def slots(self) -> slice:
        first = self.told["first"] * self.told["width"]
        return slice(first, first + self.told["lanes"] * self.told["width"])

    @property
    def answers(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, buffer: int) -> None:
        """Send the next command; a dead child is noticed when its answer is read."""
        assert self.process.stdin is not None
        command = COMMAND.pack(buffer, self.seed is not None, self.seed or 0)
        self.seed = None
        try:
            os.write(self.process.stdin.fileno(), command)
        except BrokenPipeError:
            return

    def end(self, pause_s: float = 0.0) -> None:
        """Close the pipe; kill the child if it has not ended after a pause."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(pause_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ProcessEnvironment:
    """Slots in child processes.

    Args:
        config: settings; ``processes``, ``step_timeout_s`` and ``restarts`` are used here.
        entry: what the id names.
        probe: an environment of the id, for its spaces.
        num_lanes: number of environments.
    """

    def __init__(self, config: EnvironmentSettings, entry: CatalogEntry, probe: Lane, num_lanes: int) -> None:
        width = len(probe.agents)
        self.agents: Sequence[str] = tuple(probe.agents) * num_lanes
        self.num_slots = num_lanes * width
        self.observation_space, self.action_space = probe.observation_space, probe.action_space
        self._config, self._restarts, self._seed, self._turn = config, 0, 0, 0
        self._check = ActionCheck(self.action_space, self.num_slots, clip=config.clip_actions)
        self._result = LaneResult(self.observation_space, self.num_slots)
        self._shared = SharedRows(self.observation_space, self.action_space, self.num_slots)
        told = config.model_copy(update={"provider": entry.provider}).model_dump(mode="json")
        count = min(config.processes or num_cores(), num_lanes)
        bounds = [num_lanes * index // count for index in range(count + 1)]
        fixed = {"config": told, "slots": self.num_slots, "width": width}
        self._children = [
            self._start({**fixed, "first": first, "lanes": last - first}) for first, last in pairwise(bounds)
        ]
        for child, reason in self._wait(self._children, START_TIMEOUT_S):
            self.close()
            raise ConfigError(
                f"a child process for {config.id!r} did not start: {reason}",
                why=f"it makes slots {child.slots.start} to {child.slots.stop - 1}",
                fix='try environment.run = "inline", which shows the error where it happens',
            )

    def _start(self, told: dict[str, Any]) -> _ChildProcess:
        descriptor = self._shared.descriptor
        command = (sys.executable, "-m", "rillflow_classic.environments.process_child")
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            (*command, json.dumps({**told, "descriptor": descriptor})),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        return _ChildProcess(told=told, process=process)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._result.totals.clear()
        self._seed, self._turn = seed, 0
        waiting = list(self._children)
        while waiting:
            for child in waiting:
                child.seed = seed % 2**63
                child.send(self._turn)
            failed = self._wait(waiting, self._config.step_timeout_s)
            waiting = [self._replace(child, reason) for child, reason in failed]
        return self._shared.buffers[0].observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        self._shared.actions[:] = self._check(actions)
        before, self._turn = self._shared.buffers[self._turn], 1 - self._turn
        rows = self._shared.buffers[self._turn]
        for child in self._children:
            child.send(self._turn)
        for child, reason in self._wait(self._children, self._config.step_timeout_s):
            slots = child.slots
            self._replace(child, reason).seed = lane_seed(self._seed, self.num_slots + self._restarts)
            self._result.totals.drop(slots)
            rows.observations[slots] = before.observations[slots]
            rows.rewards[slots], rows.terminated[slots], rows.truncated[slots] = 0.0, False, True
        return self._result.read(rows)

    def _wait(self, children: Sequence[_ChildProcess], timeout_s: float) -> list[tuple[_ChildProcess, str]]:
        """Wait for one answer of each child; return those that died or hung, with the reason.

        Raises:
            EnvironmentFailure: an environment raised, or returned something wrong.
            ConfigError: an environment cannot be made.
        """
        waiting = {child.answers: child for child in children}
        poller, failed = select.poll(), list[tuple[_ChildProcess, str]]()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return failed + [(child, f"no answer for {timeout_s:g} s") for child in waiting.values()]
            for descriptor, _ in ready:
                poller.unregister(descriptor)
                child, answer = waiting.pop(descriptor), os.read(descriptor, 1 << 16)
                if not answer:
                    failed.append((child, _ending(child.process)))
                elif answer != DONE:
                    raise _error(answer)
        return failed

    def _replace(self, child: _ChildProcess, reason: str) -> _ChildProcess:
        """Kill a child and start another one for its slots.

        Raises:
            EnvironmentFailure: ``restarts`` children have been replaced already.
        """
        child.end()
        slots = f"slots {child.slots.start} to {child.slots.stop - 1}"
        if self._restarts >= self._config.restarts:
            raise EnvironmentFailure(
                f"the process of {slots} of {self._config.id!r} failed: {reason}",
                why=f"environment.restarts is {self._config.restarts}, and {self._restarts} were replaced",
                fix="look for a crash or an endless loop in the environment, or raise "
                "environment.step_timeout_s or environment.restarts",
            )
        self._restarts += 1
        new = self._children[self._children.index(child)] = self._start(child.told)
        for _, why in self._wait([new], START_TIMEOUT_S):
            raise EnvironmentFailure(
                f"the process of {slots} of {self._config.id!r} failed: {reason}",
                why=f"another one in its place did not start: {why}",
                fix="look for a crash in the environment's import or its construction",
            )
        return new

    @property
    def num_restarts(self) -> int:
        """How many children were replaced."""
        return self._restarts

    def render(self, slot: int) -> Array | None:
        """Return None; ``make_video_environment`` makes environments that show something."""
        del slot
        return None

    def state(self) -> Mapping[str, Array]:
        """Return no statistics."""
        return {}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End all children."""
        for child in self._children:
            child.end(_PAUSE_S)
        self._children = []


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Return how a child ended."""
    try:
        code = process.wait(_PAUSE_S)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    return f"it was ended by signal {-code}" if code < 0 else f"it exited with code {code}"


def _error(answer: bytes) -> EnvironmentFailure | ConfigError:
    told = json.loads(answer)
    kind = ConfigError if told["kind"] == "config" else EnvironmentFailure
    return kind(told["what"], why=told["why"], fix=told["fix"])
