"""Lanes: one Gymnasium environment with its one slot, or one multi-agent environment with a slot per agent.

    actions [k] ─> Lane.step ─> environment ─> rows of the shared arrays: observations, rewards, ...

A lane resets itself at the step after the end of its episode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError
from rillflow_classic.environments.spaces import array_space
from rillflow_classic.environments.vector import EnvironmentFailure, Space
from rillflow_classic.fragment import Array


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Arrays of k slots that a step writes."""

    observations: Array
    """[k, ...] observation after the step."""
    rewards: NDArray[np.float32]
    """[k] float32."""
    terminated: NDArray[np.bool_]
    """[k] bool."""
    truncated: NDArray[np.bool_]
    """[k] bool."""

    @classmethod
    def zeros(cls, space: Space, num_slots: int) -> Rows:
        """Make rows for observations of a space."""
        return cls(
            observations=np.zeros((num_slots, *(space.shape or ())), space.dtype),
            rewards=np.zeros(num_slots, np.float32),
            terminated=np.zeros(num_slots, bool),
            truncated=np.zeros(num_slots, bool),
        )

    def part(self, first: int, count: int) -> Rows:
        """Return the rows of ``count`` slots, as views."""
        chosen = slice(first, first + count)
        return Rows(
            observations=self.observations[chosen],
            rewards=self.rewards[chosen],
            terminated=self.terminated[chosen],
            truncated=self.truncated[chosen],
        )


class Lane(Protocol):
    """One environment."""

    agents: Sequence[str]
    """Name of the agent of each of its slots."""
    observation_space: Space
    """Space of one slot's observation."""
    action_space: Space
    """Space of one slot's action."""

    def begin(self, seed: int | None, rows: Rows) -> None:
        """Begin a new episode; None continues the environment's own random numbers."""

    def step(self, actions: Sequence[Any], rows: Rows) -> None:
        """Step, or begin a new episode if the last one has ended."""

    def render(self) -> Array | None:
        """Return a frame [H, W, 3]; None if there is none."""

    def close(self) -> None:
        """End the environment."""


class _Checked:
    """Calls the user's environment, and checks the arrays that it returns."""

    def __init__(self, name: str, slot: int) -> None:
        self.name, self.slot = name, slot

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of the environment; an exception becomes EnvironmentFailure."""
        try:
            return method(*arguments, **options)
        except EnvironmentFailure:
            raise
        except Exception as error:  # the user's class may raise anything
            place = _last_line(error)
            raise EnvironmentFailure(
                f"{self.name}.{method.__name__} of slot {self.slot} raised {type(error).__name__}: {error}",
                why=f"it was called with {_short(arguments)}{place}",
                fix="correct the environment; a fault in one step ends the run",
            ) from error

    def frame(self, render: Callable[[], Any]) -> Array | None:
        """Return what ``render`` draws, None for anything but an image."""
        image = np.asarray(self.call(render))
        return image.astype(np.uint8) if image.ndim == 3 and image.dtype.kind in "uif" else None

    def observation(self, value: Any, space: Space, method: str) -> Array:
        """Return an observation as an array of the space's shape, or raise EnvironmentFailure."""
        array = np.asarray(value)
        if array.shape == space.shape and np.can_cast(array.dtype, space.dtype or float, "same_kind"):
            return array
        raise EnvironmentFailure(
            f"{self.name}.{method} of slot {self.slot} returned an observation of "
            f"{array.dtype} {list(array.shape)}",
            why=f"its observation space is {space.dtype} {list(space.shape or ())}",
            fix="return observations of the declared observation_space",
        )

    def five(self, value: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return the five values of a step, or raise EnvironmentFailure."""
        if isinstance(value, tuple) and len(value) == 5:
            return value
        raise self.malformed("step", value, "observation, reward, terminated, truncated, info")

    def two(self, value: Any) -> tuple[Any, Any]:
        """Return the two values of a reset, or raise EnvironmentFailure."""
        if isinstance(value, tuple) and len(value) == 2:
            return value
        raise self.malformed("reset", value, "observation, info")

    def malformed(self, method: str, value: Any, wanted: str) -> EnvironmentFailure:
        """Return the error of a method that returned something else than it must."""
        return EnvironmentFailure(
            f"{self.name}.{method} of slot {self.slot} returned {_short(value)}",
            why=f"it must return {wanted}",
            fix="follow Gymnasium's interface since 0.26; older environments return four values",
        )

    def reward(self, value: Any) -> float:
        """Return a reward as a finite number, or raise EnvironmentFailure."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise self.malformed("step", value, "a finite number as its reward")


class GymnasiumLane:
    """One Gymnasium environment.

    Args:
        environment: the environment, with its time limit.
        name: its id, for errors.
        slot: its slot, for errors.
        shows: whether it renders frames.
    """

    agents: Sequence[str] = ("",)

    def __init__(
        self, environment: gymnasium.Env[Any, Any], name: str, slot: int = 0, *, shows: bool = False
    ) -> None:
        self._shows = shows
        self._environment, self._checked = environment, _Checked(name, slot)
        self.observation_space = array_space(environment.observation_space, name)
        self.action_space: Space = environment.action_space
        self._is_over = True

    def begin(self, seed: int | None, rows: Rows) -> None:
        """Begin a new episode; see ``Lane.begin``."""
        observation, _ = self._checked.two(self._checked.call(self._environment.reset, seed=seed))
        self._write(observation, rows, "reset")
        rows.rewards[0], rows.terminated[0], rows.truncated[0] = 0.0, False, False
        self._is_over = False

    def step(self, actions: Sequence[Any], rows: Rows) -> None:
        """Step, or begin a new episode; see ``Lane.step``."""
        if self._is_over:
            self.begin(None, rows)
            return
        result = self._checked.call(self._environment.step, actions[0])
        observation, reward, terminated, truncated, _ = self._checked.five(result)
        self._write(observation, rows, "step")
        rows.rewards[0] = self._checked.reward(reward)
        rows.terminated[0], rows.truncated[0] = terminated, truncated
        self._is_over = bool(terminated or truncated)

    def _write(self, observation: Any, rows: Rows, method: str) -> None:
        rows.observations[0] = self._checked.observation(observation, self.observation_space, method)

    def render(self) -> Array | None:
        """Return a frame; see ``Lane.render``."""
        return self._checked.frame(self._environment.render) if self._shows else None

    def close(self) -> None:
        """End the environment."""
        self._environment.close()


class ParallelLane:
    """One multi-agent environment in PettingZoo's parallel form.

    Args:
        environment: has ``possible_agents``, ``observation_space(agent)``, ``action_space(agent)``,
            ``reset(seed)`` and ``step(actions)``.
        name: its id, for errors.
        slot: its first slot, for errors.
        time_limit: steps after which all agents are truncated.
        shows: whether it renders frames.

    Raises:
        ConfigError: agents have different spaces.
    """

    def __init__(
        self,
        environment: Any,
        name: str,
        slot: int = 0,
        *,
        time_limit: int | None = None,
        shows: bool = False,
    ) -> None:
        self._shows = shows
        self._environment, self._checked = environment, _Checked(name, slot)
        self.agents: Sequence[str] = tuple(map(str, environment.possible_agents))
        self._keys = tuple(environment.possible_agents)
        observations = [environment.observation_space(agent) for agent in self._keys]
        actions = [environment.action_space(agent) for agent in self._keys]
        for agent, seen, done in zip(self.agents, observations, actions, strict=True):
            if seen != observations[0] or done != actions[0]:
                raise ConfigError(
                    f"agents {self.agents[0]!r} and {agent!r} of {name} have different spaces: "
                    f"{observations[0]}, {actions[0]} and {seen}, {done}",
                    why="the slots of an environment share their arrays",
                    fix="pad observations and actions to one space in a class of your own",
                )
        self.observation_space = array_space(observations[0], name)
        self.action_space: Space = actions[0]
        self._limit, self._length, self._live = time_limit, 0, frozenset[Any]()
        self._last: list[Any] = [None] * len(self._keys)

    def begin(self, seed: int | None, rows: Rows) -> None:
        """Begin a new episode of all agents; see ``Lane.begin``."""
        observations, _ = self._checked.two(self._checked.call(self._environment.reset, seed=seed))
        if not isinstance(observations, Mapping) or not observations.keys() >= set(self._keys):
            raise self._checked.malformed("reset", observations, f"an observation of each of {self._keys}")
        self._length, self._live = 0, frozenset(self._keys)
        rows.rewards[:], rows.terminated[:], rows.truncated[:] = 0.0, False, False
        for index, agent in enumerate(self._keys):
            rows.observations[index] = self._seen(observations[agent], "reset")

    def step(self, actions: Sequence[Any], rows: Rows) -> None:
        """Step the agents that have not ended; see ``Lane.step``."""
        if not self._live:
            self.begin(None, rows)
            return
        self._length += 1
        chosen = {agent: actions[i] for i, agent in enumerate(self._keys) if agent in self._live}
        result = self._checked.five(self._checked.call(self._environment.step, chosen))
        for value in result[:4]:
            if not isinstance(value, Mapping):
                raise self._checked.malformed("step", result, "five dicts by agent")
        self._write(result, rows)

    def _write(self, result: tuple[Any, ...], rows: Rows) -> None:
        observations, rewards, terminated, truncated, _ = result
        is_late = self._limit is not None and self._length >= self._limit
        ended = set()
        for index, agent in enumerate(self._keys):
            if agent not in self._live:
                rows.rewards[index], rows.terminated[index], rows.truncated[index] = 0.0, False, True
                rows.observations[index] = self._last[index]
                continue
            if agent not in observations or agent not in rewards:
                raise self._checked.malformed(
                    "step", sorted(map(str, observations)), f"an observation and a reward of {agent!r}"
                )
            rows.observations[index] = self._last[index] = self._seen(observations[agent], "step")
            rows.rewards[index] = self._checked.reward(rewards[agent])
            rows.terminated[index] = bool(terminated.get(agent, False))
            rows.truncated[index] = bool(truncated.get(agent, False)) or is_late
            if rows.terminated[index] or rows.truncated[index]:
                ended.add(agent)
        self._live -= ended

    def _seen(self, value: Any, method: str) -> Array:
        return self._checked.observation(value, self.observation_space, method)

    def render(self) -> Array | None:
        """Return a frame; see ``Lane.render``."""
        return self._checked.frame(self._environment.render) if self._shows else None

    def close(self) -> None:
        """End the environment."""
        self._environment.close()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _last_line(error: Exception) -> str:
    """Return the file and line that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"; {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"
