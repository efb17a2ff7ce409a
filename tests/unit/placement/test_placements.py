"""A placement names a part for every axis, is a value, and refuses impossible layouts."""

from __future__ import annotations

import copy

import pytest

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Broadcast, Partial, Placement, Split

MESH = Mesh.of(dp=2, tp=2, pp=1)


def test_axes_that_are_not_named_are_broadcast() -> None:
    placement = Placement(MESH, {"tp": Split(1)})
    assert placement.parts == {"dp": Broadcast(), "tp": Split(1), "pp": Broadcast()}
    assert list(placement.parts) == list(MESH.names)


def test_placements_are_values() -> None:
    one = Placement(MESH, {"tp": Split(0), "dp": Partial()})
    two = Placement(MESH, {"dp": Partial(), "tp": Split(0), "pp": Broadcast()}, order=("tp",))
    assert one == two
    assert hash(one) == hash(copy.deepcopy(two))
    assert one != Placement(MESH, {"tp": Split(0)})


def test_the_mesh_orders_the_cuts_unless_told() -> None:
    parts = {"tp": Split(0), "dp": Split(0), "pp": Split(1)}
    assert list(Placement(MESH, parts).splits(0)) == ["dp", "tp"]
    assert list(Placement(MESH, parts, order=("tp",)).splits(0)) == ["tp", "dp"]
    assert Placement(MESH, parts, order=("tp",)) == Placement(MESH, parts, order=("tp", "dp", "pp"))
    assert Placement(MESH, parts, order=("tp",)) != Placement(MESH, parts)


def test_an_axis_of_one_makes_nothing_partial() -> None:
    assert Placement(MESH, {"pp": Partial(), "dp": Partial()}).partial == ("dp",)
    assert Placement(MESH, {"pp": Partial()}).partial == ()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Split(-1), "the split has dim -1"),
        (lambda: Split(0, runs=0), "the split has 0 runs"),
        (lambda: Split(0, sizes=(3, -1)), "the split has a piece of length -1"),
        (lambda: Split(0, sizes=(3, 1), runs=2), "the split has both sizes (3, 1) and 2 runs"),
        (lambda: Placement(MESH, {"dq": Split(0)}), "the mesh has no axis 'dq'"),
        (
            lambda: Placement(MESH, {"dp": Split(0, sizes=(1, 2, 3))}),
            "axis 'dp' has 3 sizes (1, 2, 3) and 2 coordinates",
        ),
        (lambda: Placement(MESH, {"dp": Split(0)}, order=("dq",)), "the mesh has no axis 'dq'"),
        (
            lambda: Placement(MESH, {"dp": Split(0)}, order=("tp",)),
            "the order has axis 'tp' which does not split a dim",
        ),
        (
            lambda: Placement(MESH, {"dp": Split(0)}, order=("dp", "dp")),
            "the order has axis 'dp' twice",
        ),
    ],
)
def test_what_cannot_be_laid_is_refused(make, what: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make()
    assert caught.value.what == what
    assert caught.value.why


def test_a_misspelling_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlacementError, match="did you mean 'data'"):
        Placement(Mesh.of(data=2, tensor=2), {"dat": Split(0)})
