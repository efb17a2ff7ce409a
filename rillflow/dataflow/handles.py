"""Handles of roles, as a step calls them: an editor completes them and mypy checks them.

    flow.policy.generate(prompts, samples=8)  ──> Handle

Nothing here runs: what answers is ``flow.RoleHandle``, which knows every endpoint of every role by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch
    from rillflow.rollout.config import SamplingConfig
    from rillflow.training.config import PassesConfig

    Rows = Batch | Handle
    """A batch, or the handle of one."""


class PolicyHandle(Protocol):
    """The policy and its sampler; see ``roles.policy`` and ``roles.sampler``."""

    def generate(self, prompts: Rows, samples: int = 1, sampling: SamplingConfig | None = None) -> Handle:
        """Rollouts of ``samples`` answers to every prompt."""

    def greedy(self, prompts: Rows) -> Handle:
        """Rollouts of the likeliest answer to every prompt."""

    def logprobs(self, rollouts: Rows) -> Handle:
        """The field ``old_logprobs``."""

    def totals(self, rows: Rows) -> Handle:
        """The field ``policy_totals``."""

    def update(self, *batches: Any, loss: Any = None, passes: PassesConfig, **options: Any) -> Handle:
        """Optimiser steps by a loss, or by several that ``over`` gave rows; a report."""

    def publish(self) -> Handle:
        """The version that is sampled next; ``flow.publish`` calls it."""


class ReferenceHandle(Protocol):
    """The policy as the phase found it; see ``roles.policy``."""

    def logprobs(self, rollouts: Rows) -> Handle:
        """The field ``reference_logprobs``."""

    def follow(self, *, rate: float, every: int) -> Handle:
        """Move towards the policy; how far apart the two were."""

    def totals(self, rows: Rows) -> Handle:
        """The field ``reference_totals``."""


class CriticHandle(Protocol):
    """What rows are worth; see ``roles.scalar_roles``."""

    def values(self, rollouts: Rows) -> Handle:
        """The field ``values``."""

    def final_values(self, rollouts: Rows) -> Handle:
        """The field ``final_values``."""

    def update(self, *known: Rows, loss: Any, passes: PassesConfig, **options: Any) -> Handle:
        """Optimiser steps; a report."""


class ScorerHandle(Protocol):
    """A function or model that scores; see ``roles.reward`` and ``roles.scalar_roles``."""

    def score(self, rollouts: Rows) -> Handle:
        """The fields of a score: ``rewards``, or ``costs``, and ``valid``."""


class PreferenceHandle(ScorerHandle, Protocol):
    """A model that learns to score from pairs; see ``roles.scalar_roles``."""

    def update(self, pairs: Rows, loss: Any, passes: PassesConfig, **options: Any) -> Handle:
        """Optimiser steps over pairs; a report."""
