"""Flat parameters: all parameters of a network as views of one tensor, and their gradients of another.

So the optimiser, the scaling of gradients and the sum over ranks are single calls.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def flattened(network: nn.Module) -> nn.Parameter:
    """Move all parameters and their gradients into one tensor each; the network's become views of them."""
    parameters = list(network.parameters())
    flat = nn.Parameter(torch.cat([each.detach().flatten() for each in parameters]))
    flat.grad = torch.zeros_like(flat)
    both = zip(parameters, views(flat.data, parameters), views(flat.grad, parameters), strict=True)
    for parameter, value, gradient in both:
        parameter.data, parameter.grad = value, gradient
    return flat


def views(flat: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return a flat tensor's parts in the shapes of parameters."""
    shapes = [each.shape for each in parameters]
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
