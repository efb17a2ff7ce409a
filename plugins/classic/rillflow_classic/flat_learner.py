"""Flat learner: a network whose parameters are views of one tensor, and their gradients of another.

    backward ─> one flat gradient ─ sum over trainer ranks ─ scale by norm ─> Adam ─> weights, version

So the optimiser, the scaling and the sum over ranks are single calls, without a loop over parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rillflow.config.schema import Section
from rillflow.errors import NotFiniteError
from rillflow.workers.collectives import Ranks, SingleRank
from rillflow_classic.checkpointed import State
from rillflow_classic.networks.acting import weights_of
from rillflow_classic.networks.flat import flattened
from rillflow_classic.policy import ActorPolicy, Weights

N = TypeVar("N", bound=nn.Module)


class LearnerConfig(Section):
    """Settings of all learners with gradients."""

    lr: float = Field(1e-3, gt=0, description="Learning rate of Adam.")
    anneal_updates: int = Field(
        0, ge=0, description="Updates over which the learning rate falls linearly to 0; 0 keeps it."
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount.")
    max_gradient_norm: float = Field(10.0, gt=0, description="Norm to which larger gradients are scaled.")


class FlatLearner(Generic[N]):
    """Base of all learners with gradients: holds the optimiser, the weights and the state.

    Args:
        network: everything that is trained.
        make_policy: makes the policy that acts with the network.
        settings: a ``LearnerConfig``.
        eps: added to the deviations in Adam.
        norm_eps: added to the norm of the gradient where it is scaled down.
        ranks: trainer ranks; gradients are summed over them.
    """

    def __init__(
        self,
        network: N,
        make_policy: Callable[[N], ActorPolicy],
        settings: Any,
        *,
        eps: float = 1e-8,
        norm_eps: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        self.network = network
        """Everything that is trained."""
        self.version = 0
        """See Learner."""
        self.ranks: Ranks = ranks or SingleRank()
        """Trainer ranks."""
        self._settings, self._norm_eps = settings, norm_eps
        self._flat = flattened(network)  # before the policy, which keeps views of the parameters
        self.policy = make_policy(network)
        """See Learner."""
        self.policy.version = 0
        self._optimizer = torch.optim.Adam([self._flat], lr=settings.lr, eps=eps, fused=True)

    def weights(self) -> Weights:
        """Return a copy of the weights that the policy loads."""
        return weights_of(self.network)

    def state(self) -> State:
        """Return weights, the moments of Adam and the number of updates."""
        adam = self._optimizer.state[self._flat]
        return {"network": self.network.state_dict(), "optimizer": adam, "version": self.version}

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""
        self.network.load_state_dict(state["network"])
        self._optimizer.state[self._flat] = {k: value.clone() for k, value in state["optimizer"].items()}
        self.version = self.policy.version = state["version"]

    @property
    def _gradient(self) -> Tensor:
        assert self._flat.grad is not None
        return self._flat.grad

    def _step(self, terms: Mapping[str, float] | None = None) -> float:
        """Sum the gradient over ranks, scale it down, and step. Returns its norm before.

        Args:
            terms: sums of the loss, by name, for the error.

        Raises:
            NotFiniteError: the gradient is not finite; the weights stay.
        """
        self.ranks.sum_([self._gradient])
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not math.isfinite(norm):
            culprits = [
                f"{name} is {value}" for name, value in (terms or {}).items() if not math.isfinite(value)
            ]
            raise NotFiniteError(
                f"update {self.version}: {', '.join(culprits) or f'the norm of the gradient is {norm}'}",
                why="a step with it would destroy the weights; they are those before the minibatch",
                fix="look for rewards or observations that are NaN or huge, or lower algorithm.lr",
            )
        if norm > self._settings.max_gradient_norm:
            self._gradient.mul_(self._settings.max_gradient_norm / (norm + self._norm_eps))
        settings = self._settings
        left = 1.0 - self.version / settings.anneal_updates if settings.anneal_updates else 1.0
        self._optimizer.param_groups[0]["lr"] = settings.lr * max(left, 0.0)
        self._optimizer.step()
        return norm

    def _count_update(self) -> None:
        """Count an update; subclasses do here what follows one."""
        self.version += 1
        self.policy.version = self.version
