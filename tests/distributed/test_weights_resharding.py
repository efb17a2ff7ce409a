"""Weights that move between real ranks: bits, bytes sent, memory, and ranks that die."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rillflow.errors import ClusterError, PlacementError, WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Part, Placement, Split
from rillflow.placement.slices import slices
from rillflow.sharding.layout import (
    Layout,
    Weight,
    Weights,
    generation_layout,
    generation_mesh,
    intervals,
    local_index,
    local_shape,
    training_layout,
)
from rillflow.sharding.reshard_plan import ReshardPlan, reshard_plan
from rillflow.sharding.resharding import Resharding, keep, pack, unpack
from rillflow.sharding.switch import WeightSwitch
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks

sys.path.insert(0, str(Path(__file__).parent))
from processes import together

LAYERS = 4
PARTS: dict[str, Part] = {"embed": Split(0), "norm": Broadcast(), "head": Split(0)}
SHAPES = {"embed": (48, 12), "norm": (12,), "head": (48, 12)}
for layer in range(LAYERS):
    for name, shape, part in (
        ("up", (24, 12), Split(0)),
        ("down", (12, 24), Split(1)),
        ("fused", (32, 12), Split(0, runs=2)),
        ("norm", (12,), Broadcast()),
        ("bias", (24,), Split(0)),
    ):
        SHAPES[f"layers.{layer}.{name}"], PARTS[f"layers.{layer}.{name}"] = shape, part


def model(dtype: torch.dtype = torch.float32) -> dict[str, Weight]:
    """Return the weights of a small decoder; the embedding is tied to the head of the last stage."""
    return {name: Weight(name=name, shape=shape, dtype=dtype) for name, shape in SHAPES.items()}


def stages(p: int) -> dict[str, tuple[int, ...]]:
    ends = {"embed": tuple(sorted({0, p - 1})), "norm": (p - 1,), "head": (p - 1,)}
    return {name: ends[name] if name in ends else (int(name.split(".")[1]) * p // LAYERS,) for name in SHAPES}


def whole(weight: Weight) -> Tensor:
    """Return the value of a weight: the same on all ranks, different at every element."""
    generator = torch.Generator().manual_seed(sum(map(ord, weight.name)))
    return torch.randn(weight.shape, generator=generator).to(weight.dtype)


def slices_of(weights: Weights, layout: Layout, rank: int, *, filled: bool = True) -> dict[str, Tensor]:
    """Return a rank's slices under a layout, or NaN tensors that will receive them."""
    found = {}
    for name, weight in weights.items():
        placement = layout[name]
        if rank not in placement.mesh.ranks:
            continue
        held = intervals(placement, weight.shape, rank)
        found[name] = torch.full(local_shape(placement, weight.shape, rank), float("nan"), dtype=weight.dtype)
        for box in slices(placement, weight.shape)[rank] if filled else ():
            there = tuple(slice(start, stop) for start, stop in box.bounds)
            found[name][local_index(held, box)] = whole(weight)[there]
    return found


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def plans(d: int, p: int, t: int, weights: Weights) -> Iterable[tuple[ReshardPlan, str]]:
    """Yield every generation mesh of a training mesh, replicated and sharded over d."""
    train = Mesh.of(dp=d, pp=p, tp=t)
    for shard in (False, True) if d > 1 else (False,):
        for t_g in (part for part in range(1, t + 1) if t % part == 0):
            generation = generation_layout(weights, PARTS, generation_mesh(train, t_g))
            training = training_layout(
                weights, PARTS, stages(p), train, fsdp=train.axis("dp").size if shard else 1
            )
            yield reshard_plan(weights, training, generation), f"{d}x{p}x{t} to {t_g} {shard}"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def switched(ranks: Ranks, meshes: list[tuple[int, int, int]]) -> list[str]:
    """Return the errors after every switch to generation and back."""
    wrong = []
    for d, p, t in meshes:
        for plan, title in plans(d, p, t, model()):
            training = slices_of(plan.weights, plan.source, ranks.rank)
            switch = WeightSwitch(replace(plan, most_bytes=3_000), ranks, training)
            for turn in (1, 2):
                generation = switch.to_generation()
                said = storage_bytes([*generation.values(), *training.values()])
                wanted = slices_of(plan.weights, plan.destination, ranks.rank)
                wrong += [f"{title}: {name}" for name in differing(generation, wanted)]
                numbers = {
                    "sent": (switch.resharding.sent_bytes, turn * plan.sent(ranks.rank)),
                    "received": (switch.resharding.received_bytes, turn * plan.received(ranks.rank)),
                    "generating": (switch.held_bytes, plan.wanted(ranks.rank)),
                    "storages": (said, plan.wanted(ranks.rank)),
                }
                switch.to_training()
                numbers["after"] = (switch.held_bytes, plan.held(ranks.rank))
                numbers["over"] = (max(0, switch.peak_bytes - plan.peak(ranks.rank) - 3_000), 0)
                numbers["buffers"] = (max(0, switch.buffer_bytes - 6_000), 0)
                wrong += [
                    f"{title} {what}: {one} {other}" for what, (one, other) in numbers.items() if one != other
                ]
                kept = slices_of(plan.weights, plan.source, ranks.rank)
                wrong += [f"{title}: {name} came back" for name in differing(training, kept)]
    return wrong


def meshes_of(size: int) -> list[tuple[int, int, int]]:
    return [
        (d, p, size // (d * p))
        for d in range(1, size + 1)
        for p in range(1, min(size, LAYERS) + 1)
        if size % (d * p) == 0
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_mesh_there_and_back(size: int) -> None:
    assert together(size, switched, meshes_of(size)) == [[]] * size


def test_some_meshes_of_eight() -> None:
    assert together(8, switched, [(2, 2, 2), (1, 4, 2), (1, 1, 8)]) == [[]] * 8


def crossed_apart(ranks: Ranks) -> list[str]:
    """Move weights from ranks 0 and 1 to ranks 2 and 3: in one group, and packed."""
    weights, wrong = model(torch.bfloat16), []
    weights["norm"] = replace(weights["norm"], dtype=torch.float32)
    source = training_layout(weights, PARTS, stages(1), Mesh.of(dp=1, pp=1, tp=2))
    destination = generation_layout(weights, PARTS, Mesh.of(dp=2, tp=1, first=2))
    plan = reshard_plan(weights, source, destination)
    here = slices_of(weights, source, ranks.rank)
    there = slices_of(weights, destination, ranks.rank, filled=False)
    resharding = Resharding(replace(plan, most_bytes=2_000), ranks)
    for place, bucket in enumerate(resharding.plan.buckets):
        for part in bucket.parts:
            if part.is_last:
                keep(plan, part.name, ranks.rank, here, there)
        resharding.pack(place, here)
        resharding.exchange(place, there)
    resharding.close()
    wrong += differing(there, slices_of(weights, destination, ranks.rank))
    if (resharding.sent_bytes, resharding.received_bytes) != (
        plan.sent(ranks.rank),
        plan.received(ranks.rank),
    ):
        wrong.append(f"{resharding.sent_bytes} sent, {resharding.received_bytes} received")
    for receiver in (2, 3):
        again = slices_of(weights, destination, receiver, filled=False)
        for bucket, sender in product(resharding.plan.buckets, (0, 1)):
            packed = pack(plan, sender, receiver, slices_of(weights, source, sender), bucket.parts)
            unpack(plan, receiver, sender, packed, again, bucket.parts)
        wrong += differing(again, slices_of(weights, destination, receiver))
    return wrong


def test_to_other_ranks() -> None:
    assert together(4, crossed_apart) == [[], [], [], []]


def with_masters(ranks: Ranks) -> list[object]:
    """Switch float32 training weights to bfloat16 generation weights."""
    weights = model(torch.bfloat16)
    ((plan, _),) = [
        (plan, title) for plan, title in plans(1, 1, 2, weights) if title.startswith("1x1x2 to 1 ")
    ]
    training = slices_of(model(), plan.source, ranks.rank)
    before = {name: tensor.clone() for name, tensor in training.items()}
    switch = WeightSwitch(plan, ranks, training)
    wanted = slices_of(weights, plan.destination, ranks.rank)
    wrong: list[object] = list(differing(switch.to_generation(), wanted))
    masters = sum(tensor.nbytes for tensor in training.values())
    if switch.held_bytes != masters + plan.wanted(ranks.rank):
        wrong.append(switch.held_bytes)
    if switch.resharding.received_bytes != plan.received(ranks.rank):
        wrong.append(switch.resharding.received_bytes)
    switch.to_training()
    if switch.held_bytes != masters:
        wrong.append(switch.held_bytes)
    return [*wrong, *differing(training, before)]


def test_masters_stay() -> None:
    assert together(2, with_masters) == [[], []]


def of_unequal_runs(ranks: Ranks) -> list[str]:
    """Switch queries, keys and values in one tensor: every run is a weight, and a view of the same memory."""
    runs = {"qkv.0": 8, "qkv.1": 4, "qkv.2": 4}
    weights = {name: Weight(name=name, shape=(rows, 6), dtype=torch.float32) for name, rows in runs.items()}
    parts, train = dict.fromkeys(weights, Split(0)), Mesh.of(dp=1, pp=1, tp=2)
    source = training_layout(weights, parts, dict.fromkeys(weights, (0,)), train)
    plan = reshard_plan(weights, source, generation_layout(weights, parts, generation_mesh(train, 1)))
    pieces = slices_of(weights, source, ranks.rank)
    fused = torch.cat(list(pieces.values()))
    views = dict(zip(runs, fused.split([rows // 2 for rows in runs.values()]), strict=True))
    switch = WeightSwitch(plan, ranks, views)
    wrong = differing(switch.to_generation(), slices_of(weights, plan.destination, ranks.rank))
    wrong += ["the memory stayed"] if fused.untyped_storage().nbytes() else []
    switch.to_training()
    return [*wrong, *differing(views, pieces)]


def test_a_fused_weight_of_unequal_runs() -> None:
    assert together(2, of_unequal_runs) == [[], []]


def die_on_the_way(ranks: Ranks, how: str, told: Path | None = None) -> str:
    ((plan, _), *_) = list(plans(1, 1, 2, model()))
    switch = WeightSwitch(plan, ranks, slices_of(plan.weights, plan.source, ranks.rank))
    switch.resharding.deadline_s = 1.0
    if ranks.rank == 1:
        if how == "dies":
            dist.barrier()
            os._exit(1)
        while told is not None and not told.exists():
            time.sleep(0.05)
        return ""
    if how == "dies":
        dist.barrier()
    try:
        switch.to_generation()
    except ClusterError as error:
        return str(error)
    finally:
        if told is not None:
            told.touch()
    return "nothing was said"


def test_a_rank_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    said, _ = together(2, die_on_the_way, "sleeps", tmp_path / "told")
    assert "rank 0 stopped at bucket 1 of" in said
    assert "ranks [1]" in said
    assert "did not respond within 1 s" in said


def test_a_rank_that_dies_is_an_error_of_the_others() -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code 1"):
        together(2, die_on_the_way, "dies")


def test_one_rank_generates_with_the_memory_it_trains() -> None:
    ((plan, _),) = plans(1, 1, 1, model())
    training = slices_of(plan.weights, plan.source, 0)
    switch = WeightSwitch(plan, SingleRank(), training)
    generation = switch.to_generation()
    assert all(generation[name].data_ptr() == training[name].data_ptr() for name in training)
    assert switch.peak_bytes == switch.held_bytes == plan.held(0)
    crossed = switch.resharding
    assert (crossed.sent_bytes, crossed.received_bytes, switch.buffer_bytes) == (0, 0, 0)


def test_what_cannot_switch() -> None:
    ((plan, _), *_) = list(plans(1, 1, 2, model()))
    training = slices_of(plan.weights, plan.source, 0)
    with pytest.raises(PlacementError, match=r"between 2 ranks, up to rank 1\n.*the pool has 1"):
        WeightSwitch(plan, SingleRank(), training)
    with pytest.raises(ClusterError, match="threads of one process"):
        WeightSwitch(plan, ThreadRanks(ThreadGroup(2, 1.0), 0), training)
    ((one, _),) = plans(1, 1, 1, model())
    with pytest.raises(WeightError, match=r"rank 0 holds \[24, 12\] of embed\n.*\[48, 12\] of \[48, 12\]"):
        WeightSwitch(one, SingleRank(), training)
    complete = slices_of(one.weights, one.source, 0)
    with pytest.raises(WeightError, match="rank 0 has no norm"):
        WeightSwitch(one, SingleRank(), {name: tensor for name, tensor in complete.items() if name != "norm"})
    switch = WeightSwitch(one, SingleRank(), complete)
    with pytest.raises(WeightError, match="is already training"):
        switch.to_training()
    switch.to_generation()
    with pytest.raises(WeightError, match="is already generating"):
        switch.to_generation()
    parts = [part for bucket in plan.buckets for part in bucket.parts]
    packed = pack(plan, 0, 1, training, parts)
    with pytest.raises(WeightError, match="the plan has"):
        unpack(plan, 1, 0, packed[:-4], slices_of(plan.weights, plan.destination, 1), parts)


def test_a_tensor_of_no_rank_is_not_asked_for() -> None:
    weights = {"far": Weight(name="far", shape=(2,), dtype=torch.float32)}
    layout = {"far": Placement(Mesh.of(dp=1, first=0))}
    plan = reshard_plan(weights, layout, layout)
    assert dict(WeightSwitch(plan, SingleRank(), {"far": torch.ones(2)}).to_generation()).keys() == {"far"}


def of_padded_halves(ranks: Ranks) -> list[object]:
    """Switch four weights of 1,000 bytes; each rank trains one half, in a buffer of 600 bytes."""
    weights = {
        name: Weight(name=name, shape=(50, 5), dtype=torch.float32)
        for name in ("one", "two", "three", "four")
    }
    parts, train = dict.fromkeys(weights, Split(0)), Mesh.of(dp=1, pp=1, tp=2)
    source = training_layout(weights, parts, dict.fromkeys(weights, (0,)), train)
    plan = reshard_plan(weights, source, generation_layout(weights, parts, generation_mesh(train, 1)))
    memories = {name: torch.full((30, 5), 7.0) for name in weights}
    held = {name: memory[:25] for name, memory in memories.items()}
    switch = WeightSwitch(replace(plan, most_bytes=500), ranks, held)
    before = switch.held_bytes
    switch.to_generation()
    found: list[object] = [before, switch.peak_bytes, switch.held_bytes, switch.buffer_bytes]
    switch.to_training()
    beside = torch.stack([memory[25:] for memory in memories.values()])
    return [
        *found,
        torch.equal(beside, torch.zeros(4, 5, 5)),
        all(bool((m[:25] == 7).all()) for m in memories.values()),
    ]


def test_the_peak_is_that_of_the_last_weight_beside_its_half_and_no_garbage_comes_back() -> None:
    """With a weight per bucket, the peak is four whole weights plus the fourth half before that is freed."""
    assert together(2, of_padded_halves) == [[2_400, 4_600, 4_000, 1_000, True, True]] * 2
