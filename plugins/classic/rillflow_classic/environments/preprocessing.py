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
from rillflow_classic.environments.vector import Space, Stepped
from rillflow_classic.fragment import Array

DISCOUNT = 0.99
"""Discount of the returns whose deviation divides rewards."""
_EPSILON = 1e-8
LARGEST = 10.0


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
        """[...] 1 / standard deviation; 1 while all values are equal."""
        variance = self.squares / max(self.count, 1.0)
        scale: NDArray[np.float32] = np.where(variance > 0, 1.0 / np.sqrt(variance + _EPSILON), 1.0)
        return scale.astype(np.float32)

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


class Preprocessing:
    """Changes observations and rewards of all slots as the settings say.

    Scaled observations are clipped to -10 and 10. Stacks go from the oldest observation to the newest; an
    episode's first one stands k times at its start.

    Args:
        config: settings.
        frames: observations in each one, k.
        num_slots: number of slots N.
        space: space of an observation.

    Raises:
        ConfigError: observations are no Box.
    """

    def __init__(self, config: EnvironmentSettings, frames: int, num_slots: int, space: Space) -> None:
        self._clips, self._is_frozen, self._frames, self._newest = config.clip_rewards, False, frames, 0
        self._moments = {"rewards": RunningMoments()} if config.normalise_rewards else {}
        self._returns, self._after_end = np.zeros(num_slots), np.zeros(num_slots, bool)
        if config.normalise_observations:
            shape = _box(space, "environment.normalise_observations").shape
            self._moments["observations"] = RunningMoments(shape)
            space = gymnasium.spaces.Box(-LARGEST, LARGEST, shape, np.float32)
        if frames > 1:
            box = _box(space, "environment.frame_stack")
            self._ring = np.zeros((num_slots, 2 * frames, *box.shape), box.dtype)
            low, high = (np.repeat(bound[None], frames, 0) for bound in (box.low, box.high))
            space = gymnasium.spaces.Box(low, high, dtype=box.dtype.type)
        self.observation_space = space
        """Space of an observation after the changes."""

    def first(self, observations: Array, absent: NDArray[np.bool_]) -> Array:
        """Return the first observations of new episodes; slots that are ``absent`` [N] have no agent yet."""
        self._returns[:], self._after_end[:] = 0.0, True  # so that every stack begins
        found = self._observed(observations, absent)
        self._after_end = absent.copy()
        return found

    def seen(self, observations: Array, begins: NDArray[np.bool_]) -> Array:
        """Return observations as a network sees them; ``begins`` are the slots [N] of a new episode."""
        self._after_end = begins
        return self._observed(observations, np.zeros_like(begins))

    def changed(self, rows: Stepped, ended: NDArray[np.bool_]) -> Stepped:
        """Return a step with its changes; ``ended`` are the slots [N] that it ended."""
        rewards = rows.rewards
        if moments := self._moments.get("rewards"):
            self._returns = self._returns * DISCOUNT + rewards
            if not self._is_frozen:
                moments.add(self._returns[~self._after_end])
            self._returns[ended] = 0.0
            rewards = rewards * moments.scale
        if self._clips:
            rewards = np.clip(rewards, -1.0, 1.0)
        observations = self._observed(rows.observations, self._after_end & ended)
        self._after_end = ended
        return replace(rows, observations=observations, rewards=rewards)

    def _observed(self, observations: Array, repeated: NDArray[np.bool_]) -> Array:
        """Scale and stack observations.

        Every frame is written twice into a ring of 2k places, so that the last k are always adjacent: the
        stack is a view, and no step moves older frames.
        """
        if moments := self._moments.get("observations"):
            if not self._is_frozen:
                moments.add(observations[~repeated])
            centred = observations - moments.mean.astype(np.float32)
            observations = np.clip(centred * moments.scale, -LARGEST, LARGEST)
        if self._frames < 2:
            return observations
        self._newest = newest = (self._newest + 1) % self._frames
        self._ring[:, newest] = self._ring[:, newest + self._frames] = observations
        if self._after_end.any():
            self._ring[self._after_end] = observations[self._after_end][:, None]
        stack: Array = self._ring[:, newest + 1 : newest + 1 + self._frames]
        return stack

    def state(self) -> Mapping[str, Array]:
        """Return the running statistics by name."""
        both = self._moments.items()
        return {
            f"{name}.{part}": np.array(value) for name, each in both for part, value in vars(each).items()
        }

    def restore(self, state: Mapping[str, Array], *, frozen: bool) -> None:
        """Restore what ``state`` returned; frozen statistics change no more."""
        self._is_frozen = frozen
        for name, moments in self._moments.items():
            vars(moments).update({part: np.array(state[f"{name}.{part}"]) for part in vars(moments)})


def _box(space: Space, setting: str) -> gymnasium.spaces.Box:
    if isinstance(space, gymnasium.spaces.Box):
        return space
    why, fix = "only arrays of numbers have a mean or a stack", f"leave out {setting}"
    raise ConfigError(f"{setting} is set, and observations are {space}", why=why, fix=fix)
