"""Costs of boxing: the published tables, two axes, even load, partial destinations.

Shapes are divisible here, so bytes equal the formulas; test_boxing_moves.py has uneven shapes.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations, product
from math import prod

import pytest

from rillflow.placement.boxing import Boxing, Fill, Move, boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Partial, Placement, Split
from rillflow.placement.slices import Slice

SHAPE = (48, 48)
T = prod(SHAPE) * 4
"""Bytes of the value."""
SBP = {"S0": Split(0), "S1": Split(1), "B": Broadcast(), "P": Partial()}
PAIRS = list(product(SBP, SBP))


def on(mesh: Mesh, part) -> Placement:
    return Placement(mesh, {"x": part})


def same_devices(before: str, after: str, p: int) -> float:
    """Return the bytes of OneFlow (arXiv 2110.15032), Table 2, p1 = p2 on the same devices."""
    if before == after or before == "B" or after == "P":
        return 0
    if before == "P":
        return (2 if after == "B" else 1) * (p - 1) * T
    return (p - 1) * T if after == "B" else (p - 1) / p * T


def apart(before: str, after: str, p1: int, p2: int) -> float:
    """Return the bytes of the same table for disjoint sets of devices."""
    return T + (p2 - 1) * T * (after == "B") + (p1 - 1) * T * (before == "P")


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_table_on_the_same_devices(before: str, after: str, p: int) -> None:
    mesh = Mesh.of(x=p)
    assert boxing(on(mesh, SBP[before]), on(mesh, SBP[after]), SHAPE).bytes(4) == same_devices(
        before, after, p
    )


@pytest.mark.parametrize(("p1", "p2"), [(2, 2), (4, 2), (2, 6), (1, 8), (8, 1)])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_table_on_devices_apart(before: str, after: str, p1: int, p2: int) -> None:
    plan = boxing(on(Mesh.of(x=p1), SBP[before]), on(Mesh.of(x=p2, first=p1), SBP[after]), SHAPE)
    assert plan.bytes(4) == apart(before, after, p1, p2)


def sent(plan: Boxing) -> dict[int, int]:
    counted: Counter[int] = Counter()
    for move in plan.moves:
        counted[move.source] += move.slice.size * 4
    return dict(counted)


def test_partial_to_broadcast_is_a_reduce_scatter_and_an_all_gather() -> None:
    mesh = Mesh.of(x=4)
    plan = boxing(on(mesh, Partial()), on(mesh, Broadcast()), SHAPE)
    for stage, how in zip(plan.stages, (True, False), strict=True):
        assert {move.adds for move in stage} == {how}
        assert Counter(move.destination for move in stage) == dict.fromkeys(range(4), 3)
        assert {move.slice.size * 4 for move in stage} == {T / 4}
    assert [plan.received(rank, 4) for rank in range(4)] == [2 * 3 / 4 * T] * 4
    assert sent(plan) == dict.fromkeys(range(4), 2 * 3 / 4 * T)
    assert {(move.source, move.adds, move.slice.size * 4) for move in plan.kept} == {
        (rank, True, T / 4) for rank in range(4)
    }


TWO_AXES = [dict(zip("ab", parts, strict=True)) for parts in product(SBP.values(), SBP.values())]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (4, 2)])
def test_two_axes_cost_no_more_than_one_after_the_other(sizes: tuple[int, int]) -> None:
    mesh = Mesh.of(a=sizes[0], b=sizes[1])
    for before, after in product(TWO_AXES, TWO_AXES):
        direct = boxing(Placement(mesh, before), Placement(mesh, after), SHAPE).bytes(4)
        for order in permutations("ab"):
            between = before | {order[0]: after[order[0]]}
            steps = [Placement(mesh, parts) for parts in (before, between, after)]
            cost = sum(boxing(*steps[place : place + 2], SHAPE).bytes(4) for place in (0, 1))
            assert direct <= cost, (before, after)


def test_two_axes_in_numbers() -> None:
    mesh = Mesh.of(dp=4, tp=2)
    reduced = boxing(
        Placement(mesh, {"dp": Partial(), "tp": Split(0)}), Placement(mesh, {"tp": Split(0)}), SHAPE
    )
    assert reduced.bytes(4) == 2 * 3 * T
    scattered = boxing(
        Placement(mesh, {"dp": Partial(), "tp": Split(0)}),
        Placement(mesh, {"dp": Split(0), "tp": Split(0)}, order=("tp", "dp")),
        SHAPE,
    )
    assert scattered.bytes(4) == 3 * T
    gathered = boxing(
        Placement(mesh, {"dp": Split(0), "tp": Split(0)}, order=("tp", "dp")),
        Placement(mesh, {"tp": Split(0)}),
        SHAPE,
    )
    assert gathered.bytes(4) == 3 * T
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
        assert plan.received(rank, 4) == (t - t_g) / (t_g * t) * T
    assert len(plan.stages) == (t > t_g)
    micro = [set(group) for group in generate.mesh.groups("micro")]
    assert all(any({move.source, move.destination} <= group for group in micro) for move in plan.moves)
    assert sent(plan) == {rank: plan.received(rank, 4) for rank in range(d * t) if t > t_g}


def test_the_published_example_of_seven_billion_parameters() -> None:
    train = Placement(Mesh.of(tp=8), {"tp": Split(0)})
    generate = Placement(Mesh.of(tp=2, micro=4), {"tp": Split(0)})
    assert boxing(train, generate, (7 * 10**9,)).received(0, 2) == 5.25e9


def test_a_plain_grouping_receives_more() -> None:
    train = Placement(Mesh.of(tp=8), {"tp": Split(0)})
    plain = Placement(Mesh.of(micro=4, tp=2), {"tp": Split(0)})
    received = [boxing(train, plain, SHAPE).received(rank, 4) for rank in range(8)]
    assert received == [3 / 8 * T, T / 2, 3 / 8 * T, T / 2, T / 2, 3 / 8 * T, T / 2, 3 / 8 * T]


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


def test_one_keeps_what_becomes_partial_and_the_others_hold_zeros() -> None:
    mesh, whole = Mesh.of(x=3), Slice(((0, 6),))
    plan = boxing(on(mesh, Broadcast()), on(mesh, Partial()), (6,))
    assert plan.kept == (Move(source=0, destination=0, slice=whole),)
    assert plan.fills == tuple(Fill(rank=rank, slice=whole) for rank in (1, 2))
    plan = boxing(on(mesh, Split(0)), on(mesh, Partial()), (6,))
    assert [move.destination for move in plan.kept] == [0, 1, 2]
    assert Counter(fill.rank for fill in plan.fills) == {0: 2, 1: 2, 2: 2}
    assert plan.moves == ()


@pytest.mark.parametrize("before", ["P", "S0"])
def test_partial_destinations_apart_share_the_load(before: str) -> None:
    plan = boxing(on(Mesh.of(x=6), SBP[before]), on(Mesh.of(x=3, first=6), Partial()), SHAPE)
    assert Counter(move.destination for move in plan.moves) == dict.fromkeys(range(6, 9), 2)


def least(source: list[set[int]], destination: list[set[int]]) -> int:
    """Return the fewest received copies over all ways to give each contribution to a coordinate."""

    def cost(given: list[set[int]], ranks: set[int]) -> int:
        if len(given) == 1:
            return len(ranks - given[0])
        return len(given) - bool(ranks & set().union(*given)) + len(ranks) - 1

    ways = product(range(len(destination)), repeat=len(source))
    return min(
        sum(
            cost([held for held, home in zip(source, way, strict=True) if home == place], destination[place])
            for place in set(way)
        )
        for way in ways
    )


def test_a_partial_destination_is_reached_at_least_cost() -> None:
    """Compared with every possible assignment, on small meshes that overlap in any way."""
    draw, tried = random.Random(0), 0
    while tried < 300:
        sides = []
        for _ in range(2):
            a, b = draw.choice([1, 2, 3]), draw.choice([2, 3, 4])
            mesh = Mesh.of(a=a, b=b, ranks=draw.sample(range(13), a * b))
            sides.append(Placement(mesh, {"b": Partial()}))
        holders = [[set(group) for group in side.mesh.groups("a")] for side in sides]
        assert boxing(*sides, (1,)).bytes(1) == least(*holders)
        tried += 1


@pytest.mark.parametrize(("before", "after"), [("S0", "S1"), ("P", "B"), ("S0", "B"), ("S0", "P")])
def test_sixty_four_ranks_are_planned_whole(before: str, after: str) -> None:
    mesh = Mesh.of(x=64)
    plan = boxing(on(mesh, SBP[before]), on(mesh, SBP[after]), (4096, 4096))
    assert len(plan.moves) + len(plan.fills) >= 64 * 63
