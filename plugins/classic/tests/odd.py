"""Environments as users bring them: odd spaces, observations, pictures, agents and simulators."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

ACTIONS: dict[str, Any] = {
    "float64": Box(-0.1, 0.1, (2,), np.float64),
    "tiny": Box(0.01, 0.03, (1,), np.float64),
    "float16": Box(-0.1, 0.1, (2,), np.float16),
    "float32": Box(-0.1, 0.1, (2,), np.float32),
    "endless": Box(-np.inf, np.inf, (2,), np.float64),
    "one-sided": Box(np.array([-0.1, -np.inf]), np.array([np.inf, 0.1]), dtype=np.float64),
    "huge": Box(-1e300, 1e300, (1,), np.float64),
    "matrix": Box(-0.1, 0.1, (2, 2), np.float64),
    "scalar": Box(-0.1, 0.1, (), np.float32),
    "whole": Box(-1, 2, (2,), np.int32),
    "bytes": Box(0, 3, (1, 2), np.uint8),
    "start": Discrete(3, start=-1),
    "several": MultiDiscrete([2, 3], start=[5, -1]),
    "table": MultiDiscrete([[2, 3], [1, 2]]),
    "bits": MultiBinary(3),
    "matrix of bits": MultiBinary([2, 2]),
}


def _dict(number: int) -> dict[str, Any]:
    return {"a": number, "b": np.array([1.5, number])}


SEEN: dict[str, Any] = {
    "number": (Discrete(3), [0, 1, 3]),
    "negative": (Discrete(3), [0, 1, -1]),
    "from 5": (Discrete(3, start=5), [5, 7, 8]),
    "below 5": (Discrete(3, start=5), [5, 7, 4]),
    "large": (Box(-np.inf, np.inf, (1,), np.float64), [[0.0], [1e38], [1e300]]),
    "small type": (Box(-128, 127, (1,), np.int8), [[0], [127], [300]]),
    "pixels": (Box(0, 255, (1,), np.uint8), [np.zeros(1, np.uint8), np.full(1, 255, np.uint16), [256]]),
    "words": (Box(-9, 9, (1,), np.float32), [[0.0], [1], ["a"]]),
    "structured": (Box(-9, 9, (1,), np.float32), [[0.0], [1], np.zeros(1, [("a", "f4"), ("b", "f4")])]),
    "ragged": (Box(-9, 9, (2,), np.float32), [[0.0, 0], [1, 2], [[1], [1, 2]]]),
    "nothing": (Box(-9, 9, (1,), np.float32), [[0.0], [1], None]),
    "complex": (Box(-9, 9, (1,), np.float32), [[0.0], [1], [1j]]),
    "two numbers": (MultiDiscrete([3, 2]), [[0, 0], [2, 1], [3, 0]]),
    "bits": (MultiBinary(2), [[0, 1], [True, False], [0, 2]]),
    "part": (Dict({"a": Discrete(3), "b": Box(-9, 9, (2,))}), [_dict(0), _dict(2), _dict(3)]),
    "missing part": (Dict({"a": Discrete(3), "b": Box(-9, 9, (2,))}), [_dict(0), _dict(1), {"a": 1}]),
    "parts": (
        Tuple([Discrete(2, start=1), Dict({"b": Box(-9, 9, (1, 2))}), MultiBinary(2)]),
        [(1, {"b": np.zeros((1, 2))}, [0, 1]), (2, {"b": [[3.5, 4]]}, [1, 1])],
    ),
    "bounded": (Box(-1, 1, (1,), np.float32), [[0.0], [1], [1.5]]),
    "scalar": (Box(-9, 9, (), np.float64), [0.0, np.float32(1), np.array(2.0), 3, True]),
    "flags": (Box(0, 1, (2,), np.float32), [[0.0, 1.0], [True, False], np.array([1, 0])]),
}
"""Space, and the observations from the reset on; the last one goes on."""


class Strict(gymnasium.Env[Any, Any]):
    """Takes only actions of its space, in its shape and dtype; keeps them."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, actions: str) -> None:
        self.action_space = ACTIONS[actions]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is outside {self.action_space}"
        self.steps += 1
        return np.zeros(2, np.float32), float(np.sum(action)), self.steps >= 8, False, {}


class Seen(gymnasium.Env[Any, Any]):
    """Shows a list of observations."""

    action_space = Discrete(2)

    def __init__(self, kind: str, reward: float = 1.0) -> None:
        self.observation_space, self.values = SEEN[kind]
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.values[0], {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen = self.values[min(self.steps, len(self.values) - 1)]
        return seen, self.reward, self.steps >= 8, False, {}


class Drawn(gymnasium.Env[Any, Any]):
    """Draws observations of a space; the reward is a checksum of the action's bytes."""

    def __init__(self, observations: str, actions: str) -> None:
        self.observation_space, self.action_space = deepcopy(SEEN[observations][0]), ACTIONS[actions]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is outside {self.action_space}"
        self.steps += 1
        reward = crc32(np.asarray(action).tobytes()) % 1024 / 1024  # sums are exact
        return self.observation_space.sample(), reward, self.steps >= 8, False, {}


PICTURES: dict[str, Callable[[Any, int], Any]] = {
    "bytes": lambda frame, _: frame,
    "floats": lambda frame, _: frame / 255,
    "large floats": lambda frame, _: frame.astype(np.float32),
    "flags": lambda frame, _: frame > 60,
    "int64": lambda frame, _: frame.astype(np.int64) * 1000 - 9,
    "16 bits": lambda frame, _: frame.astype(np.uint16) * 257,
    "gray": lambda frame, _: frame[:, :, 0],
    "one channel": lambda frame, _: frame[:, :, :1],
    "alpha": lambda frame, _: np.dstack([frame, frame[:, :, :1] * 0 + 9]),
    "gray and alpha": lambda frame, _: np.dstack([frame[:, :, 0], frame[:, :, 0] * 0 + 9]),
    "channels first": lambda frame, _: np.moveaxis(frame, 2, 0),
    "list": lambda frame, _: [frame * 0, frame],
    "nested lists": lambda frame, _: frame.tolist(),
    "changing size": lambda _, step: np.full((10 + step, 30 - step, 3), 20 * step, np.uint8),
    "huge": lambda _, step: np.full((5000, 4000, 3), 20 * step, np.uint8),
    "tall": lambda _, step: np.full((20_000, 2, 3), 20 * step, np.uint8),
    "one pixel": lambda frame, _: frame[:1, :1],
    "same memory": lambda frame, _: _shared(frame),
    "none after 4": lambda frame, step: None if step > 4 else frame,
    "nan": lambda _, __: np.full((16, 24, 3), np.nan),
    "none": lambda _, __: None,
    "empty list": lambda _, __: [],
    "text": lambda _, __: "a robot",
    "words": lambda _, __: np.array([["a"]]),
    "wrong shape": lambda _, __: np.zeros((5, 7, 11)),
    "line": lambda _, __: np.zeros(9, np.uint8),
    "no pixels": lambda _, __: np.zeros((0, 5, 3), np.uint8),
    "object": lambda _, __: object(),
    "raises at 3": lambda frame, step: _raised(RuntimeError("the display is gone"), frame, step >= 3),
    "raises at once": lambda frame, _: _raised(OSError("no display"), frame),
    "exits": lambda frame, _: _raised(SystemExit("no display"), frame),
    "not written": lambda frame, _: _raised(NotImplementedError(), frame),
}
"""Results of ``render`` by name, made of a frame, whose brightness is 20 times the step, and the step."""


def _raised(error: BaseException, frame: Any, fails: bool = True) -> Any:
    if fails:
        raise error
    return frame


def _shared(frame: Any) -> Any:
    _SHARED[...] = frame
    return _SHARED


_SHARED = np.zeros((16, 24, 3), np.uint8)


class Display(gymnasium.Env[Any, Any]):
    """Renders a kind of picture; ``close`` may raise."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, kind: str, render_mode: str | None = None, fails: str = "") -> None:
        if render_mode is not None and fails == "made":
            raise ImportError("no graphics")
        self.kind, self.fails, self.render_mode = kind, fails, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.fails == "step" and self.render_mode is not None:
            raise RuntimeError("the window is too small")
        return np.zeros(2, np.float32), 1.0, self.steps >= 8, False, {}

    def render(self) -> Any:
        return PICTURES[self.kind](np.full((16, 24, 3), 20 * self.steps, np.uint8), self.steps)

    def close(self) -> None:
        if self.fails == "close":
            raise RuntimeError("closed twice")
        if self.fails == "exits in close":
            raise SystemExit(3)


class Society:
    """Agents a, b and c of 6 steps; b ends at step 2, and does something odd.

    It wants the action of every live agent and of no other. An observation is the agent's index and the step.
    """

    possible_agents = ("a", "b", "c")

    def __init__(self, kind: str, render_mode: str | None = None) -> None:
        self.kind, self.render_mode = kind, render_mode

    def observation_space(self, agent: str) -> Any:
        return Box(1.0 if self.kind.startswith("late") else 0.0, 100.0, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def see(self, agents: Any) -> dict[str, Any]:
        return {agent: np.array(["abcd".index(agent) + 1, self.steps + 1], np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.live = 0, ["a", "b", "c"]
        if self.kind.startswith("late"):
            self.live.remove("b")
        self.agents = ["a", "b", "c"] if self.kind == "hidden" else list(self.live)
        return self.see(
            "ac" if self.kind == "hidden" else "abc" if self.kind == "late, shown" else self.live
        ), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        assert set(actions) == set(self.live), f"{actions} of {self.live}"
        steps, seen, over = self.steps, [*self.live], self.steps == 6
        ended = {agent: over or (agent == "b" and steps == 2 and self.kind != "late") for agent in seen}
        self.live = [agent for agent in seen if not ended[agent]]
        rewards = dict.fromkeys(seen, 1.0)
        if steps == 4 and self.kind in ("returns", "late", "late, shown"):
            seen, self.live = [*seen, "b"], [*self.live, "b"]
            ended["b"], rewards["b"] = False, 1.0
        self.agents = list(self.live)
        if steps > 2 and not over:
            match self.kind:
                case "ended again":
                    seen, ended["b"] = [*seen, "b"], True
                case "left over":
                    seen, ended["b"] = [*seen, "b"], False
                case "rewarded":
                    rewards["b"] = 2.0
                case "stale list":
                    self.agents = ["a", "b", "c"]
                case "unseen" if steps == 4:
                    self.agents = [*self.agents, "b"]
                case "left" if steps == 4:
                    self.agents = ["a"]
                case "unknown" if steps == 4:
                    seen, ended["d"] = [*seen, "d"], False
        if self.kind == "stale list":
            self.agents = ["a", "b", "c"]
        return self.see(seen), rewards, ended, dict.fromkeys(seen, False), {}

    def render(self) -> Any:
        return np.full((16, 24, 3), 20 * self.steps, np.uint8)

    def close(self) -> None:
        pass


class Room(gymnasium.Env[Any, Any]):
    """Is left only by action 1, or never."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(4)

    def __init__(self, has_door: bool = True, sleep_s: float = 0.0) -> None:
        self.has_door, self.sleep_s = has_door, sleep_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.sleep_s)
        return np.zeros(2, np.float32), -1.0, self.has_door and action == 1, False, {}


class Simulator(gymnasium.Env[Any, Any]):
    """Listens at a port of its own, and writes it into a file with its seed."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(
        self, port: int, worker: int = 0, log: str = "", options: Any = None, render_mode: str | None = None
    ) -> None:
        self.link, self.log, self.render_mode = socket.socket(), log, render_mode
        self.link.bind(("127.0.0.1", port + worker))
        self.link.listen()
        self.given = {"port": port, "worker": worker, "log": log, "options": options, "shows": render_mode}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        if seed is not None and self.log:
            with Path(self.log).open("a") as file:
                file.write(json.dumps({**self.given, "seed": seed, "process": os.getpid()}) + "\n")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps >= 8, False, {}

    def render(self) -> Any:
        return np.full((16, 24, 3), 20 * self.steps, np.uint8)

    def close(self) -> None:
        self.link.close()
