"""Slots in child processes, several in each.

    actions ── a call of every child ──> its InlineEnvironment ── results ──> arrays of all slots

The processes are those of the core's ProcessBackend: they end with this process, hanging ones too. A child
that dies or hangs is replaced: its slots are truncated where they were, and reset at the next step. The
environments of the other children are not affected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from rillflow.workers.backend import Pool, RankLost
from rillflow.workers.processes import ProcessBackend
from rillflow_classic.environments.catalog import find, make_lane
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.lanes import InlineEnvironment, Lane, empty_rows
from rillflow_classic.environments.vector import EnvironmentFailure, SlotsBase, Stepped
from rillflow_classic.fragment import Array
from rillflow_classic.worker_set import DEADLINE_S, WorkerSet

POOL = "environments"
"""Pool of the children."""


def make_child(config: EnvironmentSettings, bounds: Sequence[int], index: int) -> InlineEnvironment:
    """Return the environments of child ``index``: the lanes from one bound to the next."""
    entry, first, last = find(config), bounds[index], bounds[index + 1]
    return InlineEnvironment([make_lane(config, entry) for _ in range(first, last)], first)


class ProcessEnvironment(SlotsBase):
    """Slots in child processes.

    Args:
        config: settings; ``processes``, ``step_timeout_s`` and ``restarts`` too.
        probe: an environment of the id, for its spaces.
        num_lanes: number of environments.

    Raises:
        ConfigError: an environment cannot be made.
        ClusterError: a child does not start.
    """

    def __init__(self, config: EnvironmentSettings, probe: Lane, num_lanes: int) -> None:
        width = len(probe.agents)
        super().__init__(tuple(probe.agents) * num_lanes, probe.observation_space, probe.action_space)
        self.num_restarts = 0
        """How many children were replaced."""
        self._config, self._rows = config, empty_rows(probe, self.num_slots)
        count = min(config.processes or num_cores(), num_lanes)
        bounds = [num_lanes * index // count for index in range(count + 1)]
        self._slots = [slice(first * width, last * width) for first, last in pairwise(bounds)]
        self._backend = ProcessBackend(heartbeat_s=0)  # step_timeout_s bounds a silence
        self._backend.open([Pool(name=POOL, size=count, world=1)])
        self.children = WorkerSet(self._backend, POOL, partial(make_child, config, bounds))
        """The children."""

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        waiting = dict.fromkeys(range(self.children.size), seed)
        while waiting:
            for index, observations in self._called("reset", waiting).items():
                self._rows.observations[self._slots[index]] = observations
                del waiting[index]
        return self._rows.observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        actions, rows = self._checked(actions), self._rows
        rows.rewards[:], rows.terminated[:], rows.truncated[:] = 0.0, False, True  # of a lost child's slots
        found = self._called("step", {index: actions[each] for index, each in enumerate(self._slots)})
        for index, stepped in found.items():
            slots = self._slots[index]
            rows.observations[slots], rows.rewards[slots] = stepped.observations, stepped.rewards
            rows.terminated[slots], rows.truncated[slots] = stepped.terminated, stepped.truncated
        episodes = [each for stepped in found.values() for each in stepped.episodes]
        return Stepped(**{**vars(rows), "episodes": episodes})

    def _called(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Return the results of a method of some children, but of those that were lost and replaced.

        Raises:
            RillflowError: what an environment raised; or too many children were lost.
        """
        found, until = {}, time.monotonic() + self._config.step_timeout_s
        for call in [self.children.call(index, method, each) for index, each in arguments.items()]:
            try:
                found[call.worker] = call.read(max(0.0, until - time.monotonic()))
            except TimeoutError:
                self._replace(call.worker, f"did not answer for {self._config.step_timeout_s:g} s")
            except RankLost as error:
                self._replace(call.worker, f"{error.what} ({error.why})")
        return found

    def _replace(self, index: int, reason: str) -> None:
        """Start another process for a child's slots.

        Raises:
            EnvironmentFailure: ``restarts`` children have been replaced already.
        """
        slots, limit = self._slots[index], self._config.restarts
        if self.num_restarts >= limit:
            raise EnvironmentFailure(
                f"the process of slots {slots.start} to {slots.stop - 1} of {self._config.id!r} {reason}",
                why=f"environment.restarts is {limit}, and {self.num_restarts} were replaced",
                fix="look for a crash or an endless loop in the environment; or raise "
                "environment.step_timeout_s or environment.restarts",
            )
        self.num_restarts += 1
        self.children.replace(index).read(DEADLINE_S)
        self.children.make_again(index).read(DEADLINE_S)

    def close(self) -> None:
        """End all children."""
        self._backend.close()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
