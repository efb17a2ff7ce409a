"""Optimizer: AdamW over float32 masters, clipping by global norm, the schedule, and the state to resume from.

    module parameter ── float32 or wider ──> is its own master
                     ├─ bfloat16 ──> float32 master; gradients are accumulated in float32,
                     │               the stepped master is rounded back into the module
                     └─ sharded over a mesh (DTensor) ──> the same, with this rank's shard

    training.adamw steps the masters; ``moments`` and ``offload`` say how the state is kept between steps

A small learning rate changes a bfloat16 weight by less than its last bit: without masters such steps
would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rillflow.errors import NotFiniteError, TrainingError, nearest
from rillflow.records.metrics import Metric
from rillflow.runs.abandoning import whole
from rillflow.sharding.codec import LINK
from rillflow.sharding.mesh import EarlySums, Gradients
from rillflow.sharding.tensor import local_gradient, own
from rillflow.training.adamw import MOMENTS, AdamW
from rillflow.training.config import OptimizerConfig

COUNTER = "counter"
"""Prefix of entries in a training state that belong to no parameter."""
_STEPS = f"{COUNTER}/step"
"""Key of the number of optimiser steps."""


class Optimizer:
    """AdamW over the trainable parameters of a module.

    Args:
        module: the module to train.
        config: rates, decay, schedule, clipping, and storage of moments.
        total_steps: optimiser steps of the whole phase, for the schedule.
        gradients: completes gradients over ranks.

    Raises:
        TrainingError: the module has no trainable parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        *,
        total_steps: int,
        gradients: Gradients,
    ) -> None:
        self._config = config
        self._gradients = gradients
        self._total_steps = total_steps
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._weights:
            raise TrainingError(
                "the module has no parameter that requires a gradient",
                why="there is nothing to train",
                fix="call requires_grad_(True) on the parameters to train",
            )
        self.masters = {name: _master(weight) for name, weight in self._weights.items()}
        """Stepped tensors by parameter name; a plain weight of float32 or wider is its own master."""
        self._apart = [name for name, weight in self._weights.items() if self.masters[name] is not weight]
        self._narrow = [name for name in self._apart if self._weights[name].dtype.itemsize < 4]
        self._adamw = AdamW(self.masters, self._narrow, config)
        self._sums: EarlySums | None = None
        self.steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._config.lr * lr_factor(self.steps, self._total_steps, self._config)

    def collect(self) -> None:
        """Move gradients to the masters that are not the weights; called after every backward pass."""
        for name in self._apart:
            self._collect(name)

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """Wrap the rank's last backward pass of a step: sums over ranks start during the pass."""
        self._sums = self._gradients.early(self.masters)
        weights = {} if self._sums is None else self._weights
        hooks = [
            weight.register_post_accumulate_grad_hook(partial(self._complete, name))  # type: ignore[no-untyped-call]
            for name, weight in weights.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def sum_over_ranks(self, *, learns: bool, is_sound: bool = True) -> bool:
        """Replace the accumulated gradients by their sums over all ranks.

        Args:
            learns: whether any rank has gradients; equal on all ranks.
            is_sound: whether this rank's gradients are finite.

        Returns:
            Whether the gradients of every rank are finite; otherwise the sums are invalid.
        """
        everyone = self._gradients.groups.everyone
        if everyone.size == 1:
            return is_sound
        unsound = torch.tensor([float(not is_sound)])
        if self._gradients.coded is not None:  # its state must not see numbers that are not finite
            everyone.sum_([unsound])
            learns = learns and not unsound
        if learns:
            for master in self.masters.values():
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            self._gradients.complete(self._found(), self._sums or self._gradients.early(self.masters))
        if self._gradients.coded is None:
            everyone.sum_([unsound])
        return not unsound

    def step(self) -> float:
        """Clip the accumulated gradients and apply them.

        Returns:
            Their global norm before clipping.

        Raises:
            NotFiniteError: the norm is not finite; nothing was changed.
        """
        norm = self._gradients.norm(self._found())
        length = float(norm)
        if not length < float("inf"):
            raise self._not_finite(length)
        if length > self._config.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.masters.values(), self._config.max_grad_norm, norm)
        with whole():
            self._adamw.step(self.steps, self.lr, self._publish)
            self.steps += 1
        return length

    def link_metrics(self) -> dict[str, Metric]:
        """Return the metrics of the last sum over ranks through a codec."""
        return {} if self._gradients.coded is None else self._gradients.coded.metrics()

    @property
    def moved_bytes(self) -> int | None:
        """Bytes of the last step that crossed between host and device; None without offload."""
        return self._adamw.moved_bytes

    def discard(self) -> None:
        """Drop all gradients and unfinished sums."""
        self._sums = None
        for parameter in (*self._weights.values(), *self.masters.values()):
            parameter.grad = None

    def read_masters(self) -> dict[str, Tensor]:
        """Return the stepped tensors as stored between steps, by parameter name, without copies."""
        return {name: self._kept_master(name) for name in self.masters}

    @torch.no_grad()
    def write_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the stepped tensors, and round them into the weights; moments and steps stay.

        Args:
            tensors: tensors by parameter name, of the shapes that ``read_masters`` returns.
        """
        with whole():
            for name, tensor in tensors.items():
                self._kept_master(name).copy_(tensor)
                if name in self._narrow:
                    own(self._weights[name]).copy_(tensor)

    def state(self) -> dict[str, Tensor]:
        """Return the state to resume from, besides the weights, by ``kind/parameter name``.

        It has the moments, masters wider than their weights, the number of steps, and the state of a codec of
        gradients, without copies. For a
        sharded parameter it has this rank's shard, by the name in the whole module.
        """
        tensors = {f"master/{name}": self._kept_master(name) for name in self._narrow}
        for name in self.masters:
            if name in self._adamw.state:
                kept = self._adamw.state[name]
                tensors |= {f"{kind}/{name}": kept[kind] for kind in ("step", *MOMENTS)}
        if self._gradients.coded is not None:
            tensors |= self._gradients.coded.state()
        return {_STEPS: torch.tensor(self.steps), **tensors}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state; the module must already have the weights of the same step.

        Raises:
            TrainingError: the state is another module's.
        """
        links = {name: each for name, each in tensors.items() if name.startswith(LINK)}
        tensors = {name: each for name, each in tensors.items() if name not in links}
        self._check_state(tensors)
        if self._gradients.coded is not None:
            self._gradients.coded.load_state(links)
        with torch.no_grad():
            for name in self._narrow:
                self._kept_master(name).copy_(tensors[f"master/{name}"])
                own(self._weights[name]).copy_(tensors[f"master/{name}"])
            self._adamw.state.clear()
            for name in self.masters:
                if f"step/{name}" in tensors:
                    kinds = ("step", *MOMENTS)
                    self._adamw.load(name, {kind: tensors[f"{kind}/{name}"] for kind in kinds})
        self.steps = int(tensors[_STEPS])

    def _collect(self, name: str) -> None:
        weight, master = self._weights[name], self.masters[name]
        if weight.grad is not None:
            gradient = local_gradient(weight)
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad += gradient
            weight.grad = None

    def _complete(self, name: str, weight: Tensor) -> None:
        """Handle a weight's gradient in the last backward pass; called as its hook."""
        if self.masters[name] is not weight:
            self._collect(name)
        if self._sums is not None:
            self._sums.complete(name)

    def _found(self) -> dict[str, Tensor]:
        """Return the accumulated gradients."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def _publish(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._narrow:
                own(self._weights[name]).copy_(self.masters[name])

    def _kept_master(self, name: str) -> Tensor:
        """Return a master as stored between steps, without a copy."""
        master = self.masters[name].detach()
        if name not in self._adamw.hosts:
            return master
        return self._adamw.hosts[name].far[0].view(master.dtype).view(master.shape)

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        stepped = [name for name in self.masters if f"step/{name}" in tensors]
        expected = {f"master/{name}": self.masters[name].shape for name in self._narrow}
        expected[_STEPS] = torch.Size()
        for name in stepped:
            shape = self.masters[name].shape
            expected |= {f"step/{name}": torch.Size(), f"exp_avg/{name}": shape, f"exp_avg_sq/{name}": shape}
        for name in sorted(set(expected) ^ set(tensors)):
            known = "lacks" if name in expected else "has"
            raise TrainingError(
                f"the training state {known} {name!r}",
                why="it was saved from another module, or with another dtype",
                fix=nearest(name, expected),
            )
        for name, shape in expected.items():
            stored = tensors[name].shape
            if stored != shape:
                raise TrainingError(
                    f"{name!r} has shape {list(stored)} in the training state and {list(shape)} here",
                    why="it was saved from another module",
                )

    def _not_finite(self, norm: float) -> NotFiniteError:
        names = [
            name
            for name, master in self.masters.items()
            if master.grad is not None and not bool(torch.isfinite(master.grad).all())
        ]
        cut = not self._gradients.is_whole
        elsewhere = "in a parameter of another rank" if cut else "the sum of finite gradients overflows"
        where = f"first in {names[0]}" if names else elsewhere
        return NotFiniteError(
            f"the gradient's norm is {norm}: {where}",
            why="the update would have destroyed the weights; it was not applied",
            fix="lower the learning rate, or look for extreme log ratios in the metrics before this step",
        )


def lr_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the factor on the peak learning rate at optimiser step ``step`` (from 0).

    Warm-up step s of w uses (s + 1) / w. Linear and cosine then go from 1 at the first step after the
    warm-up to ``final_lr`` at step ``total_steps``, and stay there.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    falling = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_lr + (1 - config.final_lr) * falling


def _master(weight: nn.Parameter) -> nn.Parameter:
    held = own(weight)
    if held.dtype not in (torch.float32, torch.float64):
        return nn.Parameter(held.float())
    return nn.Parameter(held) if isinstance(weight, DTensor) else weight
