"""Damage to weights on their way into an engine with its own copy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

EMBEDDING = "model.embed_tokens.weight"
SQUARE = "model.layers.0.self_attn.o_proj.weight"
KINDS = ("missing", "stale", "transposed", "scaled")


def damaged(kind: str, version: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that arrive, from the first publish on."""
    arrived = dict(weights)
    if version == 0 or not kind:
        return arrived
    if kind == "missing":
        del arrived[EMBEDDING]
    elif kind == "stale":
        arrived.clear()
    elif kind == "transposed":
        arrived[SQUARE] = weights[SQUARE].T
    elif kind == "scaled":
        arrived[EMBEDDING] = weights[EMBEDDING] * 1.01
    return arrived
