"""Runs of an algorithm in this process: actors of Gymnasium environments, a learner, and its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rillflow.records.metrics import Metrics
from rillflow.workers.backend import Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs
from rillflow_classic.checkpointed import CheckpointedObjects
from rillflow_classic.environments.vector import Stepped
from rillflow_classic.fragment import Array, FinishedEpisode
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.policy import Learner
from rillflow_classic.system import CallSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor


class GymSlots:
    """Gymnasium environments, one after the other; ``agents`` name the slots."""

    def __init__(self, name: str, num_slots: int, agents: tuple[str, ...] = ()) -> None:
        self._inner = gymnasium.make_vec(
            name,
            num_slots,
            vectorization_mode=gymnasium.VectorizeMode.SYNC,
            vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
        )
        self.num_slots, self.agents = num_slots, agents or ("",) * num_slots
        self.observation_space = self._inner.single_observation_space
        self.action_space = self._inner.single_action_space

    def reset(self, seed: int) -> Array:
        self._sums, self._lengths = np.zeros(self.num_slots), np.zeros(self.num_slots, int)
        self._ended = np.zeros(self.num_slots, bool)
        return self._inner.reset(seed=seed)[0]

    def step(self, actions: Array) -> Stepped:
        observations, rewards, terminated, truncated, _ = self._inner.step(actions)
        self._sums = np.where(self._ended, 0, self._sums + rewards)
        self._lengths = np.where(self._ended, 0, self._lengths + 1)
        self._ended = terminated | truncated
        episodes = [
            FinishedEpisode(total_reward=float(self._sums[n]), length=int(self._lengths[n]), slot=n)
            for n in np.flatnonzero(self._ended).tolist()
        ]
        return Stepped(
            observations=observations,
            rewards=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            episodes=episodes,
        )

    def close(self) -> None:
        self._inner.close()


class InlineRun:
    """Actors, learners and a plan.

    Args:
        routes: policy by pattern of the agents' names; None for one policy.
    """

    def __init__(
        self,
        algorithm: ClassicAlgorithm,
        settings: Any,
        environment: str,
        *,
        slots: int,
        steps: int,
        actors: int = 1,
        network: NetworkConfig | None = None,
        seed: int = 0,
        agents: tuple[str, ...] = (),
        routes: Mapping[str, str] | None = None,
    ) -> None:
        spaces = GymSlots(environment, 1)
        self.algorithm, self.settings, self.seed = algorithm, settings, seed
        self.learners: dict[str, Learner] = {
            name: algorithm.learner(
                LearnerInputs(
                    observation_space=spaces.observation_space,
                    action_space=spaces.action_space,
                    network=network or NetworkConfig(),
                    settings=settings,
                    seed=seed,
                    policy=name,
                )
            )
            for name in dict.fromkeys((routes or {".*": "policy"}).values())
        }
        self.backend = InlineBackend()
        self.backend.open([Pool(name="actors", size=actors)])

        def make(index: int) -> Actor:
            policies = {name: each.policy for name, each in self.learners.items()}
            ring = [GymSlots(environment, slots, agents)]
            return Actor(ring, policies, steps, routes=routes, index=index)

        self.system: Any = CallSystem(WorkerSet(self.backend, "actors", make), self.learners)
        self.system.kept = CheckpointedObjects()

    def begin(self, boundary: int = 0) -> Iterator[Metrics]:
        """Reset the environments and return the plan."""
        self.system.reset(self.seed * 1000 + boundary)
        return iter(self.algorithm.plan(self.system, self.settings))


def shown(metrics: Metrics) -> dict[str, float]:
    return {name: round(each.value, 3) for name, each in metrics.items()}


__all__ = ["InlineRun", "partial", "shown"]
