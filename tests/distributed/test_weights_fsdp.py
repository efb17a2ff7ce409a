"""The switch under FSDP2 and tensor parallelism does not change training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Split
from rillflow.sharding.layout import (
    generation_layout,
    generation_mesh,
    logical_weights,
    training_layout,
)
from rillflow.sharding.reshard_plan import reshard_plan
from rillflow.sharding.switch import WeightSwitch
from rillflow.sharding.tensor import own
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from processes import together

PARTS: dict[str, Part] = {
    "up.weight": Split(0),
    "up.bias": Split(0),
    "down.weight": Split(1),
    "down.bias": Broadcast(),
    "norm.weight": Broadcast(),
    "norm.bias": Broadcast(),
}


class Block(nn.Module):
    """A module with uneven sizes: five inputs over two ranks are padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(values))))


def parallel(dtype: torch.dtype) -> nn.Module:
    """Return a module on two ranks of tp, then sharded over two of dp."""
    module = Block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return module


def step(module: nn.Module, optimizer: torch.optim.Optimizer, values: Tensor) -> Tensor:
    found = module(values)
    found.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return found.detach().clone()


def trained(ranks: Ranks, generating: torch.dtype, tp: int) -> list[str]:
    """Run three steps with a switch after each and without; return the differences."""
    wrong = []
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    modules = [parallel(torch.float32), parallel(torch.float32)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in modules]
    weights, mesh = logical_weights(Block()), Mesh.of(dp=2, pp=1, tp=2)
    source = training_layout(weights, PARTS, dict.fromkeys(weights, (0,)), mesh, fsdp=mesh.axis("dp").size)
    destination = generation_layout(weights, PARTS, generation_mesh(mesh, tp))
    crossing = {name: replace(each, dtype=generating) for name, each in weights.items()}
    plan = reshard_plan(crossing, source, destination)
    switch = WeightSwitch(plan, ranks, dict(modules[0].named_parameters()))
    alike = generating == torch.float32
    before = switch.held_bytes
    for _ in range(3):
        found, wanted = (
            step(module, optimizer, values) for module, optimizer in zip(modules, optimizers, strict=True)
        )
        wrong += [] if torch.equal(found, wanted) else [f"outputs {found} {wanted}"]
        whole = {name: tensor.full_tensor().detach() for name, tensor in modules[1].named_parameters()}
        generation = switch.to_generation()
        left = sum(own(tensor).untyped_storage().nbytes() for tensor in modules[0].parameters())
        wrong += [f"{left} bytes of training stayed"] if (left == 0) != alike else []
        if alike and switch.held_bytes != plan.wanted(ranks.rank):
            wrong.append(f"{switch.held_bytes} {plan.wanted(ranks.rank)}")
        shard = ranks.rank % 2 * tp // 2
        for name, tensor in generation.items():
            part = PARTS[name]
            cut = whole[name].chunk(tp, part.dim)[shard] if isinstance(part, Split) else whole[name]
            wrong += [] if torch.equal(tensor, cut.to(generating)) else [f"{name} {tensor} {cut}"]
        switch.to_training()
        wrong += [f"{switch.held_bytes} {before}"] if switch.held_bytes != before else []
    received = switch.resharding.received_bytes
    wrong += [] if received == 3 * plan.received(ranks.rank) else [f"{received} received"]
    return wrong


def all_trained(ranks: Ranks) -> list[str]:
    return [
        wrong
        for generating in (torch.float32, torch.bfloat16)
        for tp in (1, 2)
        for wrong in trained(ranks, generating, tp)
    ]


def test_training_goes_on_as_if_it_had_never_switched() -> None:
    assert together(4, all_trained) == [[], [], [], []]
