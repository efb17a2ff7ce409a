"""Shards: whole weights from the shards of tensor-parallel ranks, and where the ranks' servers meet.

    rank 0: shard ─┐                       ┌─> server 0: vLLM's worker 0 takes its own shard
    rank 1: shard ─┴─ gather, one layer ───┴─> server 1: vLLM's worker 1 takes its own shard

vLLM shards and packs weights in its own way, so every worker is given whole ones, one layer at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rillflow.models.adapters import ADAPTER
from rillflow.workers.collectives import Ranks


class Shards:
    """Shards of a decoder's weights over the ranks that sample together.

    Args:
        module: this rank's shard of the decoder.
        tp: these ranks.
    """

    def __init__(self, module: Any, tp: Ranks) -> None:
        self._tp, self._shapes = tp, dict[str, torch.Size]()
        if tp.size > 1:
            with torch.device("meta"):
                like = type(module)(module.config)
            self._shapes = {name: each.shape for name, each in like.named_parameters(remove_duplicate=False)}

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole weights by name; every rank calls it with the same names, and gets all of them."""
        return {name: self._joined(name, weight) for name, weight in weights.items()}

    def _joined(self, name: str, weight: Tensor) -> Tensor:
        if self._tp.size == 1:
            return weight
        shape = self._shape_of(name, weight)
        for dim, length in enumerate(shape):
            if weight.shape[dim] != length:
                parts = self._tp.gather(weight.transpose(0, dim).contiguous())
                return torch.cat(parts).transpose(0, dim).contiguous()
        return weight

    def _shape_of(self, name: str, weight: Tensor) -> torch.Size:
        """Return the shape of the whole weight; an adapter's follows from its layer's."""
        layer, beside, kind = name.partition(f"{ADAPTER}.")
        if not beside:
            return self._shapes[name]
        outputs, inputs = self._shapes[f"{layer}.weight"]
        return torch.Size((outputs, weight.shape[1]) if kind == "up.weight" else (weight.shape[0], inputs))


def meeting_port(tp: Ranks) -> int:
    """Return a port of this node that was free a moment ago, the same on all ranks; 0 for one rank."""
    if tp.size == 1:
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = torch.tensor([free.getsockname()[1]])
    return int(tp.stack(own)[0])
