"""Preprocessing of all slots at once: scaled and clipped rewards, scaled and stacked observations.

    rewards ────── / deviation of discounted returns ── clip ────────> rewards
    observations ─ (- mean) / deviation ── the last k as one ────────> observations

The row after an end only resets: its reward is no sample of the returns, and an agent that ended before the
others repeats its observation, which is no sample either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.vector import Stepped, VectorEnvironment
from rillflow_classic.fragment import Array

DISCOUNT = 0.99
"""Discount of the returns whose deviation divides rewards."""
_EPSILON = 1e-8
_LARGEST = 10.0


class RunningMoments:
    """Mean and variance of everything that was added, by Chan, Golub and LeVeque (1983).

    Args:
        shape: shape of one value.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean: Any = np.zeros(shape)
        """[...] mean; 0 before the first value."""
        self.squares: Any = np.zeros(shape)
        """[...] sum of squared distances from the mean."""
        self.count: Any = 0.0
        """Number of values."""

    @property
    def scale(self) -> NDArray[np.float32]:
        """[...] 1 / standard deviation; 1 before the first two values."""
        variance = self.squares / self.count if self.count > 1 else np.ones_like(self.squares)
        scale: NDArray[np.float32] = (1.0 / np.sqrt(variance + _EPSILON)).astype(np.float32)
        return scale

    def add(self, values: NDArray[Any]) -> None:
        """Add values [B, ...]; a third of the time of Gymnasium's RunningMeanStd."""
        if not (count := len(values)):
            return
        values = values.astype(np.float64, copy=False)
        mean, total = values.mean(0), self.count + count
        distance = mean - self.mean
        self.squares = self.squares + np.square(values - mean).sum(0)
        self.squares += np.square(distance) * (self.count * count / total)
        self.mean, self.count = self.mean + distance * (count / total), total


class Preprocessed(VectorEnvironment):
    """A vector environment whose observations and rewards are changed as its settings say.

    Scaled observations are clipped to -10 and 10. Stacks go from the oldest observation to the newest; an
    episode's first one stands k times at its start.

    Args:
        inner: the environment.
        config: settings.
        frames: observations in each one, k.

    Raises:
        ConfigError: observations are no Box.
    """

    def __init__(self, inner: VectorEnvironment, config: EnvironmentSettings, frames: int) -> None:
        self.agents, self.num_slots = inner.agents, inner.num_slots
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self._inner, self._clips, self._is_frozen = inner, config.clip_rewards, False
        self._moments = {"rewards": RunningMoments()} if config.normalise_rewards else {}
        self._returns, self._after_end = np.zeros(inner.num_slots), np.zeros(inner.num_slots, bool)
        if config.normalise_observations:
            shape = self._box("environment.normalise_observations").shape
            self._moments["observations"] = RunningMoments(shape)
            self.observation_space = gymnasium.spaces.Box(-_LARGEST, _LARGEST, shape, np.float32)
        self._frames, self._newest, self._ring = frames, 0, np.zeros(0)
        if frames > 1:
            space = self._box("environment.frame_stack")
            low, high = (np.repeat(bound[None], frames, 0) for bound in (space.low, space.high))
            self.observation_space = gymnasium.spaces.Box(low, high, dtype=space.dtype.type)
            self._ring = np.zeros((inner.num_slots, 2 * frames, *space.shape), space.dtype)

    def _box(self, setting: str) -> gymnasium.spaces.Box:
        if isinstance(space := self.observation_space, gymnasium.spaces.Box):
            return space
        why, fix = "only arrays of numbers have a mean or a stack", f"leave out {setting}"
        raise ConfigError(f"{setting} is set, and observations are {space}", why=why, fix=fix)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._returns[:], self._after_end = 0.0, np.ones(self.num_slots, bool)  # so that every stack begins
        observations = self._observed(self._inner.reset(seed), np.zeros(self.num_slots, bool))
        self._after_end = np.zeros(self.num_slots, bool)
        return observations

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        stepped = self._inner.step(actions)
        ended, rewards = stepped.terminated | stepped.truncated, stepped.rewards
        if moments := self._moments.get("rewards"):
            self._returns = self._returns * DISCOUNT + rewards
            if not self._is_frozen:
                moments.add(self._returns[~self._after_end])
            self._returns[ended] = 0.0
            rewards = rewards * moments.scale
        if self._clips:
            rewards = np.clip(rewards, -1.0, 1.0)
        observations = self._observed(stepped.observations, self._after_end & ended)
        self._after_end = ended
        return replace(stepped, observations=observations, rewards=rewards)

    def _observed(self, observations: Array, repeated: NDArray[np.bool_]) -> Array:
        """Scale and stack observations.

        Every frame is written twice into a ring of 2k places, so that the last k are always adjacent: the
        stack is a view, and no step moves older frames.
        """
        if moments := self._moments.get("observations"):
            if not self._is_frozen:
                moments.add(observations[~repeated])
            centred = observations - moments.mean.astype(np.float32)
            observations = np.clip(centred * moments.scale, -_LARGEST, _LARGEST)
        if self._frames < 2:
            return observations
        self._newest = newest = (self._newest + 1) % self._frames
        self._ring[:, newest] = self._ring[:, newest + self._frames] = observations
        if self._after_end.any():
            self._ring[self._after_end] = observations[self._after_end][:, None]
        stack: Array = self._ring[:, newest + 1 : newest + 1 + self._frames]
        return stack

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot."""
        return self._inner.render(slot)

    def state(self) -> Mapping[str, Array]:
        """Return the running statistics."""
        both = self._moments.items()
        return {
            f"{name}/{part}": np.array(value) for name, each in both for part, value in vars(each).items()
        }

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Restore what ``state`` returned; see ``VectorEnvironment.restore``."""
        self._is_frozen = frozen
        for name, moments in self._moments.items():
            vars(moments).update({part: np.array(state[f"{name}/{part}"]) for part in vars(moments)})

    def close(self) -> None:
        """End all environments."""
        self._inner.close()
