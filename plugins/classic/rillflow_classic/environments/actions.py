"""Actions: from the action of a policy to one that lies in the environment's own action space.

environment's space                        policy's space         the environment gets
Box of floats, any shape and dtype         float32 Box [A]        its shape and dtype, clipped in that dtype
Discrete                                   Discrete from 0 on     a number of its own, from ``start`` on
MultiDiscrete, MultiBinary, bounded        Discrete, one number   the combination of this number, in its
Box of integers                            for each combination   shape and dtype
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rillflow.errors import ConfigError
from rillflow_classic.fragment import Array

MOST_COMBINATIONS = 1024
"""Most combinations of a space of several numbers; a policy has an output for each."""


@dataclass(frozen=True, kw_only=True)
class ActionSpaces:
    """The action space of an environment, and the one that policies act in.

    Example:
        spaces = ActionSpaces.of(Box(-0.1, 0.1, (2,), np.float64), "the actions of 'Reach'")
        environment.step(spaces.own_action(action))
    """

    own: gymnasium.Space[Any]
    """The environment's."""
    policy: gymnasium.Space[Any]
    """A Discrete from 0 on, or a float32 Box of one axis."""
    combinations: Array | None = None
    """[n, ...] the own action of each number; None for a Box of floats and a Discrete."""

    @classmethod
    def of(cls, space: gymnasium.Space[Any], what: str) -> ActionSpaces:
        """Return both spaces.

        Raises:
            ConfigError: no policy acts in such a space; ``what`` names it.
        """
        if isinstance(space, spaces.Discrete):
            return cls(own=space, policy=spaces.Discrete(int(space.n)) if space.start else space)
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            if space.dtype == np.float32 and len(space.shape) == 1:
                return cls(own=space, policy=space)
            with np.errstate(over="ignore"):  # bounds beyond float32 are infinite for the policy
                low, high = (each.astype(np.float32).reshape(-1) for each in (space.low, space.high))
            return cls(own=space, policy=spaces.Box(low, high, dtype=np.float32))
        if bounds := _whole_numbers(space):
            first, counts = bounds
            if (count := math.prod(counts.tolist())) <= MOST_COMBINATIONS:
                numbers = np.stack(np.unravel_index(np.arange(count), counts), axis=-1) + first
                combinations = numbers.astype(space.dtype).reshape(count, *(space.shape or ()))
                return cls(own=space, policy=spaces.Discrete(count), combinations=combinations)
        raise ConfigError(
            f"{what} are {space}",
            why="policies act with a Discrete, a Box of floats, or at most "
            f"{MOST_COMBINATIONS} combinations of whole numbers between bounds",
            fix="wrap the environment in a class of your own whose action_space is one of these",
        )

    @property
    def are_equal(self) -> bool:
        """Whether the environment takes the policy's actions unchanged."""
        return self.own is self.policy

    def own_action(self, action: Any) -> Any:
        """Return the action of the environment's space for one of the policy's, which is in its bounds."""
        if self.are_equal:
            return action
        found = self.own_actions(np.asarray(action)[None])[0, ...]
        return int(found) if isinstance(self.own, spaces.Discrete) else found

    def own_actions(self, actions: Array) -> Array:
        """Return the actions [N, ...] of the environment's space for those of the policy, [N] or [N, A]."""
        own: Any = self.own
        if self.are_equal:
            return actions
        if self.combinations is not None:
            return self.combinations[actions]
        if isinstance(own, spaces.Discrete):
            return actions + int(own.start)
        found: Array = actions.astype(own.dtype).reshape(len(actions), *own.shape)
        np.maximum(found, own.low, out=found)
        np.minimum(found, own.high, out=found)
        return found

    def acted(self, actions: Array) -> Array:
        """Return the environment's actions [N, ...] for those of a network, which may be out of bounds.

        They are cut to the bounds of the policy's space first, as in training.
        """
        box = self.policy
        return self.own_actions(within(box, actions) if isinstance(box, spaces.Box) else actions)


def within(space: spaces.Box, actions: Array) -> Array:
    """Return actions [N, ...] that are cut to the bounds of a space; faster than np.clip."""
    found: Array = np.minimum(np.maximum(actions, space.low), space.high)
    return found


def _whole_numbers(space: Any) -> tuple[Array, Array] | None:
    """Return the lowest value and the number of values of each number of a space, [k] each, or None."""
    if isinstance(space, spaces.MultiBinary):
        counts = np.full(space.shape, 2).reshape(-1)
        return np.zeros_like(counts), counts
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.reshape(-1), space.nvec.reshape(-1)
    if isinstance(space, spaces.Box) and space.dtype.kind in "iu" and space.is_bounded():
        low, high = (each.astype(object).reshape(-1) for each in (space.low, space.high))
        if max(high - low, default=0) < MOST_COMBINATIONS:
            return low.astype(np.int64), (high - low + 1).astype(np.int64)
    return None
