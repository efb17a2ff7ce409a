"""Fragment: what actors send to trainers, T steps of N slots, time first.

    slot n:  obs 0 ─ action 0 ─> reward 0, ended 0, obs 1 ─ action 1 ─> ... ─> obs T (the bootstrap)

A slot is one environment, or one agent of one environment. After an episode has ended at step t, row t + 1
is a reset: its observation is the last one of the old episode, its action is ignored, and its result is the
first observation of the new episode. ``valid`` is False there. So ``observations[t + 1]`` is always the true
successor of step t, also where a time limit cut the episode: values bootstrap from it unless ``terminated``.

Legend: T steps, N slots, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class FinishedEpisode:
    """A finished episode."""

    total_reward: float
    """Sum of the rewards as the environment gave them, before any normalisation."""
    length: int
    """Number of steps."""
    slot: int = 0
    """Slot that played it."""
    version: int = -1
    """Version of the weights that took all its actions; -1 if several did, or if nobody has counted."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Steps of several slots that one policy acted in."""

    observations: Array
    """[T + 1, N, ...] what the policy saw; the last one is the bootstrap."""
    actions: Array
    """[T, N] int64, or [T, N, A] float32."""
    rewards: Array
    """[T, N] float32."""
    terminated: Array
    """[T, N] bool: the environment ended the episode after this step, and no reward follows."""
    truncated: Array
    """[T, N] bool: a limit cut the episode after this step; the value of the next observation remains."""
    valid: Array
    """[T, N] bool: False for a row that only resets; it is no experience."""
    outputs: Mapping[str, Array] = field(default_factory=dict)
    """[T, N, ...] what the policy returned beside the actions, such as ``logprobs`` and ``values``."""
    state: Array | None = None
    """[N, ...] recurrent state before step 0; None without one."""
    versions: Array
    """[T] int64: version of the weights that acted."""
    episodes: Sequence[FinishedEpisode] = ()
    """Episodes that ended in these steps."""
    policy: str = "policy"
    """Name of the policy that acted."""
    actor: int = 0
    """Index of the actor."""

    @property
    def ended(self) -> Array:
        """[T, N] bool: the episode ended after this step, for either reason."""
        return np.logical_or(self.terminated, self.truncated)

    @property
    def num_steps(self) -> int:
        """Number of environment steps, without resets."""
        return int(self.valid.sum())


def joined(fragments: Sequence[Fragment]) -> Fragment:
    """Return fragments of equal T side by side, as one with the slots of all."""
    first = fragments[0]
    if len(fragments) == 1:
        return first
    names = ("observations", "actions", "rewards", "terminated", "truncated", "valid")
    arrays: dict[str, Any] = {n: np.concatenate([getattr(each, n) for each in fragments], 1) for n in names}
    outputs = {n: np.concatenate([each.outputs[n] for each in fragments], axis=1) for n in first.outputs}
    states = [each.state for each in fragments if each.state is not None]
    return replace(
        first,
        **arrays,
        outputs=outputs,
        state=np.concatenate(states) if states else None,
        versions=np.minimum.reduce([each.versions for each in fragments]),
        episodes=tuple(episode for each in fragments for episode in each.episodes),
    )
