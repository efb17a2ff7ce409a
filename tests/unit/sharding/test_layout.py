"""Layouts: the grouping of ranks, stages that are united, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Placement, Split
from rillflow.placement.slices import slices
from rillflow.sharding.layout import (
    Weight,
    generation_layout,
    generation_mesh,
    intervals,
    local_index,
    local_shape,
    logical_weights,
    training_layout,
)


def test_generation_groups_take_ranks_at_a_stride() -> None:
    mesh = generation_mesh(Mesh.of(dp=1, pp=1, tp=4), 2)
    assert mesh.names == ("dp", "micro_dp", "tp")
    assert mesh.groups("tp") == ((0, 2), (1, 3))
    assert mesh.groups("micro_dp") == ((0, 1), (2, 3))


@settings(max_examples=60, deadline=None)
@given(
    d=st.integers(1, 3),
    p=st.integers(1, 4),
    t_g=st.integers(1, 3),
    times=st.integers(1, 3),
)
def test_coordinates_follow_from_training(d: int, p: int, t_g: int, times: int) -> None:
    train = Mesh.of(dp=d, pp=p, tp=t_g * times)
    mesh = generation_mesh(train, t_g)
    assert sorted(mesh.ranks) == sorted(train.ranks)
    for rank in train.ranks:
        was, now = train.coordinates(rank), mesh.coordinates(rank)
        assert now["dp"] == was["dp"]
        assert now["tp"] == was["tp"] // times
        assert now["micro_dp"] == was["pp"] * times + was["tp"] % times


@pytest.mark.parametrize(
    ("tp", "said"),
    [
        (
            3,
            r"generation has tp 3 and training tp 4\n.*4 / 3 leaves 1\n.*choose .* among 1, 2, 4",
        ),
        (8, "4 / 8 leaves 4"),
        (0, "the minimum is 1"),
    ],
)
def test_sizes_that_do_not_divide(tp: int, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        generation_mesh(Mesh.of(dp=1, pp=3, tp=4), tp)


WEIGHTS = {
    name: Weight(name=name, shape=shape, dtype=torch.float32)
    for name, shape in (("embed", (8, 4)), ("up", (8, 4)), ("down", (4, 8)), ("norm", (4,)))
}
PARTS = {"embed": Split(0), "up": Split(0), "down": Split(1), "norm": Broadcast()}
STAGES = {"embed": (0, 1), "up": (0,), "down": (0,), "norm": (1,)}


def test_every_stage_has_its_own_ranks_and_a_tied_weight_those_of_two() -> None:
    found = training_layout(WEIGHTS, PARTS, STAGES, Mesh.of(dp=2, pp=2, tp=2))
    assert found["up"].mesh.ranks == (0, 1, 4, 5)
    assert found["norm"].mesh.ranks == (2, 3, 6, 7)
    assert found["embed"].mesh.ranks == tuple(range(8))
    held = slices(found["embed"], (8, 4))
    assert held[0] == held[2] == held[4] == held[6]


def test_sharding_cuts_what_tensor_parallelism_leaves() -> None:
    found = training_layout(WEIGHTS, PARTS, STAGES, Mesh.of(dp=2, pp=2, tp=2), fsdp=2)
    assert found["up"].order == ("tp", "fsdp")
    assert [str(slices(found["up"], (8, 4))[rank][0]) for rank in (0, 1, 4, 5)] == [
        "[0:2, 0:4]",
        "[4:6, 0:4]",
        "[2:4, 0:4]",
        "[6:8, 0:4]",
    ]
    assert str(slices(found["down"], (4, 8))[5][0]) == "[2:4, 4:8]"
    assert str(slices(found["norm"], (4,))[7][0]) == "[2:4]"


def test_copies_over_dp_are_cut_over_fsdp() -> None:
    found = training_layout(WEIGHTS, PARTS, STAGES, Mesh.of(dp=4, pp=2, tp=1), fsdp=2)
    held = [str(slices(found["up"], (8, 4))[rank][0]) for rank in found["up"].mesh.ranks]
    assert held == ["[0:4, 0:4]", "[4:8, 0:4]"] * 2


def test_a_number_is_never_cut() -> None:
    weights = {"scale": Weight(name="scale", shape=(), dtype=torch.float32)}
    found = training_layout(
        weights, {"scale": Broadcast()}, {"scale": (0,)}, Mesh.of(dp=2, pp=1, tp=1), fsdp=2
    )
    assert found["scale"].parts["fsdp"] == Broadcast()


def test_a_stage_that_is_not_there() -> None:
    with pytest.raises(PlacementError, match=r"up is placed on the pipeline stages \[2\]"):
        training_layout(WEIGHTS, PARTS, {**STAGES, "up": (2,)}, Mesh.of(dp=1, pp=2, tp=1))
    with pytest.raises(PlacementError, match="no axis 'pp'"):
        training_layout(WEIGHTS, PARTS, STAGES, Mesh.of(dp=1, tp=1))


def test_generation_brings_pipeline_stages_together() -> None:
    found = generation_layout(WEIGHTS, PARTS, generation_mesh(Mesh.of(dp=1, pp=2, tp=2), 2))
    assert [str(slices(found["up"], (8, 4))[rank][0]) for rank in range(4)] == [
        "[0:4, 0:4]",
        "[4:8, 0:4]",
    ] * 2


def test_tied_parameters_are_one_weight() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    module["head"].weight = module["embed"].weight
    found = logical_weights(module)
    assert list(found) == ["embed.weight"]
    assert found["embed.weight"].num_bytes == 96


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 24),
    runs=st.integers(1, 3),
    tp=st.integers(1, 4),
    dp=st.integers(1, 3),
    wide=st.integers(1, 4),
)
def test_a_box_is_found_in_the_own_tensor(length: int, runs: int, tp: int, dp: int, wide: int) -> None:
    placement = Placement(
        Mesh.of(dp=dp, tp=tp), {"tp": Split(0, runs=runs), "dp": Split(1)}, order=("tp", "dp")
    )
    shape = (length, wide)
    value = torch.arange(length * wide).view(shape)
    for rank, boxes in slices(placement, shape).items():
        held = intervals(placement, shape, rank)
        own = torch.full(local_shape(placement, shape, rank), -1)
        for box in boxes:
            where = tuple(slice(start, stop) for start, stop in box.bounds)
            own[local_index(held, box)] = value[where]
        rows = [row for start, stop in held[0] for row in range(start, stop)]
        columns = [column for start, stop in held[1] for column in range(start, stop)]
        assert torch.equal(own, value[rows][:, columns])


def test_a_box_that_is_not_here() -> None:
    placement = Placement(Mesh.of(tp=2), {"tp": Split(0)})
    box = slices(placement, (4,))[1][0]
    with pytest.raises(PlacementError, match="a rank does not hold 2:4"):
        local_index(intervals(placement, (4,), 0), box)


def test_experts_are_cut_over_ep_and_nothing_else_is() -> None:
    whole = {name: Broadcast() for name in PARTS}
    mesh = Mesh.of(dp=4, pp=1, tp=1)
    found = training_layout(WEIGHTS, whole, dict.fromkeys(STAGES, (0,)), mesh, ep=2, experts={"up"})
    held = [str(slices(found["up"], (8, 4))[rank][0]) for rank in range(4)]
    assert held == ["[0:4, 0:4]", "[4:8, 0:4]"] * 2
    assert str(slices(found["down"], (4, 8))[3][0]) == "[0:4, 0:8]"
