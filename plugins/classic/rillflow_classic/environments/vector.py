"""Vector environment: many slots that step together, behind one interface for every provider.

gymnasium, one after the other ──┐
gymnasium, in processes ─────────┼─ VectorEnvironment ── reset, step ──> actor
EnvPool ─────────────────────────┤
multi-agent environments ────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import gymnasium

from rillflow_classic.fragment import Array, FinishedEpisode


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Result of one step of every slot. Arrays may be overwritten by the next step."""

    observations: Array
    """[N, ...] the observation after the step; after an episode's end, its last one."""
    rewards: Array
    """[N] float32; 0 for a reset."""
    terminated: Array
    """[N] bool: the environment ended the episode."""
    truncated: Array
    """[N] bool: a limit cut the episode."""
    episodes: Sequence[FinishedEpisode] = ()
    """Episodes that ended in this step."""


class VectorEnvironment(Protocol):
    """Slots that step together; after an episode's end a slot resets at the next step and ignores its action."""

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

    def close(self) -> None:
        """End all environments and their processes."""
