"""Wrappers of whole vector environments: frame stacks, normalisation, clipped rewards. No loop over slots.

environment ─> RewardScale, RewardClip ─> ObservationScale ─> FrameStack ─> actor
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError
from rillflow_classic.environments.vector import Space, Stepped, VectorEnvironment
from rillflow_classic.fragment import Array

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
        self.count = 0.0
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

    def state(self, name: str) -> dict[str, Array]:
        """Return the moments as arrays under a name."""
        return {f"{name}/{each}": np.array(value) for each, value in vars(self).items()}

    def restore(self, state: Mapping[str, Any], name: str) -> None:
        """Restore what ``state`` returned."""
        self.mean, self.squares = np.array(state[f"{name}/mean"]), np.array(state[f"{name}/squares"])
        self.count = float(state[f"{name}/count"])


class _Wrapper:
    """Passes everything on to an inner environment; adds statistics of its own if they have a name."""

    name = ""
    """Name of the statistics."""

    def __init__(self, inner: VectorEnvironment, space: Space | None = None) -> None:
        self.agents, self.num_slots = inner.agents, inner.num_slots
        self.observation_space, self.action_space = space or inner.observation_space, inner.action_space
        self._inner, self._is_frozen, self._moments = inner, False, RunningMoments()
        self._after_end: NDArray[np.bool_] = np.zeros(inner.num_slots, bool)

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; see ``VectorEnvironment.reset``."""
        self._after_end = np.zeros(self.num_slots, bool)
        return self._first(self._inner.reset(seed))

    def step(self, actions: Array) -> Stepped:
        """Step every slot; see ``VectorEnvironment.step``."""
        stepped = self._inner.step(actions)
        ended = stepped.terminated | stepped.truncated
        changed = self._changed(stepped, ended)
        self._after_end = ended
        return changed

    def _first(self, observations: Array) -> Array:
        """Return the first observations of the episodes as the wrapper shows them."""
        return observations

    def _changed(self, stepped: Stepped, ended: NDArray[np.bool_]) -> Stepped:
        """Return a step as the wrapper shows it; ``_after_end``: slots that ended in the step before."""
        raise NotImplementedError

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

    def __init__(self, inner: VectorEnvironment, discount: float = 0.99) -> None:
        super().__init__(inner)
        self._discount, self._returns = discount, np.zeros(inner.num_slots)

    def _first(self, observations: Array) -> Array:
        self._returns[:] = 0.0
        return observations

    def _changed(self, stepped: Stepped, ended: NDArray[np.bool_]) -> Stepped:
        self._returns = self._returns * self._discount + stepped.rewards
        if not self._is_frozen:
            self._moments.add(self._returns[~self._after_end])
        self._returns[ended] = 0.0
        return replace(stepped, rewards=stepped.rewards * self._moments.scale)


class RewardClip(_Wrapper):
    """Clips rewards to -1 and 1."""

    def _changed(self, stepped: Stepped, ended: NDArray[np.bool_]) -> Stepped:  # noqa: ARG002
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

    def _first(self, observations: Array) -> Array:
        return self._scaled(observations, self._after_end)

    def _changed(self, stepped: Stepped, ended: NDArray[np.bool_]) -> Stepped:
        return replace(stepped, observations=self._scaled(stepped.observations, self._after_end & ended))

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

    def _first(self, observations: Array) -> Array:
        self._ring[:] = np.expand_dims(observations, 1)
        return self._stack()

    def _changed(self, stepped: Stepped, ended: NDArray[np.bool_]) -> Stepped:  # noqa: ARG002
        self._newest = (self._newest + 1) % self._frames
        self._ring[:, self._newest] = self._ring[:, self._newest + self._frames] = stepped.observations
        if self._after_end.any():
            self._ring[self._after_end] = stepped.observations[self._after_end][:, None]
        return replace(stepped, observations=self._stack())

    def _stack(self) -> Array:
        stack: Array = self._ring[:, self._newest + 1 : self._newest + 1 + self._frames]
        return stack


def _box(space: Space, setting: str) -> gymnasium.spaces.Box:
    if isinstance(space, gymnasium.spaces.Box):
        return space
    why, fix = "only arrays of numbers have a mean or a stack", f"leave out {setting}"
    raise ConfigError(f"{setting} is set, and observations are {space}", why=why, fix=fix)
