"""A deterministic environment and policies, for tests of actors and streams.

Slot n counts its steps: the observation is (step in the episode, episode, slot). An episode ends after a
length that depends on the slot; every second episode is cut instead of ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np

from rillflow_classic.environments.vector import Stepped
from rillflow_classic.fragment import Array, FinishedEpisode
from rillflow_classic.policy import Acted, Weights


class CountingEnvironment:
    """Counts steps; the reward is the action."""

    def __init__(self, num_slots: int = 3, agents: Sequence[str] | None = None, length: int = 4) -> None:
        self.num_slots = num_slots
        self.agents = tuple(agents or [""] * num_slots)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(100)
        self.absent = np.zeros(num_slots, np.bool_)
        self._lengths = length + np.arange(num_slots)
        self.seeds: list[int] = []
        self.is_closed = False

    def reset(self, seed: int) -> Array:
        self.seeds.append(seed)
        self._episode = np.full(self.num_slots, seed % 1000, np.int64)
        self._step = np.zeros(self.num_slots, np.int64)
        self._ended = np.zeros(self.num_slots, np.bool_)
        self._rewards = np.zeros(self.num_slots)
        return self._observe()

    def step(self, actions: Array) -> Stepped:
        assert actions.shape == (self.num_slots,)
        resets = self._ended.copy()
        self._episode[resets] += 1
        self._step = np.where(resets, 0, self._step + 1)
        self._rewards = np.where(resets, 0, self._rewards + actions)
        over = (self._step == self._lengths) & ~resets
        truncated = over & (self._episode % 2 == 1)
        self._ended = over
        episodes = [
            FinishedEpisode(total_reward=float(self._rewards[n]), length=int(self._step[n]), slot=n)
            for n in np.flatnonzero(over).tolist()
        ]
        return Stepped(
            observations=self._observe(),
            rewards=np.where(resets, 0, actions).astype(np.float32),
            terminated=over & ~truncated,
            truncated=truncated,
            episodes=episodes,
        )

    def close(self) -> None:
        self.is_closed = True

    def _observe(self) -> Array:
        columns = [self._step, self._episode, np.arange(self.num_slots)]
        return np.stack(columns, axis=1).astype(np.float32)


class AffinePolicy:
    """Acts with the step in the episode plus its weight; its recurrent state counts the calls."""

    def __init__(self, *, is_recurrent: bool = False) -> None:
        self.version = -1
        self.bias = 0
        self.is_recurrent = is_recurrent
        self.seeds: list[int] = []
        self.batches: list[int] = []

    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        del greedy
        self.batches.append(len(observations))
        outputs = {"values": observations[:, 0] * 0.5}
        if state is not None:
            outputs["calls"] = state[:, 0]
        return Acted(
            actions=observations[:, 0].astype(np.int64) + self.bias,
            outputs=outputs,
            state=None if state is None else state + 1,
        )

    def initial_state(self, num_slots: int) -> Array | None:
        return np.zeros((num_slots, 2), np.float32) if self.is_recurrent else None

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def load(self, version: int, weights: Weights) -> None:
        self.version, self.bias = version, int(weights["bias"][0])
