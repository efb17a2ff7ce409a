"""A mesh is row-major, finds ranks by name and coordinates, and refuses invalid grids."""

from __future__ import annotations

import copy
from itertools import product

import pytest

from rillflow.errors import PlacementError
from rillflow.placement.mesh import Axis, Mesh


def test_ranks_are_laid_row_major() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    assert mesh.ranks == tuple(range(8))
    assert mesh.names == ("dp", "tp")
    assert mesh.size == 8
    assert mesh.axis("tp") == Axis(name="tp", size=4)
    assert mesh.coordinates(6) == {"dp": 1, "tp": 2}


def test_first_and_explicit_ranks() -> None:
    assert Mesh.of(dp=2, tp=2, first=8).ranks == (8, 9, 10, 11)
    assert Mesh.of(dp=2, ranks=[5, 3]).coordinates(3) == {"dp": 1}


def test_a_mesh_without_axes_is_one_rank() -> None:
    mesh = Mesh.of(first=3)
    assert (mesh.ranks, mesh.coordinates(3)) == ((3,), {})


def test_groups_differ_in_one_axis_only() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_ranks_lie_row_by_row_whatever_their_numbers() -> None:
    mesh = Mesh.of(a=2, b=3, c=4, ranks=reversed(range(24)))
    for rank, at in zip(mesh.ranks, product(range(2), range(3), range(4)), strict=True):
        assert mesh.coordinates(rank) == dict(zip("abc", at, strict=True))


def test_a_turned_axis_is_counted_from_the_other_end() -> None:
    mesh = Mesh.of(dp=2, pp=3, tp=2)
    turned = mesh.turned("pp")
    assert turned.ranks == (4, 5, 2, 3, 0, 1, 10, 11, 8, 9, 6, 7)
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        assert turned.coordinates(rank) == {**at, "pp": 2 - at["pp"]}
    assert turned.groups("pp") == tuple(group[::-1] for group in mesh.groups("pp"))
    assert turned.turned("pp") == mesh
    with pytest.raises(PlacementError, match="no axis 'ep'"):
        mesh.turned("ep")


def test_meshes_are_values() -> None:
    assert Mesh.of(dp=2) == Mesh.of(dp=2, ranks=[0, 1])
    assert hash(Mesh.of(dp=2)) == hash(copy.deepcopy(Mesh.of(dp=2)))
    assert Mesh.of(dp=2, tp=1) != Mesh.of(dp=2)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Mesh.of(dp=0), "axis 'dp' has size 0"),
        (lambda: Mesh.of(dp=-2), "axis 'dp' has size -2"),
        (lambda: Mesh(axes=(Axis(name="dp", size=1),) * 2, ranks=(0,)), "the mesh has axis 'dp' twice"),
        (lambda: Mesh.of(dp=3, ranks=[0, 4, 4]), "the mesh has rank 4 twice"),
        (lambda: Mesh.of(dp=2, first=-1), "the mesh has rank -1"),
        (lambda: Mesh.of(dp=2, tp=2, ranks=[0, 1, 2]), "3 ranks do not fill a mesh of dp 2 x tp 2"),
        (lambda: Mesh.of(ranks=[0, 1]), "2 ranks do not fill a mesh of no axis"),
    ],
)
def test_what_is_no_grid_is_refused(make, what: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make()
    assert caught.value.what == what
    assert caught.value.why


def test_a_misspelt_axis_is_answered_with_the_nearest() -> None:
    mesh = Mesh.of(data=2, tensor=4)
    for ask in (mesh.axis, mesh.groups):
        with pytest.raises(PlacementError, match="no axis 'tensr'") as caught:
            ask("tensr")
        assert caught.value.fix == "did you mean 'tensor'?"


def test_a_place_outside_is_refused() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    with pytest.raises(PlacementError, match="rank 8 is not in the mesh"):
        mesh.coordinates(8)
    with pytest.raises(PlacementError, match=r"its ranks are 0, 1, \.\.\. 63"):
        Mesh.of(dp=64).coordinates(64)
