"""Task policy: act for several tasks, each with weights of its own, in equal parts of the slots.

observations [N, ...] ─ split by task ─ network with the task's weights ─ joined ─> sample ─> actions
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from rillflow_classic.fragment import Array
from rillflow_classic.networks.acting import NetworkPolicy
from rillflow_classic.networks.distributions import Floats
from rillflow_classic.policy import Weights


class TaskPolicy(NetworkPolicy):
    """Acts for several tasks, which have equal parts of the slots and may have weights of their own."""

    _tasks: Sequence[NetworkPolicy] = ()
    _copies: Sequence[NetworkPolicy] = ()

    def evaluate(self, observations: Array, state: Array | None) -> tuple[Floats, Floats, Array | None]:
        """See NetworkPolicy."""
        if not self._tasks:
            return super().evaluate(observations, state)
        tasks = self._tasks[: len(observations)]
        parts = zip(tasks, np.array_split(observations, len(tasks)), strict=True)
        parameters, values, _ = zip(*(task.evaluate(part, None) for task, part in parts), strict=True)
        return np.concatenate(parameters), np.concatenate(values), state

    def load(self, version: int, weights: Weights) -> None:
        """Load weights for all tasks."""
        self._tasks = ()
        super().load(version, weights)

    def load_tasks(self, version: int, weights: Sequence[Weights]) -> None:
        """Load weights for each task, in the order of the slots; without any, act with the network."""
        missing = len(weights) - len(self._copies)
        self._copies = [*self._copies, *(NetworkPolicy(copy.deepcopy(self.network)) for _ in range(missing))]
        self._tasks = self._copies[: len(weights)]
        for task, own in zip(self._tasks, weights, strict=True):
            task.load(version, own)
        self.version = version
