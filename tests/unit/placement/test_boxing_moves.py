"""Executing a boxing gives every rank the elements of its placement, each once.

numbers per source rank ── execute(boxing) ──> numbers per destination rank == elements of the placement
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.placement.boxing import Boxing, boxing
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Partial, Placement, Split
from rillflow.placement.slices import Slice, slices

Element = tuple[int, ...]
Numbers = dict[int, dict[Element, Fraction]]
"""Values by rank and element."""


def elements(piece: Slice) -> list[Element]:
    return list(product(*(range(*bounds) for bounds in piece.bounds)))


def held(placement: Placement, shape: list[int]) -> dict[int, set[Element]]:
    """Return the elements of every rank; check that its slices do not overlap."""
    found = {}
    for rank, pieces in slices(placement, shape).items():
        listed = [element for piece in pieces for element in elements(piece)]
        found[rank] = set(listed)
        assert len(found[rank]) == len(listed)
    return found


def contribution(placement: Placement, rank: int) -> Element:
    """Return the contribution that a rank holds."""
    at = placement.mesh.coordinates(rank)
    return tuple(at[name] for name in placement.partial)


def execute(plan: Boxing, given: Numbers) -> Numbers:
    """Execute a boxing: every stage reads, combines, and writes each element of a rank once."""
    result: Numbers = defaultdict(dict)
    for number, stage in enumerate(plan.stages or ((),)):
        read = {rank: dict(own) for rank, own in result.items()} if number else given
        arrived = defaultdict(list)
        for move in (() if number else plan.kept) + stage:
            values = [read[move.source][element] for element in elements(move.slice)]
            arrived[move.destination, move.slice, move.adds].append(values)
        for (rank, piece, adds), columns in arrived.items():
            assert adds or len(columns) == 1
            for element, values in zip(elements(piece), zip(*columns, strict=True), strict=True):
                assert element not in result[rank]
                result[rank][element] = sum(values, Fraction(0))
    for fill in plan.fills:
        for element in elements(fill.slice):
            assert element not in result[fill.rank]
            result[fill.rank][element] = Fraction(0)
    return result


@dataclass(frozen=True, kw_only=True)
class Case:
    """Numbers on ranks, and the value that they represent."""

    value: dict[Element, Fraction]
    """The whole value."""
    numbers: Numbers
    """The numbers of every source rank."""


def laid(placement: Placement, shape: list[int], seed: int = 0) -> Case:
    """Return random contributions, the same in all copies."""
    draw = random.Random(seed)
    own = held(placement, shape)
    kinds = sorted({contribution(placement, rank) for rank in own})
    everything = elements(Slice(tuple((0, length) for length in shape)))
    made = {
        (kind, element): Fraction(draw.randint(-(10**6), 10**6)) for kind in kinds for element in everything
    }
    numbers = {
        rank: {element: made[contribution(placement, rank), element] for element in own[rank]} for rank in own
    }
    value = {element: sum((made[kind, element] for kind in kinds), Fraction(0)) for element in everything}
    return Case(value=value, numbers=numbers)


def check(source: Placement, destination: Placement, shape: list[int]) -> Boxing:
    """Execute the boxing and compare the result with the placement."""
    case, plan = laid(source, shape), boxing(source, destination, shape)
    assert all(move.source != move.destination for move in plan.moves)
    assert all(move.source == move.destination for move in plan.kept)
    assert not any(move.slice.is_empty for move in plan.moves + plan.kept)
    result, wanted = execute(plan, case.numbers), held(destination, shape)
    assert {rank: set(own) for rank, own in result.items() if own} == {r: e for r, e in wanted.items() if e}
    for element, value in case.value.items():
        by_kind = defaultdict(set)
        for rank in destination.mesh.ranks:
            if element in wanted[rank]:
                by_kind[contribution(destination, rank)].add(result[rank][element])
        assert all(len(copies) == 1 for copies in by_kind.values()), "copies differ"
        assert sum(min(copies) for copies in by_kind.values()) == value
    assert plan.bytes(2) == sum(plan.received(rank, 2) for rank in destination.mesh.ranks)
    return plan


SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@st.composite
def placements(draw: st.DrawFn, shape: list[int]) -> Placement:
    """Draw a placement with 1 to 3 axes on ranks below 14, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: prod(sizes) <= 12))
    names = "abc"[: len(sizes)]
    ranks = draw(st.permutations(range(14)))[: prod(sizes)]
    parts = {}
    for name, size in zip(names, sizes, strict=True):
        kind = draw(st.sampled_from(["split", "split", "broadcast", "partial"]))
        dim = draw(st.integers(0, len(shape) - 1))
        alone = not any(isinstance(part, Split) and part.dim == dim for part in parts.values())
        if kind == "broadcast":
            parts[name] = Broadcast()
        elif kind == "partial":
            parts[name] = Partial()
        elif alone and draw(st.booleans()):
            edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=size - 1, max_size=size - 1)))
            edges = [0, *edges, shape[dim]]
            parts[name] = Split(dim, sizes=tuple(b - a for a, b in pairwise(edges)))
        else:
            parts[name] = Split(dim, runs=draw(st.integers(1, 3)))
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
    plan = check(placement, placement, shape)
    assert (plan.moves, plan.fills) == ((), ())


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_the_least_is_received(data: st.DataObject, shape: list[int]) -> None:
    """The received bytes are minimal for destinations without contributions, element by element.

    Each rank that has no copy receives one. Of several contributions, all but its own must reach the first
    complete rank; after that, every other rank receives at least once more.
    """
    source, destination = data.draw(placements(shape)), data.draw(placements(shape))
    if destination.partial:
        destination = Placement(destination.mesh)
    before, after, least = held(source, shape), held(destination, shape), 0
    for element in elements(Slice(tuple((0, length) for length in shape))):
        holding = {rank for rank in before if element in before[rank]}
        wanting = {rank for rank in after if element in after[rank]}
        kinds = {contribution(source, rank) for rank in holding}
        if len(kinds) == 1:
            least += len(wanting - holding)
        else:
            least += len(kinds) - bool(wanting & holding) + len(wanting) - 1
    assert boxing(source, destination, shape).bytes(1) == least


PARTS = [Split(0), Split(1), Broadcast(), Partial()]


@pytest.mark.parametrize("after", PARTS, ids=str)
@pytest.mark.parametrize("before", PARTS, ids=str)
@pytest.mark.parametrize("first", [0, 2, 9], ids=["same", "overlapping", "apart"])
def test_every_pair_on_one_axis(before, after, first: int) -> None:
    check(Placement(Mesh.of(x=4), {"x": before}), Placement(Mesh.of(x=4, first=first), {"x": after}), [5, 7])


def test_a_number_is_moved_too() -> None:
    plan = check(Placement(Mesh.of(x=3), {"x": Partial()}), Placement(Mesh.of(x=3)), [])
    assert len(plan.stages) == 2


def test_a_boxing_is_the_same_in_every_process_whatever_order_its_sets_have() -> None:
    code = (
        "from rillflow.placement.boxing import boxing; from rillflow.placement.mesh import Mesh;"
        "from rillflow.placement.sbp import Partial, Placement, Split;"
        "source = Placement(Mesh.of(a=2, b=3), {'a': Partial(), 'b': Split(0)});"
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
