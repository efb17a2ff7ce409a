"""Actions: check a whole array against the space of one action, and clip it if it is continuous."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rillflow_classic.environments.vector import EnvironmentFailure, Space


class ActionCheck:
    """Checks the actions of all slots, [N] or [N, A], against the space of one.

    Args:
        space: space of one action: Discrete, MultiDiscrete, MultiBinary or Box.
        num_slots: number of slots N.
        clip: whether continuous actions outside their bounds are clipped.

    Raises:
        EnvironmentFailure: the space is of another kind.
    """

    def __init__(self, space: Space, num_slots: int, *, clip: bool) -> None:
        self._space, self._shape = space, (num_slots, *(space.shape or ()))
        self._clip = clip and isinstance(space, gymnasium.spaces.Box)
        self._low: Any
        self._high: Any
        if isinstance(space, gymnasium.spaces.Discrete):
            self._low, self._high = int(space.start), int(space.start + space.n) - 1
        elif isinstance(space, gymnasium.spaces.MultiDiscrete):
            self._low, self._high = space.start, space.start + space.nvec - 1
        elif isinstance(space, gymnasium.spaces.MultiBinary):
            self._low, self._high = 0, 1
        elif isinstance(space, gymnasium.spaces.Box):
            self._low, self._high = space.low, space.high
        else:
            raise EnvironmentFailure(
                f"the environment's actions are {space}",
                why="a policy writes Discrete, MultiDiscrete, MultiBinary or Box actions",
                fix="wrap the environment so that its actions are one of these",
            )
        self._kinds = "fiu" if isinstance(space, gymnasium.spaces.Box) else "iu"
        self._is_scalar = isinstance(self._low, int)

    def __call__(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions to take.

        Raises:
            EnvironmentFailure: wrong shape or dtype, or an action outside the space.
        """
        if actions.shape != self._shape or actions.dtype.kind not in self._kinds:
            raise EnvironmentFailure(
                f"the actions are {actions.dtype} {list(actions.shape)}",
                why=f"actions of {self._space} for all slots have the shape {list(self._shape)}",
                fix="use a policy made for this action space",
            )
        if self._is_scalar:
            low, high = np.minimum.reduce(actions, axis=None), np.maximum.reduce(actions, axis=None)
            is_inside = bool(low >= self._low and high <= self._high)
        elif self._clip:
            actions = np.clip(actions, self._low, self._high)
            is_inside = not np.isnan(np.add.reduce(actions, axis=None))
        else:
            is_inside = bool(((actions >= self._low) & (actions <= self._high)).all())
        if not is_inside:
            self._refuse(actions)
        return actions.astype(self._space.dtype, copy=False)

    def _refuse(self, actions: NDArray[Any]) -> None:
        outside = ~((actions >= self._low) & (actions <= self._high))
        slot = int(np.argwhere(outside)[0][0])
        raise EnvironmentFailure(
            f"the action of slot {slot} is {actions[slot]}",
            why=f"it is outside {self._space}",
            fix="set environment.clip_actions, or use a policy whose outputs fit the action space",
        )
