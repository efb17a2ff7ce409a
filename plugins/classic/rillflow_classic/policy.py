"""Policy and learner: what actors act with, and what trainers update.

observations ── ActorPolicy.act ──> actions, outputs        Learner.update(fragment) ──> metrics
                  ^                                        │
                  └──────── weights, a version ────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rillflow.records.metrics import Metrics
from rillflow_classic.checkpointed import State
from rillflow_classic.fragment import Array

Weights = Mapping[str, Array]
"""Parameters and buffers by name, as arrays of the CPU."""


@dataclass(frozen=True, kw_only=True)
class Acted:
    """Actions for a batch of observations."""

    actions: Array
    """[B] int64, or [B, A] float32."""
    outputs: Mapping[str, Array] = field(default_factory=dict)
    """[B, ...] what a fragment keeps beside the actions, such as ``logprobs`` and ``values``."""
    state: Array | None = None
    """[B, ...] recurrent state after the step; None without one."""


class ActorPolicy(Protocol):
    """A network that acts."""

    version: int
    """Version of its weights; -1 before the first load."""

    def act(self, observations: Array, state: Array | None = None, *, greedy: bool = False) -> Acted:
        """Return an action for each observation [B, ...]."""

    def initial_state(self, num_slots: int) -> Array | None:
        """Return the recurrent state at the start of an episode, [B, ...]; None without one."""

    def seed(self, seed: int) -> None:
        """Restart the random numbers of its actions."""

    def load(self, version: int, weights: Weights) -> None:
        """Replace the weights."""


class Learner(Protocol):
    """A network with its loss and its optimiser."""

    version: int
    """Number of updates so far; the version of its weights."""
    policy: ActorPolicy
    """Acts with the learner's own weights, without a copy."""

    def update(self, data: Any) -> Metrics:
        """Take the algorithm's optimiser steps on data, such as a Fragment or Transitions."""

    def weights(self) -> Weights:
        """Return a copy of all weights."""

    def state(self) -> State:
        """Return everything a resumed run needs."""

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""


class GradientLearner(Learner, Protocol):
    """A learner for plans that compute gradients at the actors."""

    def gradients(self, data: Any) -> tuple[list[Tensor], Metrics]:
        """Return the gradient of every parameter, without a step."""

    def apply(self, gradients: list[Tensor]) -> None:
        """Take one optimiser step with given gradients."""
