"""Ensemble: several MLPs of the same widths as one network.

inputs [B, F] ─ E x (linear, ReLU), ..., linear ─> outputs [E, B, O]

A layer of all members is one batched product, which is faster than a product of each member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class EnsembleMLP(nn.Module):
    """MLPs with ReLU between linear layers; weights and biases start uniform in +-1 / sqrt(inputs).

    Args:
        members: number of MLPs, E.
        widths: number of inputs, of each hidden layer, and of outputs.
        generator: random numbers of the first weights.
    """

    def __init__(self, members: int, widths: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(widths):
            bound = 1 / math.sqrt(inputs)
            for kept, rows in ((self.weights, inputs), (self.biases, 1)):
                values = torch.empty(members, rows, outputs).uniform_(-bound, bound, generator=generator)
                kept.append(nn.Parameter(values))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all members [E, B, O] for the same inputs [B, F], or their own [E, B, F]."""
        values = inputs if inputs.dim() == 3 else inputs.expand(len(self.weights[0]), *inputs.shape)
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(bias, values.relu() if place else values, weight)
        return values
