"""Spaces: the observation space that a slot's array has."""

from __future__ import annotations

import gymnasium
import numpy as np

from rillflow.errors import ConfigError
from rillflow_classic.environments.vector import Space


def array_space(space: object, name: str) -> Space:
    """Return a space of observations as one array; float64 becomes float32.

    Raises:
        ConfigError: it is none, such as a Dict.
    """
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Box):
        if space.dtype != np.float64:
            return space
        with np.errstate(over="ignore"):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return spaces.Box(low, high, dtype=np.float32)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return space
    raise ConfigError(
        f"environment.id is {name!r}, and its observations are {space}",
        why="an observation is one array",
        fix="wrap the environment with gymnasium.wrappers.FlattenObservation in a class of your own",
    )
