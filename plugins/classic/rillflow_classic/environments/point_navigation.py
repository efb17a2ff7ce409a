"""A point that moves to a goal it does not see: the task is the goal, on a circle around its start.

``reset(seed=s)`` draws a task; ``reset()`` begins a new episode of the same one. So a vector environment that
is reset with a seed has a task of its own in each slot, and keeps it until the next seed.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

from rillflow_classic.fragment import Array


class PointNavigation(gymnasium.Env[Array, Array]):
    """2-D navigation of Finn et al. (arXiv 1703.03400, section 5.3), with goals on a circle.

    An action is a velocity, each part up to 3; the reward is minus the distance to the goal.

    Args:
        goal: angle of the goal in radians; None: every seed draws one.
        horizon: steps of an episode.
        speed: distance of a step with the action 1.
        swirl: speed of a current around the start, which changes its direction with the distance; 0: none.
    """

    def __init__(
        self, goal: float | None = None, horizon: int = 20, speed: float = 0.1, swirl: float = 0.0
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-3.0, 3.0, (2,), np.float32)
        self._fixed, self._horizon, self._speed, self._swirl = goal, horizon, speed, swirl
        self._place = self._goal = np.zeros(2)
        self._steps = 0
        self._turn_to(goal or 0.0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode; a seed draws a new task, and ``options["goal"]`` sets one."""
        super().reset(seed=seed)
        if options is not None and "goal" in options:
            self._turn_to(float(options["goal"]))
        elif seed is not None and self._fixed is None:
            self._turn_to(self.np_random.uniform(0, 2 * math.pi))
        self._place, self._steps = np.zeros(2), 0
        return self._place.astype(np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Move; the episode is truncated at the horizon."""
        x, y = self._place
        current = self._swirl * math.sin(6 * math.hypot(x, y)) * np.array([-y, x])
        self._place = self._place + self._speed * np.clip(action, -3, 3) + current
        self._steps += 1
        distance = math.dist(self._place, self._goal)
        return self._place.astype(np.float32), -distance, False, self._steps >= self._horizon, {}

    def _turn_to(self, angle: float) -> None:
        self._goal = np.array([math.cos(angle), math.sin(angle)])
