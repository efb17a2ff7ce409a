"""Spaces: the array that an observation is, and the check of all actions at once."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow.errors import ConfigError
from rillflow_classic.environments.vector import EnvironmentFailure, Space


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
        elif isinstance(space, gymnasium.spaces.Discrete):
            self._low, self._high = int(space.start), int(space.start + space.n) - 1
            self._kinds, self._clip = "iu", False
        else:
            raise ConfigError(
                f"the environment's actions are {space}",
                why="a policy writes Discrete or Box actions",
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
            actions = np.clip(actions, self._low, self._high)
        inside = (actions >= self._low) & (actions <= self._high)
        if np.count_nonzero(inside) < inside.size:
            slot = int(np.argwhere(~inside)[0][0])
            raise EnvironmentFailure(
                f"the action of slot {slot} is {actions[slot]}",
                why=f"it is outside {self._space}",
                fix="set environment.clip_actions, or use a policy whose outputs fit the action space",
            )
        return actions.astype(self._space.dtype, copy=False)
