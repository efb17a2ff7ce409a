"""Bytes of the switch equal the formulas of HybridFlow (arXiv 2409.19256, table 2) on every mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Partial, Placement, Split
from rillflow.sharding.layout import (
    Layout,
    Weight,
    generation_layout,
    generation_mesh,
    training_layout,
)
from rillflow.sharding.reshard_plan import ReshardPlan, Way, reshard_plan


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A training mesh and a generation mesh."""

    p: int
    t: int
    d: int
    t_g: int

    def __str__(self) -> str:
        return f"p{self.p}t{self.t}d{self.d}-t{self.t_g}"


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


EVERY = [
    Sizes(p=p, t=t, d=d, t_g=t_g)
    for p in range(1, 9)
    for t in range(1, 8 // p + 1)
    for d in range(1, 8 // (p * t) + 1)
    for t_g in divisors(t)
]


def stack(layers: int, *, cut: bool) -> tuple[dict[str, Weight], dict[str, Split | Broadcast]]:
    """Return layers of matrices split by tp along either dim, or of unsplit vectors; all sizes divide."""
    weights, parts = {}, {}
    for layer in range(layers):
        shapes = {"up": (1680, 3), "down": (840, 1680)} if cut else {"norm": (840,)}
        for name, shape in shapes.items():
            full = f"layers.{layer}.{name}"
            weights[full] = Weight(name=full, shape=shape, dtype=torch.bfloat16)
            parts[full] = Split(0 if name == "up" else 1) if cut else Broadcast()
    return weights, parts


def layers_over(weights: dict[str, Weight], stages: int) -> dict[str, tuple[int, ...]]:
    count = 1 + max(int(name.split(".")[1]) for name in weights)
    return {name: (int(name.split(".")[1]) * stages // count,) for name in weights}


def planned(sizes: Sizes, *, cut: bool, shard: bool) -> tuple[ReshardPlan, int]:
    """Return the plan of a model with one layer per stage, and its bytes."""
    weights, parts = stack(sizes.p, cut=cut)
    train = Mesh.of(dp=sizes.d, pp=sizes.p, tp=sizes.t)
    stages = layers_over(weights, sizes.p)
    generate = generation_mesh(train, sizes.t_g)
    plan = reshard_plan(
        weights,
        training_layout(weights, parts, stages, train, fsdp=train.axis("dp").size if shard else 1),
        generation_layout(weights, parts, generate),
    )
    return plan, sum(weight.num_bytes for weight in weights.values())


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("sizes", EVERY, ids=str)
def test_zero_redundancy_a_rank_receives_what_it_misses_and_no_byte_more(
    sizes: Sizes, shard: bool, cut: bool
) -> None:
    plan, model = planned(sizes, cut=cut, shard=shard)
    t, t_g = (sizes.t, sizes.t_g) if cut else (1, 1)
    generating = model // t_g
    training = model // (t * sizes.p * (sizes.d if shard else 1))
    for rank in range(sizes.p * sizes.t * sizes.d):
        assert plan.received(rank) == generating - training
        assert plan.redundant(rank) == 0
        assert plan.peak(rank) == plan.wanted(rank) == generating
        assert plan.held(rank) == training
    if not shard:
        n = t * sizes.p
        assert (generating - training) * t_g * n == (n - t_g) * model
    assert sum(map(plan.sent, plan.ranks)) == sum(map(plan.received, plan.ranks))


def test_the_list_of_meshes_is_not_short() -> None:
    assert len(EVERY) == 63
    assert Sizes(p=2, t=4, d=1, t_g=2) in EVERY


def whole(weights: dict[str, Weight], mesh: Mesh) -> Layout:
    """Return the layout with every whole weight on every rank."""
    return {name: Placement(mesh) for name in weights}


def plain(weights: dict[str, Weight], parts: dict, sizes: Sizes) -> Layout:
    """Return a layout with generation groups of consecutive ranks, like training's."""
    mesh = Mesh.of(dp=sizes.d, micro_dp=sizes.p * sizes.t // sizes.t_g, tp=sizes.t_g)
    return generation_layout(weights, parts, mesh)


@pytest.mark.parametrize("sizes", EVERY, ids=str)
def test_the_other_designs_cost_what_their_formulas_say(sizes: Sizes) -> None:
    weights, parts = stack(sizes.p, cut=True)
    model = sum(weight.num_bytes for weight in weights.values())
    train = Mesh.of(dp=sizes.d, pp=sizes.p, tp=sizes.t)
    stages, everyone = layers_over(weights, sizes.p), whole(weights, train)
    grouped = plain(weights, parts, sizes)
    for shard, n in ((True, sizes.p * sizes.t * sizes.d), (False, sizes.p * sizes.t)):
        before = training_layout(weights, parts, stages, train, fsdp=train.axis("dp").size if shard else 1)
        gather, plan = reshard_plan(weights, before, everyone), reshard_plan(weights, before, grouped)
        for rank in train.ranks:
            assert gather.received(rank) * n == (n - 1) * model
            assert gather.peak(rank) == model
        most = max(map(plan.redundant, train.ranks))
        strided = sizes.t_g not in (1, sizes.t)
        assert most == (model // n if strided else most)
        assert most in (0, model // n)


def test_plain_grouping_holds_a_second_copy_where_ours_does_not() -> None:
    sizes = Sizes(p=1, t=4, d=1, t_g=2)
    weights, parts = stack(1, cut=True)
    model = sum(weight.num_bytes for weight in weights.values())
    before = training_layout(weights, parts, layers_over(weights, 1), Mesh.of(dp=1, pp=1, tp=4))
    plan = reshard_plan(weights, before, plain(weights, parts, sizes))
    assert [plan.redundant(rank) * 4 // model for rank in range(4)] == [0, 1, 1, 0]
    assert max(map(plan.peak, range(4))) * 4 == 3 * model


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of numbers that follow from the formulas, in units of 10^9 bytes."""

    parameters: int
    sizes: Sizes
    gather: float
    plain: float
    ours: float
    peak: float


@pytest.mark.parametrize(
    "line",
    [
        Published(
            parameters=70_000_000_000,
            sizes=Sizes(p=8, t=8, d=2, t_g=8),
            gather=138.9,
            plain=137.8,
            ours=15.3,
            peak=17.5,
        ),
        Published(
            parameters=7_000_000_000,
            sizes=Sizes(p=1, t=8, d=16, t_g=2),
            gather=13.9,
            plain=12.2,
            ours=5.25,
            peak=7.0,
        ),
    ],
    ids=["70B", "7B"],
)
def test_the_numbers_at_128_gpus(line: Published) -> None:
    s, layers = line.sizes, max(4, line.sizes.p)
    shape = (128, line.parameters // layers // 128)
    names = [f"layers.{layer}.weight" for layer in range(layers)]
    weights = {name: Weight(name=name, shape=shape, dtype=torch.bfloat16) for name in names}
    assert sum(weight.num_bytes for weight in weights.values()) == 2 * line.parameters
    parts = dict.fromkeys(weights, Split(0))
    train, stages = Mesh.of(dp=s.d, pp=s.p, tp=s.t), layers_over(weights, s.p)
    mesh = generation_mesh(train, s.t_g)
    replicated = training_layout(weights, parts, stages, train)
    sharded = training_layout(weights, parts, stages, train, fsdp=train.axis("dp").size)
    ours = reshard_plan(weights, replicated, generation_layout(weights, parts, mesh))
    for rank in (0, 63, 127):
        assert ours.received(rank) / 1e9 == pytest.approx(line.ours, abs=0.05)
        assert ours.peak(rank) / 1e9 == pytest.approx(line.peak)
        assert ours.redundant(rank) == 0
    replica = Mesh.of(dp=1, pp=s.p, tp=s.t)
    one = training_layout(weights, parts, stages, replica)
    assert reshard_plan(weights, one, whole(weights, replica)).received(0) / 1e9 == pytest.approx(
        line.plain, abs=0.055
    )
    gather = reshard_plan(weights, sharded, whole(weights, train))
    assert gather.received(0) / 1e9 == pytest.approx(line.gather, abs=0.05)
    assert gather.peak(0) == 2 * line.parameters


def llama(layers: int) -> tuple[dict[str, Weight], dict[str, Split | Broadcast]]:
    """Return the shapes of a model with 70 billion parameters."""
    shapes: dict[str, tuple[tuple[int, ...], Split | Broadcast]] = {"embed": ((32000, 8192), Split(0))}
    for layer in range(layers):
        for name, shape, part in (
            ("q", (8192, 8192), Split(0)),
            ("k", (1024, 8192), Split(0)),
            ("v", (1024, 8192), Split(0)),
            ("o", (8192, 8192), Split(1)),
            ("gate", (28672, 8192), Split(0)),
            ("up", (28672, 8192), Split(0)),
            ("down", (8192, 28672), Split(1)),
            ("norm", (8192,), Broadcast()),
            ("norm2", (8192,), Broadcast()),
        ):
            shapes[f"layers.{layer}.{name}"] = (shape, part)
    shapes |= {"norm": ((8192,), Broadcast()), "head": ((32000, 8192), Split(0))}
    weights = {
        name: Weight(name=name, shape=shape, dtype=torch.bfloat16) for name, (shape, _) in shapes.items()
    }
    return weights, {name: part for name, (_, part) in shapes.items()}


def test_equal_weights_are_planned_once() -> None:
    weights, parts = llama(80)
    train = Mesh.of(dp=2, pp=8, tp=8)
    stages = {
        name: (int(name.split(".")[1]) // 10,) if "." in name else ((0,) if name == "embed" else (7,))
        for name in weights
    }
    before = training_layout(weights, parts, stages, train, fsdp=train.axis("dp").size)
    plan = reshard_plan(weights, before, generation_layout(weights, parts, generation_mesh(train, 8)))
    assert len(weights) == 723
    assert len({id(moves) for moves in plan.by_weight.values()}) <= 8 * 6 + 3
    assert all(plan.redundant(rank) == 0 for rank in plan.ranks)


def buckets_of(most_bytes: int) -> tuple[ReshardPlan, list]:
    weights, parts = stack(4, cut=True)
    train, stages = Mesh.of(dp=1, pp=2, tp=4), layers_over(weights, 2)
    before = training_layout(weights, parts, stages, train)
    plan = reshard_plan(weights, before, generation_layout(weights, parts, generation_mesh(train, 2)))
    return plan, list(replace(plan, most_bytes=most_bytes).buckets)


@pytest.mark.parametrize("most_bytes", [500, 5_000, 100_000, 2**30])
def test_buckets_hold_everything_once_and_no_rank_more_than_they_may(most_bytes: int) -> None:
    plan, buckets = buckets_of(most_bytes)
    row = 1680 * 2  # a row is not split
    for rank in plan.ranks:
        ways: tuple[Way, Way] = ("received", "sent")
        loads = [
            [2 * sum(c.slice.size for c in plan.crossing(way, bucket.parts, rank)) for bucket in buckets]
            for way in ways
        ]
        assert sum(loads[0]) == plan.received(rank)
        assert sum(loads[1]) == plan.sent(rank)
        assert max(loads[0] + loads[1]) <= max(most_bytes * 1.01, 6 * row)
    assert {part.name for bucket in buckets for part in bucket.parts} == set(plan.weights)


def test_the_stages_of_a_pipeline_send_at_once() -> None:
    plan, buckets = buckets_of(3_000_000)
    assert len(buckets) > 1
    for bucket in buckets[:-1]:
        sending = {plan.source[part.name].mesh.ranks for part in bucket.parts}
        assert len(sending) == 2


def test_a_single_number_crosses_whole() -> None:
    """It has no dim to split; the second stage holds it, and the first one needs it too."""
    weights = {"scale": Weight(name="scale", shape=(), dtype=torch.float32)}
    parts, train = {"scale": Broadcast()}, Mesh.of(dp=1, pp=2, tp=1)
    source = training_layout(weights, parts, {"scale": (1,)}, train)
    plan = reshard_plan(weights, source, generation_layout(weights, parts, generation_mesh(train, 1)))
    (bucket,) = replace(plan, most_bytes=1).buckets
    assert [(move.peer, move.slice.size) for move in plan.crossing("received", bucket.parts, 0)] == [(1, 1)]


def test_weights_of_two_types_have_their_own_buckets() -> None:
    weights, parts = stack(1, cut=True)
    weights["layers.0.up"] = replace(weights["layers.0.up"], dtype=torch.float32)
    train = Mesh.of(dp=1, pp=1, tp=2)
    before = training_layout(weights, parts, layers_over(weights, 1), train)
    plan = reshard_plan(weights, before, generation_layout(weights, parts, generation_mesh(train, 1)))
    assert {bucket.dtype for bucket in plan.buckets} == {torch.float32, torch.bfloat16}
    assert plan.received(0) == 1680 * 3 * 4 // 2 + 840 * 1680 * 2 // 2


def test_what_cannot_be_planned() -> None:
    weights, _ = stack(1, cut=False)
    mesh = Mesh.of(tp=2)
    there = {"layers.0.norm": Placement(mesh)}
    with pytest.raises(PlacementError, match=r"the source layout has no placement for layers.0.norm"):
        reshard_plan(weights, {"layers.0.nrm": Placement(mesh)}, there)
    with pytest.raises(PlacementError, match="is Partial in the destination"):
        reshard_plan(weights, there, {"layers.0.norm": Placement(mesh, {"tp": Partial()})})
    with pytest.raises(PlacementError, match="a bucket has 0 bytes"):
        replace(reshard_plan(weights, there, there), most_bytes=0).buckets  # noqa: B018


def test_nothing_moves_between_equal_layouts() -> None:
    weights, parts = stack(1, cut=True)
    train = Mesh.of(dp=1, pp=1, tp=2)
    before = training_layout(weights, parts, layers_over(weights, 1), train)
    plan = reshard_plan(weights, before, generation_layout(weights, parts, generation_mesh(train, 2)))
    assert not plan.moves
    assert all(plan.is_same(name, rank) for name in weights for rank in (0, 1))
    assert not any(bucket.moves for bucket in plan.buckets)


def test_a_bucket_is_filled_to_the_byte() -> None:
    """A rank sends, receives and keeps 500 bytes of each weight: two weights fill a bucket of 1,000."""
    weights = {
        f"w{place}": Weight(name=f"w{place}", shape=(50, 5), dtype=torch.float32) for place in range(4)
    }
    parts, train = dict.fromkeys(weights, Split(0)), Mesh.of(dp=1, pp=1, tp=2)
    source = training_layout(weights, parts, dict.fromkeys(weights, (0,)), train)
    plan = reshard_plan(weights, source, generation_layout(weights, parts, generation_mesh(train, 1)))
    assert [len(bucket.parts) for bucket in replace(plan, most_bytes=1_000).buckets] == [2, 2]
    assert [len(bucket.parts) for bucket in replace(plan, most_bytes=999).buckets] == [1, 1, 1, 1]
