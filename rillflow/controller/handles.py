"""Role handles with typed endpoints: an editor completes a step's calls and mypy checks them.

    flow.policy.generate(prompts, samples=8)  ──> Handle

Nothing here runs. ``flow.RoleHandle`` executes the calls; it knows every endpoint of every role by name.
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
        """Return rollouts of ``samples`` answers to every prompt."""

    def greedy(self, prompts: Rows) -> Handle:
        """Return rollouts of the most likely answer to every prompt."""

    def logprobs(self, rollouts: Rows) -> Handle:
        """Return the rows with the field ``old_logprobs``."""

    def totals(self, rows: Rows) -> Handle:
        """Return the rows with the field ``policy_totals``."""

    def update(self, *batches: Any, loss: Any = None, passes: PassesConfig, **options: Any) -> Handle:
        """Run optimiser steps on one loss, or on several that ``over`` paired with rows; return a report."""

    def publish(self) -> Handle:
        """Publish the weights and return their version; ``flow.publish`` calls this."""


class ReferenceHandle(Protocol):
    """The policy at the start of the phase; see ``roles.policy``."""

    def logprobs(self, rollouts: Rows) -> Handle:
        """Return the rows with the field ``reference_logprobs``."""

    def follow(self, *, rate: float, every: int) -> Handle:
        """Move towards the policy in every ``every``-th call; return the number of calls in the phase."""

    def totals(self, rows: Rows) -> Handle:
        """Return the rows with the field ``reference_totals``."""


class CriticHandle(Protocol):
    """A critic that estimates the value of rows; see ``roles.scalar_roles``."""

    def values(self, rollouts: Rows) -> Handle:
        """Return the rows with the field ``values``."""

    def final_values(self, rollouts: Rows) -> Handle:
        """Return the rows with the field ``final_values``."""

    def update(self, *known: Rows, loss: Any, passes: PassesConfig, **options: Any) -> Handle:
        """Run optimiser steps; return a report."""


class ScorerHandle(Protocol):
    """A function or model that scores; see ``roles.reward`` and ``roles.scalar_roles``."""

    def score(self, rollouts: Rows) -> Handle:
        """Return the rows with the fields of a score: ``rewards``, or ``costs``, and ``valid``."""


class PreferenceHandle(ScorerHandle, Protocol):
    """A model that learns to score from pairs; see ``roles.scalar_roles``."""

    def update(self, pairs: Rows, loss: Any, passes: PassesConfig, **options: Any) -> Handle:
        """Run optimiser steps over pairs; return a report."""
