"""Tenant: a client's adapter, with its gradient, its moments and its steps.

    forward_backward ─> gradient, added up ─ optim_step ─> clipped ─ AdamW ─> weights, new version

An optimiser step applies whole requests or nothing: after a failed forward_backward the next optim_step is
refused and the gradient is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.errors import DataError, NotFiniteError, RillflowError, TrainingError
from rillflow.models.adapters import ADAPTER, drawn
from rillflow.training.adamw import MOMENTS, AdamW
from rillflow.training.config import OptimizerConfig
from rillflow_training_service.datums import Datum
from rillflow_training_service.losses import NamedLoss
from rillflow_training_service.passes import PassResult, run_pass
from rillflow_training_service.shared_base import Shape, SharedBase


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Settings of an optimiser step, with the client's names and defaults."""

    learning_rate: float = 1e-4
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-12
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: float = 0.0
    """Largest global norm of the gradient; 0 for no limit."""

    def check(self) -> None:
        """Refuse values that are not finite, or out of range.

        Raises:
            DataError: it names the first one.
        """
        for name, value in vars(self).items():
            below = 1.0 if name in ("beta1", "beta2") else math.inf
            if not (isinstance(value, int | float) and 0 <= value < below):
                top = "below 1" if below == 1 else "finite"
                raise DataError(
                    f"{name} is {value}",
                    why=f"it is at least 0 and {top}; nothing was applied",
                    fix="correct the parameters of optim_step",
                )


@dataclass(kw_only=True, eq=False)
class Tenant:
    """A trained adapter."""

    name: str
    """The model's id."""
    base: SharedBase
    """The base that it adapts."""
    shape: Shape
    """Rank and adapted layers of the client's adapter."""
    seed: int
    """Seed of its first weights and of its samples."""
    weights: dict[str, nn.Parameter]
    """Weights of the adapter in float32, by name."""
    version: int
    """Number of the present weights, which no other weights on the base have had."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """AdamW's state by name."""
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """Sum of the gradients since the last step."""
    steps: int = 0
    """Optimiser steps so far."""
    failed: RillflowError | None = None
    """Error of a forward_backward since the last step."""

    @staticmethod
    def new(name: str, base: SharedBase, shape: Shape, seed: int) -> Tenant:
        """Return a new adapter: ``down`` random, ``up`` 0, as in a run with this seed."""
        made = dict[str, nn.Parameter]()
        for key, size in base.names(shape).items():
            made[key] = nn.Parameter(drawn(key, key.partition(f"{ADAPTER}.")[2], size, seed).to(base.device))
        version = base.new_version()
        return Tenant(name=name, base=base, shape=shape, seed=seed, weights=made, version=version)

    @property
    def key(self) -> str:
        """Name of the present weights; equal names stand for equal weights."""
        return f"{self.name} {self.version}"

    def enter(self) -> Mapping[str, nn.Parameter]:
        """Let the base run with this adapter; return the parameters there."""
        return self.base.enter(self.shape, self.key, self.weights)

    def run(
        self, data: list[Datum], loss: NamedLoss, settings: Mapping[str, float], *, learns: bool
    ) -> PassResult:
        """Run a request; with ``learns``, add its gradient.

        Raises:
            RillflowError: nothing was added, and the next step is refused.
        """
        try:
            found = run_pass(self.base, self.enter(), data, loss, settings, learns=learns)
        except RillflowError as error:
            self.fail(error if learns else None)
            raise
        for name, gradient in found.gradients.items():
            if name in self.gradient:
                self.gradient[name] += gradient
            else:
                self.gradient[name] = gradient
        return found

    def fail(self, error: RillflowError | None) -> None:
        """Drop the gradient, because a part of it is missing."""
        if error is not None:
            self.failed = error
            self.gradient.clear()

    def step(self, params: AdamParams) -> dict[str, float]:
        """Apply the gradient; return metrics.

        Raises:
            TrainingError: a forward_backward before it failed; nothing was applied.
            RillflowError: a parameter or the gradient is not finite; nothing was applied.
        """
        gradient, self.gradient = self.gradient, {}
        failed, self.failed = self.failed, None
        if failed is not None:
            raise TrainingError(
                "this optim_step was not applied, and the gradient was dropped",
                why=f"a forward_backward before it failed: {failed.what}",
                fix="send the forward_backward again, and then optim_step",
            )
        params.check()
        ordered = [gradient[name] for name in self.weights if name in gradient]  # whatever came first
        norm = nn.utils.get_total_norm(ordered) if ordered else torch.zeros(())
        length = float(norm)
        if not math.isfinite(length):
            raise NotFiniteError(
                f"the gradient's norm is {length}",
                why="the step would have destroyed the weights; it was not applied",
                fix="lower the learning rate, or look for extreme log ratios in the datums",
            )
        for name, each in gradient.items():
            self.weights[name].grad = each
        if params.grad_clip_norm and length > params.grad_clip_norm:
            nn.utils.clip_grads_with_norm_(self.weights.values(), params.grad_clip_norm, norm)
        self.version = self.base.new_version()
        self._apply(params)
        self.steps += 1
        return {"grad_norm:mean": length, "learning_rate:mean": params.learning_rate}

    def _apply(self, params: AdamParams) -> None:
        config = OptimizerConfig(beta1=params.beta1, beta2=params.beta2, weight_decay=params.weight_decay)
        adamw = AdamW(self.weights, (), config, eps=params.eps)
        adamw.state = self.moments
        adamw.step(self.steps, params.learning_rate, lambda _: None)
        for weight in self.weights.values():
            weight.grad = None

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the state to resume from besides the weights, without copies."""
        found = {"steps": torch.tensor(self.steps)}
        for name, kept in self.moments.items():
            found |= {f"{kind}/{name}": kept[kind] for kind in ("step", *MOMENTS)}
        return found

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """Replace the weights; with a state, the moments too, and without one, forget them.

        Raises:
            DataError: they are another adapter's; nothing was changed.
        """
        self._require_same(weights)
        moments, steps = dict[str, dict[str, Tensor]](), 0
        if state is not None:
            steps = int(state["steps"])
            for name in self.weights:
                kept = {kind: state.get(f"{kind}/{name}") for kind in ("step", *MOMENTS)}
                there: dict[str, Any] = {kind: each for kind, each in kept.items() if each is not None}
                if there:
                    moments[name] = {kind: each.clone().to(self.base.device) for kind, each in there.items()}
        self.version = self.base.new_version()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])
        self.moments, self.steps = moments, steps
        self.gradient, self.failed = {}, None

    def _require_same(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            found = list(weights[name].shape) if name in weights else None
            if found != list(weight.shape):
                raise DataError(
                    f"the checkpoint has {name} of shape {found}"
                    if found
                    else f"the checkpoint lacks {name}",
                    why=f"this model's adapter has the shape {list(weight.shape)} there",
                    fix="load it into a model of its own rank and base: create_training_client_from_state",
                )
        for name in weights:
            if name not in self.weights:
                raise DataError(
                    f"the checkpoint has {name}, which this model's adapter lacks",
                    why="it was trained with other layers, or on another base",
                    fix="load it into a model of its own: create_training_client_from_state",
                )
