"""A boxing carried out gives every rank what its placement says, each element once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.placement.boxing import Boxing, boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Placement, Split
from rillflow.placement.slices import Slice, slices

Element = tuple[int, ...]


def elements(piece: Slice) -> list[Element]:
    return list(product(*(range(*bounds) for bounds in piece.bounds)))


def held(placement: Placement, shape: list[int]) -> dict[int, set[Element]]:
    """The elements of every rank."""
    return {rank: set(elements(piece)) for rank, piece in slices(placement, shape).items()}


def check(source: Placement, destination: Placement, shape: list[int]) -> Boxing:
    """Carry the boxing out: every rank gets its elements, each once, from a rank that has them."""
    plan, before, after = boxing(source, destination, shape), held(source, shape), held(destination, shape)
    assert all(move.source != move.destination for move in plan.moves)
    assert all(move.source == move.destination for move in plan.kept)
    assert not any(move.slice.is_empty for move in plan.moves + plan.kept)
    result: dict[int, set[Element]] = defaultdict(set)
    for move in plan.moves + plan.kept:
        for element in elements(move.slice):
            assert element in before[move.source]
            assert element not in result[move.destination]
            result[move.destination].add(element)
    assert dict(result) == {rank: own for rank, own in after.items() if own}
    return plan


SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@st.composite
def placements(draw: st.DrawFn, shape: list[int]) -> Placement:
    """A placement on 1 to 3 axes of ranks below 14, whatever their order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: prod(sizes) <= 12))
    names = "abc"[: len(sizes)]
    ranks = draw(st.permutations(range(14)))[: prod(sizes)]
    parts = {}
    for name, size in zip(names, sizes, strict=True):
        kind = draw(st.sampled_from(["split", "split", "broadcast"]))
        dim = draw(st.integers(0, len(shape) - 1))
        alone = not any(isinstance(part, Split) and part.dim == dim for part in parts.values())
        if kind == "broadcast":
            parts[name] = Broadcast()
        elif alone and draw(st.booleans()):
            edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=size - 1, max_size=size - 1)))
            edges = [0, *edges, shape[dim]]
            parts[name] = Split(dim, sizes=tuple(b - a for a, b in pairwise(edges)))
        else:
            parts[name] = Split(dim)
    given_sizes = [name for name, part in parts.items() if isinstance(part, Split) and part.sizes is not None]
    others = [n for n, part in parts.items() if isinstance(part, Split) and n not in given_sizes]
    order = (*given_sizes, *draw(st.permutations(others)))
    return Placement(Mesh.of(ranks=ranks, **dict(zip(names, sizes, strict=True))), parts, order=order)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_any_placement_becomes_any_other(data: st.DataObject, shape: list[int]) -> None:
    check(data.draw(placements(shape)), data.draw(placements(shape)), shape)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_a_placement_becomes_itself_without_a_move(data: st.DataObject, shape: list[int]) -> None:
    placement = data.draw(placements(shape))
    assert check(placement, placement, shape).moves == ()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_the_least_is_received(data: st.DataObject, shape: list[int]) -> None:
    """A rank receives the elements that it lacks, and no others."""
    source, destination = data.draw(placements(shape)), data.draw(placements(shape))
    before, after = held(source, shape), held(destination, shape)
    least = sum(len(own - before.get(rank, set())) for rank, own in after.items())
    assert sum(move.slice.size for move in boxing(source, destination, shape).moves) == least


PARTS = [Split(0), Split(1), Broadcast()]


@pytest.mark.parametrize("after", PARTS, ids=str)
@pytest.mark.parametrize("before", PARTS, ids=str)
@pytest.mark.parametrize("first", [0, 2, 9], ids=["same", "overlapping", "apart"])
def test_every_pair_on_one_axis(before, after, first: int) -> None:
    check(Placement(Mesh.of(x=4), {"x": before}), Placement(Mesh.of(x=4, first=first), {"x": after}), [5, 7])


def test_a_number_is_moved_too() -> None:
    plan = check(Placement(Mesh.of(x=1)), Placement(Mesh.of(x=3)), [])
    assert len(plan.moves) == 2


def test_a_boxing_is_the_same_in_every_process_whatever_order_its_sets_have() -> None:
    code = (
        "from rillflow.placement.boxing import boxing; from rillflow.placement.mesh import Mesh;"
        "from rillflow.placement.sbp import Placement, Split;"
        "source = Placement(Mesh.of(a=2, b=3), {'b': Split(0)});"
        "destination = Placement(Mesh.of(x=4, first=3), {'x': Split(1)});"
        "print(boxing(source, destination, [7, 9]))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert said[0].startswith("Boxing(") and said.count(said[0]) == 3
