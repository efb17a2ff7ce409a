"""Digests over real ranks: one value under every mesh, checked on every replica."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Split
from rillflow.sharding.digest import Digests, digests, verify
from rillflow.sharding.layout import Weight, generation_layout, generation_mesh, training_layout
from rillflow.sharding.reshard_plan import reshard_plan
from rillflow.sharding.switch import WeightSwitch
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from processes import together

PARTS: dict[str, Part] = {"up": Split(0), "down": Split(1), "norm": Broadcast()}
WEIGHTS = {
    name: Weight(name=name, shape=shape, dtype=torch.float32)
    for name, shape in (("up", (16, 6)), ("down", (6, 16)), ("norm", (8,)))
}


def whole(name: str) -> Tensor:
    return torch.randn(WEIGHTS[name].shape, generator=torch.Generator().manual_seed(len(name)))


def checked(ranks: Ranks, wrong_rank: int, shard: bool) -> str:
    """Return the error if one rank's generation weights are off by a bit, and the replica that it names."""
    mesh = Mesh.of(dp=2, pp=1, tp=2)
    layout = training_layout(
        WEIGHTS, PARTS, dict.fromkeys(WEIGHTS, (0,)), mesh, fsdp=mesh.axis("dp").size if shard else 1
    )
    at = mesh.coordinates(ranks.rank)
    training = {}
    for name, part in PARTS.items():
        cut = whole(name).chunk(2, part.dim)[at["tp"]] if isinstance(part, Split) else whole(name)
        training[name] = (cut.chunk(2)[at["dp"]] if shard else cut).clone()
    bfloat16 = {name: replace(each, dtype=torch.bfloat16) for name, each in WEIGHTS.items()}
    announced = Digests(version=5, of=digests(bfloat16, layout, training, ranks))
    destination = generation_mesh(mesh, 1)
    plan = reshard_plan(bfloat16, layout, generation_layout(bfloat16, PARTS, destination))
    generation = WeightSwitch(plan, ranks, training).to_generation()
    if ranks.rank == wrong_rank:
        generation["down"][3, 3] += 1
    replicas = destination.groups("tp")
    own = ranks.part(replicas)
    members = next(group for group in replicas if ranks.rank in group)
    found = digests(bfloat16, plan.destination, generation, own, members=members)
    try:
        verify(announced, Digests(version=5, of=found))
    except WeightError as error:
        return str(error).splitlines()[0]
    return ""


def every_rank_wrong_once(ranks: Ranks) -> list[str]:
    return [checked(ranks, wrong, shard) for shard in (False, True) for wrong in range(5)]


def test_every_replica_answers_for_itself() -> None:
    said = "down differs from what was published as version 5"
    found = together(4, every_rank_wrong_once)
    for rank in range(4):
        assert found[rank] == [said if wrong == rank else "" for wrong in range(5)] * 2
