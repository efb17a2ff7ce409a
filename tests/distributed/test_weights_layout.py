"""Layouts compared with torch: the local tensors of tensor-parallel, sharded and plain parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Split
from rillflow.placement.slices import slices
from rillflow.sharding.layout import intervals, local_index, local_shape, logical_weights, training_layout
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from processes import together
from read_placements import read_placement

PARTS: dict[str, Part] = {
    "up.weight": Split(0),
    "up.bias": Split(0),
    "down.weight": Split(1),
    "down.bias": Broadcast(),
    "norm.weight": Broadcast(),
    "norm.bias": Broadcast(),
}


class Block(nn.Module):
    """A matrix split along either dim and a norm; FSDP2 needs a module that could run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up, self.down, self.norm = nn.Linear(6, width), nn.Linear(width, 7), nn.LayerNorm(5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(values))


def compared(ranks: Ranks, dp: int, tp: int, shard: bool, width: int) -> list[str]:
    """Return the weights whose local tensors differ from the layout's slices, with torch's placement."""
    module, whole = Block(width), {}
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            whole[name] = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
            tensor.copy_(whole[name])
    weights, mesh = logical_weights(module), Mesh.of(dp=dp, pp=1, tp=tp)
    device_mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if shard:
        fully_shard(module, mesh=device_mesh["dp"])
    layout = training_layout(
        weights, PARTS, dict.fromkeys(weights, (0,)), mesh, fsdp=mesh.axis("dp").size if shard else 1
    )
    wrong = []
    for name, tensor in module.named_parameters():
        shape, read = weights[name].shape, read_placement(tensor, mesh)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for placement in (layout[name], read):
            held = intervals(placement, shape, ranks.rank)
            made = torch.full(local_shape(placement, shape, ranks.rank), -1.0)
            for box in slices(placement, shape)[ranks.rank]:
                there = tuple(slice(start, stop) for start, stop in box.bounds)
                made[local_index(held, box)] = whole[name][there]
            if not torch.equal(made, own.detach()):
                wrong.append(f"{name} {placement} {own}")
        if slices(read, shape) != slices(layout[name], shape):
            wrong.append(f"{name}: read {read}, laid out {layout[name]}")
    return wrong


def everything_compared(ranks: Ranks) -> list[str]:
    """Compare even and uneven splits on every mesh of four ranks."""
    return [
        wrong
        for dp, tp, shard in ((2, 2, True), (1, 4, True), (4, 1, True), (2, 2, False))
        for width in (12, 10)
        for wrong in compared(ranks, dp, tp, shard, width)
    ]


def test_the_layout_is_what_torch_holds() -> None:
    assert together(4, everything_compared) == [[], [], [], []]


def read_runs(ranks: Ranks) -> list[str]:
    """Compare a fused weight of two runs, as torch splits it and as it is read."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(8 * 3, dtype=torch.float32).view(8, 3)
    wrong = []
    tensor = DTensor.from_local(
        torch.cat([whole[:4].chunk(2)[ranks.rank], whole[4:].chunk(2)[ranks.rank]]),
        device_mesh,
        [_StridedShard(0, split_factor=2)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    mesh = Mesh.of(tp=2)
    read = read_placement(tensor, mesh)
    if read.parts["tp"] != Split(0, runs=2) or not torch.equal(tensor.full_tensor(), whole):
        wrong.append(f"{read}")
    plain = distribute_tensor(whole, device_mesh, [Shard(1)])
    if read_placement(plain, mesh).parts["tp"] != Split(1):
        wrong.append("Shard(1)")
    for other in (Mesh.of(tp=4), Mesh.of(dp=2)):
        try:
            read_placement(plain, other)
            wrong.append(f"{other} was not refused")
        except PlacementError:
            continue
    return wrong


def test_a_fused_weight_is_read_as_runs() -> None:
    assert together(2, read_runs) == [[], []]
