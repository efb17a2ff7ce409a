"""Wrappers of whole vector environments: frame stacks, normalisation, clipped rewards. No loop over slots.

environment ─> RewardScale, RewardClip ─> ObservationScale ─> FrameStack ─> actor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError
from rillflow_classic.environments.vector import SlotsBase, Space, Stepped, VectorEnvironment
from rillflow_classic.fragment import Array

_EPSILON = 1e-8
_LARGEST = 10.0


class RunningMoments:
    """Mean and variance of everything that was added, by Chan, Golub and LeVeque (1983).

    Args:
        shape: shape of one value.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape)
        """[...] mean; 0 before the first value."""
        self.squares = np.zeros(shape)
        """[...] sum of squared distances from the mean."""
        self.count = 0.0
        """Number of values."""

    @property
    def variance(self) -> NDArray[np.float64]:
        """[...] variance; 1 before the first two values."""
        return self.squares / self.count if self.count > 1 else np.ones_like(self.squares)

    @property
    def scale(self) -> NDArray[np.float32]:
        """[...] 1 / standard deviation."""
        return (1.0 / np.sqrt(self.variance + _EPSILON)).astype(np.float32)

    def add(self, values: NDArray[Any]) -> None:
        """Add values [B, ...]."""
        if len(values):
            values = values.astype(np.float64, copy=False)
            mean = values.mean(0)
            self._merge(mean, np.square(values - mean).sum(0), float(len(values)))

    def _merge(self, mean: Any, squares: Any, count: float) -> None:
        total = self.count + count
        distance = mean - self.mean
        self.mean = self.mean + distance * (count / total)
        self.squares = self.squares + squares + np.square(distance) * (self.count * count / total)
        self.count = total

    def state(self, name: str) -> dict[str, Array]:
        """Return the moments as arrays under a name."""
        return {f"{name}/{each}": np.array(value) for each, value in vars(self).items()}

    def restore(self, state: Mapping[str, Any], name: str) -> None:
        """Restore what ``state`` returned."""
        self.mean, self.squares = np.array(state[f"{name}/mean"]), np.array(state[f"{name}/squares"])
        self.count = float(state[f"{name}/count"])


def merged_state(states: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the statistics of several environments, each of which saw data of its own, as of one."""
    merged: dict[str, Array] = {}
    for name in {key.rpartition("/")[0] for key in states[0]}:
        total = RunningMoments(states[0][f"{name}/mean"].shape)
        for state in states:
            part = RunningMoments()
            part.restore(state, name)
            if part.count:
                total._merge(part.mean, part.squares, part.count)
        merged |= total.state(name)
    return merged


class _Wrapper(SlotsBase):
    """Passes everything on to an inner environment; adds statistics of its own if they have a name."""

    name = ""
    """Name of the statistics."""

    def __init__(self, inner: VectorEnvironment, space: Space | None = None) -> None:
        super().__init__(inner.agents, space or inner.observation_space, inner.action_space)
        self._inner, self._is_frozen, self._moments = inner, False, RunningMoments()
        self._after_end: NDArray[np.bool_] = np.zeros(inner.num_slots, bool)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._after_end = np.zeros(self.num_slots, bool)
        return self._inner.reset(seed)

    def render(self, slot: int) -> Array | None:
        """Return a frame of a slot."""
        return self._inner.render(slot)

    def state(self) -> Mapping[str, Array]:
        """Return all running statistics."""
        return {**self._inner.state(), **(self._moments.state(self.name) if self.name else {})}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Restore what ``state`` returned; see ``VectorEnvironment.restore``."""
        self._inner.restore(state, frozen=frozen)
        self._is_frozen = frozen
        if self.name:
            self._moments.restore(state, self.name)

    def close(self) -> None:
        """End all environments."""
        self._inner.close()


class RewardScale(_Wrapper):
    """Divides rewards by the running standard deviation of the discounted returns.

    return_t = discount return_{t-1} + reward_t, from 0 at the start of every episode.
    """

    name = "rewards"

    def __init__(self, inner: VectorEnvironment, discount: float) -> None:
        super().__init__(inner)
        self._discount, self._returns = discount, np.zeros(inner.num_slots)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._returns[:] = 0.0
        return super().reset(seed)

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        stepped = self._inner.step(actions)
        self._returns = self._returns * self._discount + stepped.rewards
        if not self._is_frozen:
            self._moments.add(self._returns[~self._after_end])
        self._after_end = stepped.terminated | stepped.truncated
        self._returns[self._after_end] = 0.0
        return replace(stepped, rewards=stepped.rewards * self._moments.scale)


class RewardClip(_Wrapper):
    """Clips rewards to -1 and 1."""

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        stepped = self._inner.step(actions)
        return replace(stepped, rewards=np.clip(stepped.rewards, -1.0, 1.0))


class ObservationScale(_Wrapper):
    """Subtracts the running mean and divides by the running standard deviation; clips to -10 and 10.

    Raises:
        ConfigError: observations are no Box.
    """

    name = "observations"

    def __init__(self, inner: VectorEnvironment) -> None:
        shape = _box(inner.observation_space, "environment.normalise_observations").shape
        super().__init__(inner, gymnasium.spaces.Box(-_LARGEST, _LARGEST, shape, np.float32))
        self._moments = RunningMoments(shape)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        return self._scaled(super().reset(seed), self._after_end)

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        stepped = self._inner.step(actions)
        ended = stepped.terminated | stepped.truncated
        repeated, self._after_end = self._after_end & ended, ended
        return replace(stepped, observations=self._scaled(stepped.observations, repeated))

    def _scaled(self, observations: Any, repeated: NDArray[np.bool_]) -> Array:
        """Add observations to the statistics, but those of agents that have ended, and scale all."""
        if not self._is_frozen:
            self._moments.add(observations[~repeated])
        centred = observations - self._moments.mean.astype(np.float32)
        scaled: Array = np.clip(centred * self._moments.scale, -_LARGEST, _LARGEST)
        return scaled


class FrameStack(_Wrapper):
    """Stacks the last k observations, oldest first; an episode's first one stands k times at its start.

    Every frame is written twice into a ring of 2k places, so that the last k are always adjacent: the stack
    is a view, and no step moves older frames.

    Raises:
        ConfigError: observations are no Box.
    """

    def __init__(self, inner: VectorEnvironment, frames: int) -> None:
        space = _box(inner.observation_space, "environment.frame_stack")
        low, high = (np.repeat(bound[None], frames, 0) for bound in (space.low, space.high))
        super().__init__(inner, gymnasium.spaces.Box(low, high, dtype=space.dtype.type))
        self._frames, self._newest = frames, frames - 1
        self._ring: Any = np.zeros((inner.num_slots, 2 * frames, *space.shape), space.dtype)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._ring[:] = np.expand_dims(super().reset(seed), 1)
        return self._stack()

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        stepped = self._inner.step(actions)
        self._newest = (self._newest + 1) % self._frames
        self._ring[:, self._newest] = self._ring[:, self._newest + self._frames] = stepped.observations
        if self._after_end.any():
            self._ring[self._after_end] = stepped.observations[self._after_end][:, None]
        self._after_end = stepped.terminated | stepped.truncated
        return replace(stepped, observations=self._stack())

    def _stack(self) -> Array:
        stack: Array = self._ring[:, self._newest + 1 : self._newest + 1 + self._frames]
        return stack


def _box(space: Space, setting: str) -> gymnasium.spaces.Box:
    if isinstance(space, gymnasium.spaces.Box):
        return space
    why, fix = "only arrays of numbers have a mean or a stack", f"leave out {setting}"
    raise ConfigError(f"{setting} is set, and observations are {space}", why=why, fix=fix)
