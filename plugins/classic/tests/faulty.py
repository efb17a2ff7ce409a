"""Environments with faults, and ones whose observations say what happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Counter(gymnasium.Env[Any, Any]):
    """Observation: steps so far, the episode's random number. Ends after ``length`` steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int = 5, fault: str = "", at: int = 3, once: str = "") -> None:
        self.length, self.fault, self.at, self.once = length, fault, at, Path(once) if once else None
        self.steps, self.number = 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.number = 0, float(self.np_random.random())
        if self.fault == "nan" and self.at == 0:
            self.number = np.nan
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen: Any = self._seen()
        reward: Any = float(action)
        if self.fault and self.steps == self.at and self._is_mine():
            match self.fault:
                case "raises":
                    raise ZeroDivisionError("no such move")
                case "hangs":
                    time.sleep(3600)
                case "spins":
                    while True:
                        pass
                case "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "nan":
                    seen[1] = np.nan
                case "infinite reward":
                    reward = np.inf
                case "text reward":
                    reward = "much"
                case "shape":
                    seen = np.zeros(3, np.float32)
                case "scalar":
                    seen = 1.0
                case "dtype":
                    seen = np.array(["a", "b"])
                case "nothing":
                    return None
                case "text end":
                    return seen, reward, "no", False, {}
                case "exits":
                    raise SystemExit(3)
                case "four":
                    return seen, reward, False, {}
        return seen, reward, self.steps >= self.length, False, {}

    def _seen(self) -> Any:
        return np.array([self.steps, self.number], np.float32)

    def _is_mine(self) -> bool:
        """Whether this environment has the fault: if there is a file, only the one that creates it."""
        if self.once is None:
            return True
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Team:
    """Three agents that end after 2, 4 and 6 steps; the observation is the agent's index and the step."""

    def __init__(self, spaces: str = "equal") -> None:
        self.possible_agents = ["a", "b", "c"]
        self.spaces = spaces
        self.resets = 0

    def observation_space(self, agent: str) -> Any:
        size = 3 if self.spaces == "different" and agent == "c" else 2
        return gymnasium.spaces.Box(-1000.0, 1000.0, (size,), np.float32)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.agents, self.resets = 0, list(self.possible_agents), self.resets + 1
        return self._seen(self.agents), {}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == set(self.agents)
        self.steps += 1
        agents = self.agents
        limits = {"a": 2, "b": 4, "c": 6}
        terminated = {agent: self.steps == limits[agent] and agent != "b" for agent in agents}
        truncated = {agent: self.steps == limits[agent] and agent == "b" for agent in agents}
        self.agents = [agent for agent in agents if self.steps < limits[agent]]
        return self._seen(agents), dict.fromkeys(agents, 1.0), terminated, truncated, {}

    def _seen(self, agents: list[str]) -> Any:
        return {agent: np.array(["abc".index(agent), self.steps], np.float32) for agent in agents}

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass


class Lone:
    """No environment: it can only be reset."""

    def reset(self) -> Any:
        return 0, {}


class Silent(Lone):
    """Several agents in PettingZoo's form, without ``close``."""

    possible_agents = ("a",)

    def step(self, actions: dict[str, int]) -> Any:
        return {}, {}, {}, {}, {}

    def render(self) -> None:
        return None


not_a_class = 3
