"""Payload: a side's pseudo-gradient as a contribution's tensors, and back.

dense            the side's weights, so that base - weights is exact in float64
other codecs     base - weights, encoded with the side's error feedback (codecs/registry.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.sharding.codec import Codec, State
from rillflow_links.codecs.registry import GRADIENTS
from rillflow_links.config import LinksConfig
from rillflow_links.sides.packed import PackedFile, require_same_model
from rillflow_links.sides.store import damaged

DENSE = "dense"


class WholeWeights:
    """A tensor's own bytes."""

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec."""
        del state
        return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).clone()

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec."""
        del state
        if payload.numel() != into.nbytes:
            raise WeightError(f"{payload.numel():,} bytes are sent", why=f"the tensor has {into.nbytes:,}")
        into.copy_(payload.view(into.dtype).view(into.shape))


def encoded(
    coding: Mapping[str, Any],
    base: Mapping[str, Tensor],
    local: Mapping[str, Tensor],
    states: dict[str, State],
) -> dict[str, Tensor]:
    """Return the payload of each tensor, bytes [N], and update the states.

    Args:
        coding: settings of ``[links]`` that make the codec.
        base: the global weights that the side started from.
        local: its weights now.
        states: error feedback by tensor.
    """
    codec, is_dense = _codec(coding), coding["gradients"] == DENSE
    return {
        name: codec.encode(
            weights if is_dense else base[name].to(weights.device) - weights, states.setdefault(name, {})
        )
        for name, weights in local.items()
    }


def require_decodable(file: PackedFile, base: Mapping[str, Tensor], name: str) -> None:
    """Refuse a contribution that cannot be merged.

    Raises:
        SideError: it is of another model, cannot be decoded, or has a number that is not finite.
    """
    shapes = {each: tuple(base.get(each, payload).shape) for each, payload in file.tensors.items()}
    require_same_model(base, shapes, name)
    for each in sorted(base):
        if not bool(pseudo_gradient(file, base, each, name).isfinite().all()):
            raise damaged(name, f"{each} has a number that is not finite")


def pseudo_gradient(file: PackedFile, base: Mapping[str, Tensor], tensor: str, name: str) -> Tensor:
    """Return base - weights of one tensor, as the side sent it.

    Raises:
        SideError: the payload cannot be decoded.
    """
    coding, into = file.facts.get("coding"), torch.zeros_like(base[tensor])
    try:
        if not isinstance(coding, dict):
            raise TypeError("it names no codec")
        _codec(coding).decode(file.tensors[tensor], into, {})
    except (WeightError, ValidationError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(name, f"{tensor} cannot be decoded: {str(error).splitlines()[0]}") from error
    return base[tensor].double() - into.double() if coding["gradients"] == DENSE else into


def _codec(coding: Mapping[str, Any]) -> Codec:
    links = LinksConfig(**coding)
    return WholeWeights() if links.gradients == DENSE else GRADIENTS[links.gradients](links)
