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

from rillflow.errors import RillflowError
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


class Slots:
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
        self._rewards = np.zeros(num_slots)
        self.lengths = np.zeros(num_slots, np.int64)
        """[N] steps of the present episode; -1 before a reset."""

    def clear(self) -> None:
        """Forget all episodes."""
        self._rewards[:], self.lengths[:] = 0.0, 0

    def drop(self, slots: slice) -> None:
        """Forget the episodes of slots whose results were lost."""
        self._rewards[slots], self.lengths[slots] = 0.0, -1

    def add(self, rewards: NDArray[np.float32], ended: Array) -> Sequence[FinishedEpisode]:
        """Add one step; return the episodes that ended in it.

        Raises:
            EnvironmentFailure: a reward is NaN or infinite.
        """
        self._rewards += rewards
        self.lengths += 1
        if not math.isfinite(np.add.reduce(self._rewards)):
            check_finite(rewards, "reward")
        if not np.count_nonzero(ended):  # a tenth of the time of any()
            return ()
        slots = ended.nonzero()[0].tolist()
        episodes = tuple(
            FinishedEpisode(
                total_reward=float(self._rewards[slot]), length=int(self.lengths[slot]), slot=slot
            )
            for slot in slots
            if self.lengths[slot] > 0
        )
        self._rewards[slots], self.lengths[slots] = 0.0, -1
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
