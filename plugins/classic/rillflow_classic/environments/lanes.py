"""Lanes: one Gymnasium environment with its one slot, or one multi-agent environment with a slot per agent.

    actions [k] ─> Lane.step ─> the user's environment ─> rows of arrays: observations, rewards, ...

A lane resets itself at the step after the end of its episode.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from rillflow.errors import ConfigError
from rillflow_classic.environments.vector import EnvironmentFailure, SlotsBase, Stepped, array_space
from rillflow_classic.fragment import Array


class Lane(ABC):
    """One environment.

    Args:
        environment: the user's object.
        name: its id, for errors.
        agents: name of the agent of each slot.
        spaces: spaces of an observation and of an action as the environment declares them.
    """

    def __init__(self, environment: Any, name: str, agents: Sequence[str], spaces: tuple[Any, Any]) -> None:
        self._environment, self.name, self.agents = environment, name, agents
        self.observation_space = array_space(spaces[0], f"the observations of {name!r}")
        self.action_space = array_space(spaces[1], f"the actions of {name!r}")
        self._shape, self._dtype = self.observation_space.shape, np.dtype(self.observation_space.dtype)

    @abstractmethod
    def begin(self, seed: int | None, rows: Stepped) -> None:
        """Begin a new episode; None continues the environment's own random numbers."""

    @abstractmethod
    def step(self, actions: Sequence[Any], rows: Stepped) -> None:
        """Step and write the lane's rows, or begin a new episode if the last one has ended."""

    def render(self) -> Array | None:
        """Return a frame [H, W, 3]; None if there is none."""
        try:
            image = np.asarray(self._environment.render())
        except NotImplementedError:
            return None
        return image.astype(np.uint8) if image.ndim == 3 else None

    def close(self) -> None:
        """End the environment."""
        self._environment.close()

    def _array(self, value: Any) -> Array:
        """Return an observation as an array. An assignment alone would broadcast and cast a wrong one."""
        array = np.asarray(value)
        is_of_kind = array.dtype == self._dtype or np.can_cast(array.dtype, self._dtype, "same_kind")
        if is_of_kind and array.shape == self._shape:
            return array
        shape, wanted = list(array.shape), list(self._shape or ())
        raise TypeError(
            f"an observation of {array.dtype} {shape}, but observation_space is {self._dtype} {wanted}"
        )


class GymnasiumLane(Lane):
    """One ``gymnasium.Env`` with its time limit."""

    def __init__(self, environment: gymnasium.Env[Any, Any], name: str) -> None:
        spaces = environment.observation_space, environment.action_space
        super().__init__(environment, name, ("",), spaces)
        self._is_over = True

    def begin(self, seed: int | None, rows: Stepped) -> None:
        """Begin a new episode; see ``Lane.begin``."""
        observation, _ = self._environment.reset(seed=seed)
        rows.observations[0] = self._array(observation)
        rows.rewards[0], rows.terminated[0], rows.truncated[0] = 0.0, False, False
        self._is_over = False

    def step(self, actions: Sequence[Any], rows: Stepped) -> None:
        """Step, or begin a new episode; see ``Lane.step``."""
        if self._is_over:
            self.begin(None, rows)
            return
        observation, reward, terminated, truncated, _ = self._environment.step(actions[0])
        rows.observations[0] = self._array(observation)
        rows.rewards[0], rows.terminated[0], rows.truncated[0] = reward, terminated, truncated
        self._is_over = bool(terminated or truncated)


class ParallelLane(Lane):
    """One multi-agent environment in PettingZoo's parallel form.

    Args:
        environment: has ``possible_agents``, ``observation_space(agent)``, ``action_space(agent)``,
            ``reset(seed)`` and ``step(actions)``.
        name: its id, for errors.
        time_limit: steps after which all agents are truncated; None: never.

    Raises:
        ConfigError: agents have different spaces.
    """

    def __init__(self, environment: Any, name: str, time_limit: int | None = None) -> None:
        self._keys = tuple(environment.possible_agents)
        spaces = [(environment.observation_space(key), environment.action_space(key)) for key in self._keys]
        if any(each != spaces[0] for each in spaces):
            raise ConfigError(
                f"the agents of {name} have different spaces: {dict(zip(self._keys, spaces, strict=True))}",
                why="the slots of an environment share their arrays",
                fix="pad observations and actions to one space in a class of your own",
            )
        super().__init__(environment, name, tuple(map(str, self._keys)), spaces[0])
        self._limit, self._length = time_limit, 0
        self._live: dict[Any, int] = {}

    def begin(self, seed: int | None, rows: Stepped) -> None:
        """Begin a new episode of all agents; see ``Lane.begin``."""
        observations, _ = self._environment.reset(seed=seed)
        self._length, self._live = 0, {key: index for index, key in enumerate(self._keys)}
        rows.rewards[:], rows.terminated[:], rows.truncated[:] = 0.0, False, False
        for key, index in self._live.items():
            rows.observations[index] = self._array(observations[key])

    def step(self, actions: Sequence[Any], rows: Stepped) -> None:
        """Step the agents that have not ended; the rows of the others stay masked; see ``Lane.step``."""
        if not self._live:
            self.begin(None, rows)
            return
        self._length += 1
        chosen = {key: actions[index] for key, index in self._live.items()}
        observations, rewards, terminated, truncated, _ = self._environment.step(chosen)
        rows.rewards[:], rows.terminated[:], rows.truncated[:] = 0.0, False, True
        for key, index in tuple(self._live.items()):
            rows.observations[index] = self._array(observations[key])
            rows.rewards[index], rows.terminated[index] = rewards[key], terminated[key]
            rows.truncated[index] = is_cut = truncated[key] or self._length == self._limit
            if terminated[key] or is_cut:
                del self._live[key]


def lane_seed(seed: int, lane: int) -> int:
    """Return the seed of one environment, from the seed of all and its index."""
    return int(np.random.SeedSequence([seed % 2**63, lane]).generate_state(1)[0] >> 1)


def empty_rows(lane: Lane, num_slots: int) -> Stepped:
    """Return arrays for the results of some slots."""
    space = lane.observation_space
    return Stepped(
        observations=np.zeros((num_slots, *(space.shape or ())), space.dtype),
        rewards=np.zeros(num_slots, np.float32),
        terminated=np.zeros(num_slots, bool),
        truncated=np.zeros(num_slots, bool),
    )


class InlineEnvironment(SlotsBase):
    """Slots of lanes in this process; the boundary to the user's code.

    Args:
        lanes: environments of equal spaces.
        first: index of the first lane among those of all processes; seeds depend on it.
    """

    def __init__(self, lanes: Sequence[Lane], first: int = 0) -> None:
        lane, self._lanes, self._first_lane = lanes[0], lanes, first
        self._width = len(lane.agents)
        agents = tuple(lane.agents) * len(lanes)
        super().__init__(agents, lane.observation_space, lane.action_space, first * self._width)
        self._rows = rows = empty_rows(lane, self.num_slots)
        starts = range(0, self.num_slots, self._width)
        self._parts = [
            Stepped(**{name: each[start : start + self._width] for name, each in vars(rows).items()})
            for start in starts
        ]

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._begun()
        for index, lane in enumerate(self._lanes):
            try:
                lane.begin(lane_seed(seed, self._first_lane + index), self._parts[index])
            except Exception as error:  # the user's class may raise anything
                raise self._failure(index, "reset", error) from error
        return self._rows.observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        actions = self._checked(actions)
        listed = actions.tolist() if actions.ndim == 1 else list(actions)
        width, rows = self._width, self._rows
        for index, lane in enumerate(self._lanes):
            try:
                lane.step(listed[index * width : (index + 1) * width], self._parts[index])
            except Exception as error:  # the user's class may raise anything
                raise self._failure(index, "step", error) from error
        ended = rows.terminated | rows.truncated
        return self._stepped(rows.observations, rows.rewards, rows.terminated, rows.truncated, ended)

    def _failure(self, index: int, method: str, error: Exception) -> EnvironmentFailure:
        place, slot = traceback.extract_tb(error.__traceback__)[-1], self._first + index * self._width
        return EnvironmentFailure(
            f"{self._lanes[index].name}.{method} of slot {slot} failed: {type(error).__name__}: {error}",
            why=f"it raised, or returned a wrong value, at {place.filename}, line {place.lineno}",
            fix="reset returns observation and info; step returns observation, reward, terminated, "
            "truncated and info, as in Gymnasium since 0.26",
        )

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot's environment."""
        return self._lanes[slot // self._width].render()

    def close(self) -> None:
        """End all environments."""
        for lane in self._lanes:
            lane.close()
