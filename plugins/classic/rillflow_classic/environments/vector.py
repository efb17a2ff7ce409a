"""Vector environment: many slots that step together, behind one interface for every provider.

gymnasium, one after the other ──┐
gymnasium, in processes ─────────┼─ VectorEnvironment ── reset, step ──> actor
EnvPool ─────────────────────────┤
multi-agent environments ────────┘

An agent of a multi-agent environment that ends before the others repeats its last observation with reward 0
and ``truncated`` at every step, until all have ended and the environment resets. So every row after the end
is a row after an end, which is no experience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError, RillflowError
from rillflow_classic.fragment import Array, FinishedEpisode

Space = gymnasium.Space[Any]


class EnvironmentFailure(RillflowError):
    """An environment that raised, hung, died, or returned something wrong."""


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Result of one step of every slot. Arrays may be overwritten by the next step."""

    observations: NDArray[Any]
    """[N, ...] the observation after the step; after an episode's end, its last one."""
    rewards: NDArray[np.float32]
    """[N] float32; 0 for a reset."""
    terminated: NDArray[np.bool_]
    """[N] bool: the environment ended the episode."""
    truncated: NDArray[np.bool_]
    """[N] bool: a limit cut the episode. Both may be set."""
    episodes: Sequence[FinishedEpisode] = ()
    """Episodes that ended in this step."""


class VectorEnvironment(Protocol):
    """Slots that step together; after an end, a slot resets at the next step and ignores its action."""

    num_slots: int
    """Number of slots N."""
    agents: Sequence[str]
    """[N] name of the agent of every slot; empty texts in a single-agent environment."""
    observation_space: gymnasium.Space  # type: ignore[type-arg]
    """Space of one slot's observation."""
    action_space: gymnasium.Space  # type: ignore[type-arg]
    """Space of one slot's action."""

    def reset(self, seed: int) -> Array:
        """Begin a new episode in every slot; the same seed gives the same episodes. Returns [N, ...]."""

    def step(self, actions: Array) -> Stepped:
        """Step every slot with its action [N] or [N, A].

        Raises:
            EnvironmentFailure: an environment raised, hung, died, or returned something wrong.
        """

    def render(self, slot: int) -> Array | None:
        """Return a frame [H, W, 3] uint8 of a slot; None if the environment shows nothing."""

    def state(self) -> Mapping[str, Array]:
        """Return the running statistics by name; empty without normalisation."""

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Restore what ``state`` returned; frozen statistics change no more, as evaluation needs them."""

    def close(self) -> None:
        """End all environments and their processes."""


class SlotsBase:
    """Base of environments: what a vector environment without pictures and statistics has.

    Args:
        agents: name of the agent of every slot.
        observation_space: space of one slot's observation.
        action_space: space of one slot's action.
    """

    def __init__(self, agents: Sequence[str], observation_space: Space, action_space: Space) -> None:
        self.agents, self.num_slots = agents, len(agents)
        self.observation_space, self.action_space = observation_space, action_space

    def render(self, slot: int) -> Array | None:
        """Return no frame; see ``VectorEnvironment.render``."""
        del slot
        return None

    def state(self) -> Mapping[str, Array]:
        """Return no statistics."""
        return {}

    def restore(self, state: Mapping[str, Array], *, frozen: bool = False) -> None:
        """Restore no statistics."""

    def close(self) -> None:
        """End nothing."""


class EpisodeTotals:
    """Return and length of the present episode of every slot."""

    def __init__(self, num_slots: int) -> None:
        self._rewards, self._starts, self._steps = np.zeros(num_slots), np.zeros(num_slots, np.int64), 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] steps of the present episode; -1 before a reset."""
        return self._steps - self._starts

    def clear(self) -> None:
        """Forget all episodes."""
        self._rewards[:], self._starts[:] = 0.0, self._steps

    def drop(self, slots: slice | NDArray[np.int64]) -> None:
        """Forget episodes; their slots reset in the step after the next ``add``."""
        self._rewards[slots], self._starts[slots] = 0.0, self._steps + 1

    def add(self, rewards: NDArray[np.float32], ended: NDArray[np.bool_]) -> Sequence[FinishedEpisode]:
        """Add one step; return the episodes that ended in it.

        Raises:
            EnvironmentFailure: a reward is NaN or infinite.
        """
        self._rewards += rewards
        self._steps += 1
        if not math.isfinite(self._rewards.dot(self._rewards)):
            check_finite(rewards, "reward")
        if not np.count_nonzero(ended):  # a tenth of the time of any()
            return ()
        slots = ended.nonzero()[0]
        totals, lengths = self._rewards[slots].tolist(), (self._steps - self._starts[slots]).tolist()
        episodes = tuple(
            FinishedEpisode(total_reward=total, length=length, slot=slot)
            for slot, total, length in zip(slots.tolist(), totals, lengths, strict=True)
            if length > 0
        )
        self.drop(slots)
        return episodes


def check_finite(values: Array, what: str) -> None:
    """Raise EnvironmentFailure that names the first slot whose values [N, ...] are NaN or infinite."""
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        slot, *rest = bad[0].tolist()
        place = f" at {rest}" if rest else ""
        raise EnvironmentFailure(
            f"the environment of slot {slot} returned the {what} {values[tuple(bad[0])]}{place}",
            why="a network cannot learn from NaN or infinity",
            fix="return finite numbers; look for a division by zero or a diverged simulation",
        )


def array_space(space: object, name: str) -> Space:
    """Return the space of observations as one array; float64 becomes float32.

    Raises:
        ConfigError: observations are none, such as a Dict.
    """
    if isinstance(space, gymnasium.spaces.Box) and space.dtype == np.float64:
        with np.errstate(over="ignore"):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return gymnasium.spaces.Box(low, high, dtype=np.float32)
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.Discrete):
        return space
    raise ConfigError(
        f"environment.id is {name!r}, and its observations are {space}",
        why="an observation is one array",
        fix="wrap the environment with gymnasium.wrappers.FlattenObservation in a class of your own",
    )


class ActionCheck:
    """Checks the actions of all slots, [N] or [N, A], against the space of one.

    Args:
        space: space of one action, Discrete or Box.
        num_slots: number of slots N.
        clip: whether continuous actions are clipped to their bounds.

    Raises:
        ConfigError: the space is of another kind.
    """

    def __init__(self, space: Space, num_slots: int, *, clip: bool) -> None:
        self._space, self._shape = space, (num_slots, *(space.shape or ()))
        self._low: Any
        self._high: Any
        if isinstance(space, gymnasium.spaces.Box):
            self._low, self._high, self._kinds, self._clip = space.low, space.high, "fiu", clip
        elif isinstance(space, gymnasium.spaces.Discrete) and space.start == 0:
            self._low, self._high, self._kinds, self._clip = 0, int(space.n) - 1, "iu", False
        else:
            raise ConfigError(
                f"the environment's actions are {space}",
                why="a policy writes Discrete actions from 0 on, or Box actions",
                fix="wrap the environment so that its actions are one of these",
            )

    def __call__(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions to take, in the space's dtype.

        Raises:
            EnvironmentFailure: wrong shape or dtype, or an action outside the space.
        """
        if actions.shape != self._shape or actions.dtype.kind not in self._kinds:
            raise EnvironmentFailure(
                f"the actions are {actions.dtype} {list(actions.shape)}",
                why=f"actions of {self._space} for all slots have the shape {list(self._shape)}",
                fix="use a policy made for this action space",
            )
        if self._clip:
            actions = np.minimum(np.maximum(actions, self._low), self._high)  # faster than np.clip
        if self._kinds == "iu":
            inside = actions.astype(np.uint64) <= self._high  # a negative number becomes a large one
        else:
            inside = (actions >= self._low) & (actions <= self._high)
        if np.count_nonzero(inside) < inside.size:
            slot = int(np.argwhere(~inside)[0][0])
            raise EnvironmentFailure(
                f"the action of slot {slot} is {actions[slot]}",
                why=f"it is outside {self._space}",
                fix="set environment.clip_actions, or use a policy whose outputs fit the action space",
            )
        return actions.astype(self._space.dtype, copy=False)
