"""Lanes: one Gymnasium environment with its one slot, or one multi-agent environment with a slot per agent.

    actions [k] ─> Lane.step ─> the user's environment ─> rows of arrays: observations, rewards, ...

A lane resets itself at the step after the end of its episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError, RillflowError
from rillflow_classic.environments.vector import (
    ActionCheck,
    EnvironmentFailure,
    EpisodeTotals,
    SlotsBase,
    Space,
    Stepped,
    array_space,
    check_finite,
)
from rillflow_classic.fragment import Array


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Arrays of k slots that a step writes."""

    observations: Array
    """[k, ...] observation after the step."""
    rewards: NDArray[np.float32]
    """[k] float32."""
    terminated: NDArray[np.bool_]
    """[k] bool."""
    truncated: NDArray[np.bool_]
    """[k] bool."""

    def part(self, chosen: slice) -> StepRows:
        """Return the rows of some slots, as views."""
        return StepRows(**{name: array[chosen] for name, array in vars(self).items()})


class Lane:
    """One environment.

    Args:
        environment: the user's object.
        name: its id, for errors.
        agents: name of the agent of each slot.
        spaces: space of an observation as the environment declares it, and of an action.
        shows: whether it renders frames.
    """

    def __init__(
        self, environment: Any, name: str, agents: Sequence[str], spaces: tuple[Any, Space], *, shows: bool
    ) -> None:
        self._environment, self.name, self._shows = environment, name, shows
        self.agents, self.action_space = agents, spaces[1]
        self.observation_space = array_space(spaces[0], name)
        self._shape, self._dtype = self.observation_space.shape or (), np.dtype(self.observation_space.dtype)

    def begin(self, seed: int | None, rows: StepRows) -> None:
        """Begin a new episode; None continues the environment's own random numbers."""
        raise NotImplementedError

    def step(self, actions: Sequence[Any], rows: StepRows) -> None:
        """Step, or begin a new episode if the last one has ended."""
        raise NotImplementedError

    def render(self) -> Array | None:
        """Return a frame [H, W, 3]; None if there is none."""
        image = np.asarray(self._environment.render()) if self._shows else np.empty(0)
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
        raise TypeError(
            f"an observation of {array.dtype} {list(array.shape)}, but observation_space is {self._dtype} "
            f"{list(self._shape)}"
        )


class GymnasiumLane(Lane):
    """One ``gymnasium.Env`` with its time limit."""

    def __init__(self, environment: gymnasium.Env[Any, Any], name: str, *, shows: bool = False) -> None:
        actions: Any = environment.action_space
        if isinstance(actions, gymnasium.spaces.Discrete) and (start := actions.start):
            actions = gymnasium.spaces.Discrete(int(actions.n))
            environment = gymnasium.wrappers.TransformAction(
                environment, lambda action: action + start, actions
            )
        spaces = environment.observation_space, actions
        super().__init__(environment, name, ("",), spaces, shows=shows)
        self._is_over = True

    def begin(self, seed: int | None, rows: StepRows) -> None:
        """Begin a new episode; see ``Lane.begin``."""
        observation, _ = self._environment.reset(seed=seed)
        rows.observations[0] = self._array(observation)
        rows.rewards[0], rows.terminated[0], rows.truncated[0] = 0.0, False, False
        self._is_over = False

    def step(self, actions: Sequence[Any], rows: StepRows) -> None:
        """Step, or begin a new episode; see ``Lane.step``."""
        if self._is_over:
            return self.begin(None, rows)
        observation, reward, terminated, truncated, _ = self._environment.step(actions[0])
        rows.observations[0] = self._array(observation)
        rows.rewards[0], rows.terminated[0], rows.truncated[0] = reward, terminated, truncated
        self._is_over = bool(terminated or truncated)
        return None


class ParallelLane(Lane):
    """One multi-agent environment in PettingZoo's parallel form.

    Args:
        environment: has ``possible_agents``, ``observation_space(agent)``, ``action_space(agent)``,
            ``reset(seed)`` and ``step(actions)``.
        name: its id, for errors.
        time_limit: steps after which all agents are truncated; None: never.
        shows: whether it renders frames.

    Raises:
        ConfigError: agents have different spaces.
    """

    def __init__(
        self, environment: Any, name: str, *, time_limit: int | None = None, shows: bool = False
    ) -> None:
        self._keys = tuple(environment.possible_agents)
        spaces = [(environment.observation_space(key), environment.action_space(key)) for key in self._keys]
        if other := [index for index, each in enumerate(spaces) if each != spaces[0]]:
            raise ConfigError(
                f"agents {self._keys[0]!r} and {self._keys[other[0]]!r} of {name} have different spaces: "
                f"{spaces[0]} and {spaces[other[0]]}",
                why="the slots of an environment share their arrays",
                fix="pad observations and actions to one space in a class of your own",
            )
        super().__init__(environment, name, tuple(map(str, self._keys)), spaces[0], shows=shows)
        self._limit, self._length, self._live = time_limit, 0, set[Any]()
        self._last: list[Any] = [None] * len(self._keys)

    def begin(self, seed: int | None, rows: StepRows) -> None:
        """Begin a new episode of all agents; see ``Lane.begin``."""
        observations, _ = self._environment.reset(seed=seed)
        self._length, self._live = 0, set(self._keys)
        rows.rewards[:], rows.terminated[:], rows.truncated[:] = 0.0, False, False
        for index, key in enumerate(self._keys):
            rows.observations[index] = self._array(observations[key])

    def step(self, actions: Sequence[Any], rows: StepRows) -> None:
        """Step the agents that have not ended, and mask the others; see ``Lane.step``."""
        if not self._live:
            return self.begin(None, rows)
        self._length += 1
        chosen = {key: actions[index] for index, key in enumerate(self._keys) if key in self._live}
        observations, rewards, terminated, truncated, _ = self._environment.step(chosen)
        is_late = self._limit is not None and self._length >= self._limit
        for index, key in enumerate(self._keys):
            if key in self._live:
                self._last[index] = self._array(observations[key])
                rows.rewards[index], rows.terminated[index] = rewards[key], terminated[key]
                rows.truncated[index] = truncated[key] or is_late
            else:
                rows.rewards[index], rows.terminated[index], rows.truncated[index] = 0.0, False, True
            rows.observations[index] = self._last[index]
            if rows.terminated[index] or rows.truncated[index]:
                self._live.discard(key)
        return None


class LaneGroup:
    """Lanes of equal spaces that write adjacent rows; the boundary to the user's code.

    Args:
        lanes: the environments.
        first: index of the first one among all of the vector environment; seeds depend on it.
    """

    def __init__(self, lanes: Sequence[Lane], first: int = 0) -> None:
        self.lanes, self._first, self._width = lanes, first, len(lanes[0].agents)

    def split(self, rows: StepRows) -> list[StepRows]:
        """Return the rows of each lane, as views."""
        bounds = range(0, len(self.lanes) * self._width, self._width)
        return [rows.part(slice(first, first + self._width)) for first in bounds]

    def begin(self, seed: int, rows: Sequence[StepRows]) -> None:
        """Begin a new episode in every lane."""
        for index, lane in enumerate(self.lanes):
            try:
                lane.begin(lane_seed(seed, self._first + index), rows[index])
            except Exception as error:  # the user's class may raise anything
                raise self._failure(index, "reset", error) from error

    def step(self, actions: Array, rows: Sequence[StepRows]) -> None:
        """Step every lane.

        Raises:
            EnvironmentFailure: an environment raised, or returned something else than it must.
        """
        listed = actions.tolist() if actions.ndim == 1 else list(actions)
        width = self._width
        for index, lane in enumerate(self.lanes):
            try:
                lane.step(listed[index * width : (index + 1) * width], rows[index])
            except Exception as error:  # the user's class may raise anything
                raise self._failure(index, "step", error) from error

    def _failure(self, index: int, method: str, error: Exception) -> RillflowError:
        trace, slot = error.__traceback__, (self._first + index) * self._width
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}" if trace is not None else ""
        return EnvironmentFailure(
            f"{self.lanes[index].name}.{method} of slot {slot} failed: {type(error).__name__}: {error}",
            why=f"it raised, or returned something else than it must, at {place}",
            fix="reset returns observation and info; step returns observation, reward, terminated, "
            "truncated and info, as in Gymnasium since 0.26",
        )


def lane_seed(seed: int, lane: int) -> int:
    """Return the seed of one environment, from the seed of all and its index."""
    return int(np.random.SeedSequence([seed % 2**63, lane]).generate_state(1)[0] >> 1)


class LaneSlots(SlotsBase):
    """Base of environments made of lanes, here or in processes.

    Args:
        lane: one of them.
        num_lanes: number of lanes.
        clip: whether continuous actions are clipped to their bounds.
    """

    def __init__(self, lane: Lane, num_lanes: int, *, clip: bool) -> None:
        super().__init__(tuple(lane.agents) * num_lanes, lane.observation_space, lane.action_space)
        self._check = ActionCheck(self.action_space, self.num_slots, clip=clip)
        self._totals = EpisodeTotals(self.num_slots)
        self._is_real = np.issubdtype(self.observation_space.dtype, np.floating)

    def _stepped(self, rows: StepRows) -> Stepped:
        """Check rows that were written and return them, with the episodes that ended."""
        if self._is_real and not math.isfinite(np.add.reduce(rows.observations, axis=None)):
            check_finite(rows.observations, "observation")
        episodes = self._totals.add(rows.rewards, rows.terminated | rows.truncated)
        return Stepped(**vars(rows), episodes=episodes)


def zero_rows(lane: Lane, num_slots: int) -> StepRows:
    """Return rows for a lane's observations."""
    space = lane.observation_space
    return StepRows(
        observations=np.zeros((num_slots, *(space.shape or ())), space.dtype),
        rewards=np.zeros(num_slots, np.float32),
        terminated=np.zeros(num_slots, bool),
        truncated=np.zeros(num_slots, bool),
    )


class InlineEnvironment(LaneSlots):
    """Slots of lanes in this process.

    Args:
        lanes: environments of equal spaces.
        clip: whether continuous actions are clipped to their bounds.
    """

    def __init__(self, lanes: Sequence[Lane], *, clip: bool = True) -> None:
        super().__init__(lanes[0], len(lanes), clip=clip)
        self._group, self._rows = LaneGroup(lanes), zero_rows(lanes[0], self.num_slots)
        self._parts = self._group.split(self._rows)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._totals.clear()
        self._group.begin(seed, self._parts)
        return self._rows.observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        self._group.step(self._check(actions), self._parts)
        return self._stepped(self._rows)

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot's environment."""
        return self._group.lanes[slot * len(self._group.lanes) // self.num_slots].render()

    def close(self) -> None:
        """End all environments."""
        for lane in self._group.lanes:
            lane.close()
