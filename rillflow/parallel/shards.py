"""Shards: parameters, gradients and optimiser state cut over the data-parallel ranks (FSDP2).

    layer i    gathered ─ forward ─ let go      gathered ─ backward ─ gradients summed and cut ─ let go

A unit is a layer; embedding, norm and head are one more. Gradients are summed, never averaged: a loss
travels as a sum over the denominator of all ranks. Each micro-batch gathers and sums anew, so a rank never
holds more than its own share and one unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(root: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the parameters in place.

    Args:
        root: whose forward pass is called.
        layers: its parts that are gathered one at a time.
        mesh: the dp axis.
    """
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # narrow gradients are summed in float32
    for unit in (*layers, root):
        narrow = any(weight.dtype.itemsize < 4 for weight in unit.parameters())
        policy = wide if narrow else MixedPrecisionPolicy()
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
