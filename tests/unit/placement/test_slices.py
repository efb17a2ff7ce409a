"""Slices of each rank: splits of torch.chunk, given sizes, several axes on one dim, runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Partial, Placement, Split
from rillflow.placement.slices import Slice, slices


def rows(placement: Placement, length: int) -> dict[int, list[int]]:
    """Return the numbers of range(length) that each rank holds, in its order."""
    held = slices(placement, [length])
    return {rank: [row for piece in held[rank] for row in range(*piece.bounds[0])] for rank in held}


@settings(max_examples=80, deadline=None)
@given(length=st.integers(0, 40), parts=st.integers(1, 9))
def test_the_default_cut_is_torch_chunk(length: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(parts)] if length else []
    wanted = chunks + [[]] * (parts - len(chunks))
    assert list(rows(Placement(Mesh.of(dp=parts), {"dp": Split(0)}), length).values()) == wanted


def test_short_and_empty_pieces() -> None:
    placement = Placement(Mesh.of(dp=4), {"dp": Split(0)})
    assert rows(placement, 9) == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8], 3: []}
    assert slices(placement, [9])[3] == ()


def test_given_sizes() -> None:
    placement = Placement(Mesh.of(dp=3), {"dp": Split(0, sizes=(1, 0, 4))})
    assert rows(placement, 5) == {0: [0], 1: [], 2: [1, 2, 3, 4]}


def test_broadcast_and_partial_hold_everything() -> None:
    held = slices(Placement(Mesh.of(dp=2, tp=2), {"tp": Partial()}), [3, 4])
    assert set(held.values()) == {(Slice(((0, 3), (0, 4))),)}


def test_two_dims_are_cut_apart() -> None:
    held = slices(Placement(Mesh.of(dp=2, tp=2), {"dp": Split(1), "tp": Split(0)}), [4, 5])
    assert [str(piece) for (piece,) in held.values()] == [
        "[0:2, 0:3]",
        "[2:4, 0:3]",
        "[0:2, 3:5]",
        "[2:4, 3:5]",
    ]


def test_the_outer_axis_cuts_first() -> None:
    placement = Placement(Mesh.of(dp=2, tp=2), {"dp": Split(0), "tp": Split(0)})
    assert rows(placement, 8) == {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}
    assert rows(placement, 9) == {0: [0, 1, 2], 1: [3, 4], 2: [5, 6], 3: [7, 8]}


def test_fully_sharded_over_tensor_parallel() -> None:
    """DTensor's own example of (_StridedShard(0, split_factor=2), Shard(0)), by order and by runs."""
    mesh, wanted = Mesh.of(dp=2, tp=2), {0: [0, 1], 1: [4, 5], 2: [2, 3], 3: [6, 7]}
    by_order = Placement(mesh, {"dp": Split(0), "tp": Split(0)}, order=("tp", "dp"))
    by_runs = Placement(mesh, {"dp": Split(0, runs=2), "tp": Split(0)})
    assert rows(by_order, 8) == rows(by_runs, 8) == wanted


def test_fully_sharded_cuts_the_tensor_parallel_piece_as_chunk_does() -> None:
    placement = Placement(Mesh.of(dp=3, tp=2), {"dp": Split(0), "tp": Split(0)}, order=("tp", "dp"))
    pieces = [half.chunk(3) for half in torch.arange(10).chunk(2)]
    assert rows(placement, 10) == {dp * 2 + tp: pieces[tp][dp].tolist() for dp in range(3) for tp in range(2)}


def test_runs_are_a_strided_shard() -> None:
    """_StridedShard(0, split_factor=2) of nine rows over four, as in its documentation."""
    placement = Placement(Mesh.of(dp=4), {"dp": Split(0, runs=2)})
    assert rows(placement, 9) == {0: [0, 1, 5], 1: [2, 3, 6], 2: [4, 7], 3: [8]}
    assert slices(placement, [9])[0] == (Slice(((0, 2),)), Slice(((5, 6),)))


def test_a_fused_weight_is_cut_half_by_half_and_then_sharded() -> None:
    placement = Placement(Mesh.of(dp=2, tp=2), {"tp": Split(0, runs=2), "dp": Split(0)}, order=("tp", "dp"))
    assert rows(placement, 8) == {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}
    assert rows(placement, 12) == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8], 3: [9, 10, 11]}
    assert rows(Placement(Mesh.of(tp=2), {"tp": Split(0, runs=2)}), 8) == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}


def test_neighbouring_runs_are_one_slice() -> None:
    held = slices(Placement(Mesh.of(dp=1), {"dp": Split(0, runs=3)}), [7])
    assert held == {0: (Slice(((0, 7),)),)}


def test_a_number_and_a_value_without_elements() -> None:
    assert slices(Placement(Mesh.of(dp=2)), []) == {0: (Slice(()),), 1: (Slice(()),)}
    assert slices(Placement(Mesh.of(dp=2), {"dp": Split(0)}), [4, 0]) == {0: (), 1: ()}


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 30),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    runs=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    data=st.data(),
)
def test_every_element_is_held_once(
    length: int, sizes: list[int], runs: list[int], data: st.DataObject
) -> None:
    names = "abc"[: len(sizes)]
    mesh = Mesh.of(**dict(zip(names, sizes, strict=True)))
    parts = {name: Split(0, runs=count) for name, count in zip(names, runs, strict=False)}
    order = tuple(data.draw(st.permutations(names)))
    held = rows(Placement(mesh, parts, order=order), length)
    assert sorted(row for own in held.values() for row in own) == list(range(length))
    assert all(own == sorted(own) for own in held.values())


def test_a_slice_knows_its_size_and_meets_others() -> None:
    box = Slice(((0, 4), (2, 8)))
    assert (box.size, box.is_empty, str(box)) == (24, False, "[0:4, 2:8]")
    assert box.intersection(Slice(((3, 9), (0, 3)))) == Slice(((3, 4), (2, 3)))
    apart = box.intersection(Slice(((4, 9), (0, 3))))
    assert (apart.is_empty, apart.size) == (True, 0)
    assert Slice(()).intersection(Slice(())).size == 1
    with pytest.raises(PlacementError, match="have no intersection"):
        box.intersection(Slice(((0, 1),)))


def test_a_slice_is_cut_into_even_pieces() -> None:
    assert [str(piece) for piece in Slice(((1, 11),)).pieces(3)] == ["[1:4]", "[4:7]", "[7:11]"]
    assert [str(piece) for piece in Slice(((0, 2), (0, 4))).pieces(4)] == [
        "[0:2, 0:1]",
        "[0:2, 1:2]",
        "[0:2, 2:3]",
        "[0:2, 3:4]",
    ]
    assert len(Slice(((0, 2), (0, 3))).pieces(8)) == 3
    assert Slice(()).pieces(4) == [Slice(())]
    assert Slice(((0, 0),)).pieces(1) == Slice(((0, 0),)).pieces(2) == []


@pytest.mark.parametrize(
    ("split", "shape", "what"),
    [
        (Split(2), [4, 4], "axis 'dp' splits dim 2 of a value of shape [4, 4]"),
        (Split(0), [], "axis 'dp' splits dim 0 of a value of shape []"),
        (Split(0), [-1], "a value has the shape [-1]"),
        (Split(0, sizes=(1, 2)), [4], "the sizes (1, 2) of axis 'dp' add up to 3"),
    ],
)
def test_what_does_not_fit_the_shape_is_refused(split: Split, shape: list[int], what: str) -> None:
    with pytest.raises(PlacementError) as caught:
        slices(Placement(Mesh.of(dp=2), {"dp": split}), shape)
    assert caught.value.what == what
    assert caught.value.why
