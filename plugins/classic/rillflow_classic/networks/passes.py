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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rillflow_classic.fragment import Array
from rillflow_classic.networks.build import ActorCritic, Inputs, NetworkOutput
from rillflow_classic.networks.distributions import Floats


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """The result of a forward pass, and the way back."""

    parameters: Floats
    """[B, P] parameters of the distributions."""
    values: Floats
    """[B] values."""
    backward: Callable[[Floats, Floats], None]
    """Writes the gradient of every weight, given the loss's derivatives by parameters and by values."""


def torch_pass(output: NetworkOutput, gradient: Tensor, rows: Tensor | None = None) -> ForwardPass:
    """Return a pass that autograd recorded.

    Args:
        output: the network's output.
        gradient: flat tensor of all gradients.
        rows: [B] bool: rows of the output that count; None for all.
    """
    both = output.parameters, output.values
    outputs = both if rows is None else tuple(each[rows] for each in both)

    def backward(by_parameters: Floats, by_values: Floats) -> None:
        gradient.zero_()
        torch.autograd.backward(outputs, (torch.from_numpy(by_parameters), torch.from_numpy(by_values)))

    parameters, values = (each.detach().numpy() for each in outputs)
    return ForwardPass(parameters=parameters, values=values, backward=backward)


class _Layer:
    """A linear layer on torch's memory: weight [out, in], bias [out], and their gradients if it learns."""

    def __init__(self, layer: nn.Module) -> None:
        self.weight, self.bias = (each.detach().numpy() for each in layer.parameters())
        self._gradients = [each.grad.numpy() for each in layer.parameters() if each.grad is not None]

    def forward(self, inputs: Floats) -> Floats:
        found: Floats = inputs @ self.weight.T
        found += self.bias
        return found

    def backward(self, inputs: Floats, by_outputs: Floats) -> None:
        """Write the gradients of the weight and the bias."""
        by_weight, by_bias = self._gradients
        np.matmul(by_outputs.T, inputs, out=by_weight)
        np.sum(by_outputs, axis=0, out=by_bias)


class NumpyMLP:
    """An actor-critic of MLPs in numpy.

    Args:
        network: the network. Its parameters, and their gradients if it learns, must keep their memory.
    """

    def __init__(self, network: ActorCritic) -> None:
        self._trunks = [
            [_Layer(layer) for layer in trunk.children() if isinstance(layer, nn.Linear)]
            for trunk in network.trunks
        ]
        self._is_tanh = any(isinstance(module, nn.Tanh) for module in network.modules())
        self._heads = _Layer(network.policy_head), _Layer(network.value_head)
        self._free = network.log_deviations

    @staticmethod
    def fits(network: ActorCritic) -> bool:
        """Return whether a network is made of MLPs over vectors."""
        starts = [module for module in network.modules() if isinstance(module, Inputs)]
        return network.lstm is None and all(not each.num_values and not each.axes for each in starts)

    def forward(self, observations: Array) -> ForwardPass:
        """Return the pass over observations [B, ...]."""
        width = math.prod(observations.shape[1:])  # -1 cannot be inferred for no rows
        inputs = observations.reshape(len(observations), width).astype(np.float32, copy=False)
        kept = [self._through(trunk, inputs) for trunk in self._trunks]
        parameters, values = (
            head.forward(kept[at][-1]) for at, head in zip((0, -1), self._heads, strict=True)
        )
        if self._free is not None:
            free = np.broadcast_to(self._free.detach().numpy(), parameters.shape)
            parameters = np.concatenate([parameters, free], axis=-1)
        return ForwardPass(parameters=parameters, values=values[:, 0], backward=partial(self._backward, kept))

    def _through(self, trunk: Sequence[_Layer], inputs: Floats) -> list[Floats]:
        """Return the inputs of every layer, and the features."""
        found = [inputs]
        for layer in trunk:
            values = layer.forward(found[-1])
            found.append(np.tanh(values, out=values) if self._is_tanh else np.maximum(values, 0, out=values))
        return found

    def _backward(self, kept: Sequence[Sequence[Floats]], by_parameters: Floats, by_values: Floats) -> None:
        if self._free is not None:
            assert self._free.grad is not None
            by_parameters, by_free = np.split(by_parameters, 2, axis=-1)
            np.sum(by_free, axis=0, out=self._free.grad.numpy())
        by_features = []
        for at, head, by in zip((0, -1), self._heads, (by_parameters, by_values[:, None]), strict=True):
            head.backward(kept[at][-1], by)
            by_features.append(by @ head.weight)
        if len(self._trunks) == 1:
            by_features = [by_features[0] + by_features[1]]
        for trunk, inputs, by in zip(self._trunks, kept, by_features, strict=True):
            for index in reversed(range(len(trunk))):
                activated = inputs[index + 1]
                by = by * (1 - activated * activated if self._is_tanh else activated > 0)
                trunk[index].backward(inputs[index], by)
                if index:
                    by = by @ trunk[index].weight
