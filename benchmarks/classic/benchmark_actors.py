"""Actors and learners of the benchmark of operators: idle ones, and those that learn CartPole."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import Stepped
from rillflow_classic.fragment import Array
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.policy import Acted, Learner, Weights
from rillflow_classic.workers.actor import Actor

CARTPOLE = EnvironmentSettings(id="CartPole-v1")


class StillEnvironment:
    """Does nothing."""

    num_slots = 1
    agents = ("",)
    absent = np.zeros(1, np.bool_)
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        no, zero = np.zeros(1, np.bool_), np.zeros(1, np.float32)
        self._stepped = Stepped(
            observations=np.zeros((1, 4), np.float32), rewards=zero, terminated=no, truncated=no
        )

    def reset(self, seed: int) -> Array:
        del seed
        return self._stepped.observations

    def step(self, actions: Array) -> Stepped:
        del actions
        return self._stepped

    def close(self) -> None:
        """Nothing is open."""


class StillPolicy:
    """Takes action 0."""

    version = -1

    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        del state, greedy
        return Acted(actions=np.zeros(len(observations), np.int64))

    def initial_state(self, num_slots: int) -> Array | None:
        """There is none."""

    def seed(self, seed: int) -> None:
        """There are no random numbers."""

    def load(self, version: int, weights: Weights) -> None:
        del weights
        self.version = version


class StillLearner:
    """Learns nothing."""

    def __init__(self) -> None:
        self.version, self.policy = 0, StillPolicy()

    def update(self, data: Any) -> dict[str, Any]:
        del data
        self.version += 1
        return {}

    def weights(self) -> Weights:
        return {"weight": np.zeros((64, 64), np.float32)}


def still_actor(slots: int, steps: int, index: int) -> Actor:
    """Return an actor whose policy does nothing; with 0 slots the environment does nothing either."""
    environment: Any = make_environment(CARTPOLE, slots, seed=index) if slots else StillEnvironment()
    return Actor([environment], {"policy": StillPolicy()}, steps, index=index)


def learner_of(name: str) -> Learner:
    """Return a new learner of an algorithm for CartPole."""
    environment = make_environment(CARTPOLE, 1)
    found = algorithm_of(name)
    inputs = LearnerInputs(
        observation_space=environment.observation_space,
        action_space=environment.action_space,
        network=NetworkConfig(),
        settings=settings_of(name),
        seed=1,
    )
    return found.learner(inputs)


def settings_of(name: str) -> Any:
    """Return the settings of an algorithm; replay begins early."""
    found = algorithm_of(name).config
    run = {"name": name, "steps": 1, "learning_starts": 64, "batch_size": 32}
    return found(**{key: value for key, value in run.items() if key in found.model_fields})


def learning_actor(name: str, slots: int, steps: int, index: int) -> Actor:
    """Return an actor that acts with the policy of an algorithm."""
    environment, learner = make_environment(CARTPOLE, slots, seed=index), learner_of(name)
    policies, learners = {"policy": learner.policy}, {"policy": learner}
    return Actor([environment], policies, steps, index=index, seed=index, learners=learners)
