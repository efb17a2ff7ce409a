"""What a boxing costs: the published tables, two axes, even load.

Shapes are divisible here, so that bytes are the formulas' own; uneven ones are in test_boxing_moves.py.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product
from math import prod

import pytest

from rillflow.placement.boxing import Boxing, Move, boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Placement, Split
from rillflow.placement.slices import Slice

SHAPE = (48, 48)
T = prod(SHAPE) * 4
"""Bytes of the value."""
SBP = {"S0": Split(0), "S1": Split(1), "B": Broadcast()}
PAIRS = list(product(SBP, SBP))


def on(mesh: Mesh, part) -> Placement:
    return Placement(mesh, {"x": part})


def received(plan: Boxing, rank: int | None = None) -> int:
    """The bytes that a rank receives, or all of them together."""
    return 4 * sum(move.slice.size for move in plan.moves if rank in (None, move.destination))


def same_devices(before: str, after: str, p: int) -> float:
    """OneFlow (arXiv 2110.15032), Table 2, p1 = p2 on the same devices."""
    if before == after or before == "B":
        return 0
    return (p - 1) * T if after == "B" else (p - 1) / p * T


def apart(after: str, p2: int) -> float:
    """The same table, on sets of devices that share none."""
    return T + (p2 - 1) * T * (after == "B")


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_table_on_the_same_devices(before: str, after: str, p: int) -> None:
    mesh = Mesh.of(x=p)
    plan = boxing(on(mesh, SBP[before]), on(mesh, SBP[after]), SHAPE)
    assert received(plan) == same_devices(before, after, p)


@pytest.mark.parametrize(("p1", "p2"), [(2, 2), (4, 2), (2, 6), (1, 8), (8, 1)])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_table_on_devices_apart(before: str, after: str, p1: int, p2: int) -> None:
    plan = boxing(on(Mesh.of(x=p1), SBP[before]), on(Mesh.of(x=p2, first=p1), SBP[after]), SHAPE)
    assert received(plan) == apart(after, p2)


def sent(plan: Boxing) -> dict[int, int]:
    counted: Counter[int] = Counter()
    for move in plan.moves:
        counted[move.source] += move.slice.size * 4
    return dict(counted)


TWO_AXES = [dict(zip("ab", parts, strict=True)) for parts in product(SBP.values(), SBP.values())]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (4, 2)])
def test_two_axes_cost_no_more_than_one_after_the_other(sizes: tuple[int, int]) -> None:
    mesh = Mesh.of(a=sizes[0], b=sizes[1])
    for before, after in product(TWO_AXES, TWO_AXES):
        direct = received(boxing(Placement(mesh, before), Placement(mesh, after), SHAPE))
        for order in permutations("ab"):
            between = before | {order[0]: after[order[0]]}
            steps = [Placement(mesh, parts) for parts in (before, between, after)]
            cost = sum(received(boxing(*steps[place : place + 2], SHAPE)) for place in (0, 1))
            assert direct <= cost, (before, after)


def test_two_axes_in_numbers() -> None:
    mesh = Mesh.of(dp=4, tp=2)
    gathered = boxing(
        Placement(mesh, {"dp": Split(0), "tp": Split(0)}, order=("tp", "dp")),
        Placement(mesh, {"tp": Split(0)}),
        SHAPE,
    )
    assert received(gathered) == 3 * T
    assert {frozenset((move.source % 2, move.destination % 2)) for move in gathered.moves} == {
        frozenset({0}),
        frozenset({1}),
    }


@pytest.mark.parametrize(
    ("t", "t_g", "d"), [(8, 2, 1), (8, 2, 2), (8, 4, 2), (8, 8, 2), (8, 1, 3), (4, 2, 4)]
)
def test_train_mesh_to_generation_mesh(t: int, t_g: int, d: int) -> None:
    """HybridFlow (arXiv 2409.19256), Table 2, its own grouping, tensor parallelism only."""
    train = Placement(Mesh.of(dp=d, tp=t), {"tp": Split(0)})
    generate = Placement(Mesh.of(dp=d, tp=t_g, micro=t // t_g), {"tp": Split(0)})
    plan = boxing(train, generate, SHAPE)
    for rank in range(d * t):
        assert generate.mesh.coordinates(rank)["tp"] == rank % t // (t // t_g)
        assert received(plan, rank) == (t - t_g) / (t_g * t) * T
    assert bool(plan.moves) == (t > t_g)
    micro = [set(group) for group in generate.mesh.groups("micro")]
    assert all(any({move.source, move.destination} <= group for group in micro) for move in plan.moves)
    assert sent(plan) == {rank: received(plan, rank) for rank in range(d * t) if t > t_g}


def test_the_published_example_of_seven_billion_parameters() -> None:
    train = Placement(Mesh.of(tp=8), {"tp": Split(0)})
    generate = Placement(Mesh.of(tp=2, micro=4), {"tp": Split(0)})
    assert received(boxing(train, generate, (7 * 10**9,)), 0) / 2 == 5.25e9


def test_a_plain_grouping_receives_more() -> None:
    train = Placement(Mesh.of(tp=8), {"tp": Split(0)})
    plain = Placement(Mesh.of(micro=4, tp=2), {"tp": Split(0)})
    plan = boxing(train, plain, SHAPE)
    assert [received(plan, rank) for rank in range(8)] == [
        3 / 8 * T,
        T / 2,
        3 / 8 * T,
        T / 2,
        T / 2,
        3 / 8 * T,
        T / 2,
        3 / 8 * T,
    ]


@pytest.mark.parametrize(("copies", "wanting"), [(4, 8), (3, 3), (4, 2), (3, 8)])
@pytest.mark.parametrize("part", [Broadcast(), Split(0)], ids=str)
def test_copies_share_the_load(copies: int, wanting: int, part) -> None:
    plan = boxing(on(Mesh.of(x=copies), Broadcast()), on(Mesh.of(x=wanting, first=copies), part), SHAPE)
    times = Counter(move.source for move in plan.moves)
    assert max(times.values()) - min(times[rank] for rank in range(copies)) <= 1


def test_a_rank_keeps_its_own_copy() -> None:
    plan = boxing(on(Mesh.of(x=3), Broadcast()), on(Mesh.of(x=3, first=1), Broadcast()), (6,))
    whole = Slice(((0, 6),))
    assert plan.kept == tuple(Move(source=rank, destination=rank, slice=whole) for rank in (1, 2))
    assert plan.moves == (Move(source=0, destination=3, slice=whole),)


@pytest.mark.parametrize(("before", "after"), [("S0", "S1"), ("S0", "B")])
def test_sixty_four_ranks_are_planned_whole(before: str, after: str) -> None:
    mesh = Mesh.of(x=64)
    plan = boxing(on(mesh, SBP[before]), on(mesh, SBP[after]), (4096, 4096))
    assert len(plan.moves) >= 64 * 63
