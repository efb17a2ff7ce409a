"""Passes: a network's forward and backward pass on numpy arrays.

    observations ─ forward ─> parameters [B, P], values [B] ── a loss in numpy ──> their derivatives
    gradients of the weights <─ backward ─────────────────────────────────────────────┘

An MLP runs in numpy, on the memory of torch's parameters and gradients. A minibatch of 256 rows and two
trunks of 64 x 64 takes less than half of autograd's time, which is mostly overhead. Other networks run in
torch.

Legend: B rows, P parameters of the distribution of actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rillflow_classic.fragment import Array
from rillflow_classic.networks.build import ActorCritic, NetworkOutput, Tanh, Vectors
from rillflow_classic.networks.distributions import Floats


class ForwardPass(Protocol):
    """The result of a forward pass, and the way back."""

    @property
    def parameters(self) -> Floats:
        """[B, P] parameters of the distributions."""

    @property
    def values(self) -> Floats:
        """[B] values."""

    def backward(self, by_parameters: Floats, by_values: Floats) -> None:
        """Write the gradient of every weight, given the loss's derivatives."""


class TorchPass:
    """A pass that autograd recorded.

    Args:
        output: the network's output.
        gradient: flat tensor of all gradients.
        rows: [B] bool: rows of the output that count; None for all.
    """

    def __init__(self, output: NetworkOutput, gradient: Tensor, rows: Tensor | None = None) -> None:
        both = output.parameters, output.values
        self._outputs = both if rows is None else tuple(each[rows] for each in both)
        self._gradient = gradient
        self.parameters, self.values = (each.detach().numpy() for each in self._outputs)

    def backward(self, by_parameters: Floats, by_values: Floats) -> None:
        """See ForwardPass."""
        self._gradient.zero_()
        given = torch.from_numpy(by_parameters), torch.from_numpy(by_values)
        torch.autograd.backward(self._outputs, given)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A linear layer on torch's memory."""

    weight: Floats
    """[out, in]."""
    bias: Floats
    """[out]."""
    gradients: tuple[Floats, Floats] | None
    """Gradients of both; None if the network only acts."""

    @classmethod
    def of(cls, layer: nn.Linear) -> _Layer:
        both = layer.weight, layer.bias
        gradients = [each.grad.numpy() for each in both if each.grad is not None]
        weight, bias = (each.detach().numpy() for each in both)
        return cls(weight=weight, bias=bias, gradients=(gradients[0], gradients[1]) if gradients else None)

    def forward(self, inputs: Floats) -> Floats:
        found: Floats = inputs @ self.weight.T
        found += self.bias
        return found

    def backward(self, inputs: Floats, by_outputs: Floats) -> None:
        """Write the gradients of the weight and the bias."""
        assert self.gradients is not None, "its parameters have gradients"
        np.matmul(by_outputs.T, inputs, out=self.gradients[0])
        np.sum(by_outputs, axis=0, out=self.gradients[1])


class NumpyMLP:
    """An actor-critic of MLPs in numpy.

    Args:
        network: the network. Its parameters, and their gradients if it learns, must keep their memory.
    """

    def __init__(self, network: ActorCritic) -> None:
        self._trunks = [
            [_Layer.of(layer) for layer in trunk.children() if isinstance(layer, nn.Linear)]
            for trunk in network.trunks
        ]
        self._is_tanh = any(isinstance(module, Tanh) for module in network.modules())
        self._heads = _Layer.of(network.policy_head), _Layer.of(network.value_head)
        self._free = network.log_deviations

    @staticmethod
    def fits(network: ActorCritic) -> bool:
        """Return whether a network is made of MLPs over vectors."""
        starts = [next(iter(trunk.children())) for trunk in network.trunks]
        return network.lstm is None and all(isinstance(start, Vectors) for start in starts)

    def forward(self, observations: Array) -> MLPPass:
        """Return the pass over observations [B, ...]."""
        width = math.prod(observations.shape[1:])  # -1 cannot be inferred for no rows
        inputs = observations.reshape(len(observations), width).astype(np.float32, copy=False)
        kept = [self._through(trunk, inputs) for trunk in self._trunks]
        policy, value = self._heads
        parameters = policy.forward(kept[0][-1])
        if self._free is not None:
            free = np.broadcast_to(self._free.detach().numpy(), parameters.shape)
            parameters = np.concatenate([parameters, free], axis=-1)
        values = value.forward(kept[-1][-1])[:, 0]
        return MLPPass(parameters=parameters, values=values, network=self, kept=kept)

    def backward(self, kept: Sequence[Sequence[Floats]], by_parameters: Floats, by_values: Floats) -> None:
        """Write all gradients; ``kept`` are the inputs of each layer, and of the head, by trunk."""
        policy, value = self._heads
        if self._free is not None:
            assert self._free.grad is not None
            by_parameters, by_free = np.split(by_parameters, 2, axis=-1)
            np.sum(by_free, axis=0, out=self._free.grad.numpy())
        outputs = by_parameters, by_values[:, None]
        for head, inputs, by_outputs in zip((policy, value), (kept[0], kept[-1]), outputs, strict=True):
            head.backward(inputs[-1], by_outputs)
        by_features = [by @ head.weight for head, by in zip((policy, value), outputs, strict=True)]
        if len(self._trunks) == 1:
            by_features = [by_features[0] + by_features[1]]
        for trunk, inputs, by_outputs in zip(self._trunks, kept, by_features, strict=True):
            self._back(trunk, inputs, by_outputs)

    def _through(self, trunk: Sequence[_Layer], inputs: Floats) -> list[Floats]:
        """Return the inputs of every layer, and the features."""
        found = [inputs]
        for layer in trunk:
            values = layer.forward(found[-1])
            found.append(np.tanh(values, out=values) if self._is_tanh else np.maximum(values, 0, out=values))
        return found

    def _back(self, trunk: Sequence[_Layer], kept: Sequence[Floats], by_outputs: Floats) -> None:
        for index in reversed(range(len(trunk))):
            activated = kept[index + 1]
            by_outputs = by_outputs * (1 - activated * activated if self._is_tanh else activated > 0)
            trunk[index].backward(kept[index], by_outputs)
            if index:
                by_outputs = by_outputs @ trunk[index].weight


@dataclass(frozen=True, kw_only=True)
class MLPPass:
    """A pass of a NumpyMLP."""

    parameters: Floats
    """[B, P]."""
    values: Floats
    """[B]."""
    network: NumpyMLP = field(repr=False)
    """The network."""
    kept: Sequence[Sequence[Floats]] = field(repr=False)
    """Inputs of each layer, and the features, by trunk."""

    def backward(self, by_parameters: Floats, by_values: Floats) -> None:
        """See ForwardPass."""
        self.network.backward(self.kept, by_parameters, by_values)
