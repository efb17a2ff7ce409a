"""An environment of your own: a corridor, at whose right end is the goal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Corridor(gymnasium.Env[Any, Any]):
    """Walk from a random cell to the last one. Every step costs 1 / length; the goal gives 1.

    Args:
        length: number of cells.
    """

    def __init__(self, length: int = 10) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length, self._cell = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in a random cell; return the observation and an empty dict."""
        super().reset(seed=seed)
        self._cell = int(self.np_random.integers(self._length - 1))
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move left (0) or right (1); return observation, reward, terminated, truncated and an empty dict."""
        self._cell = max(0, self._cell + (1 if action == 1 else -1))
        is_there = self._cell == self._length - 1
        return self._seen(), float(is_there) - 1 / self._length, is_there, False, {}

    def _seen(self) -> Any:
        return np.eye(self._length, dtype=np.float32)[self._cell]
