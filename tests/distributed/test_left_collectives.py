"""A rank whose call fails before a collective: the others fail at once, and can save afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from rillflow.errors import ClusterError
from rillflow.placement.mesh import Mesh
from rillflow.workers.backend import Backend, Pool, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.transfer import BROADCAST

LONG_S = 120.0
"""Deadline of every wait; a collective that nobody leaves would last as long."""


class Adder:
    """Adds over all ranks, over pairs, and over pairs of pairs."""

    def __init__(self, site: Site) -> None:
        self.ranks = site.ranks
        self.pair = site.ranks.part([[0, 1], [2, 3]])
        self.alone = self.pair.part([[0], [1]])

    @endpoint(BROADCAST)
    def add(self, *, kind: str, fails: int = -1, large: bool = False) -> float:
        """Return a sum of rank numbers; rank ``fails`` raises before it."""
        if self.ranks.rank == fails:
            raise ArithmeticError("a bit of this rank fell over")
        found = torch.full((2**20 if large else 1,), float(self.ranks.rank))
        ranks = {"all": self.ranks, "pair": self.pair, "alone": self.alone}[kind]
        ranks.sum_([found])
        return float(found[-1])


@pytest.fixture(scope="module", params=["inline", "process", pytest.param("ray", marks=pytest.mark.slow)])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made: Backend = InlineBackend(LONG_S) if request.param == "inline" else ProcessBackend(LONG_S)
    if request.param == "ray":
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed")
        from rillflow.workers.start import ray_backend

        made = ray_backend(LONG_S)
    made.open([Pool(name="main", size=4)])
    adders = Group("adder", endpoints_of(Adder), mesh=Mesh.of(dp=4), pool="main", backend=made)
    adders.start(Adder, LONG_S)
    yield adders
    made.close()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("fails", "kind"), [(0, "all"), (3, "all"), (1, "pair")])
def test_the_others_fail_at_once_and_add_again_once_they_are_mended(
    group: Group, fails: int, kind: str, large: bool
) -> None:
    """Ranks 2 and 3 need nobody of the other pair, and have no error."""
    backend, began = group._backend, time.monotonic()
    failing = group.call("add", kind=kind, fails=fails, large=large)
    with pytest.raises(ClusterError, match=rf"ArithmeticError in adder.add on rank {fails} of pool 'main'"):
        failing.read(LONG_S)
    while not failing.is_ready:
        assert time.monotonic() - began < LONG_S / 4, "a rank still waits for the one that failed"
        time.sleep(0.02)
    if not large:
        with pytest.raises(ClusterError):
            group.call("add", kind="all").read(LONG_S)
    backend.mend(["main"], LONG_S)
    for each, expected in {"all": 6.0, "pair": 1.0, "alone": 0.0}.items():
        assert group.call("add", kind=each, large=large).read(LONG_S) == expected


def test_nothing_is_connected_again_if_no_call_has_failed(group: Group) -> None:
    if isinstance(group._backend, ProcessBackend):
        from rillflow.workers.joined_rank import has_left

        rank = group._backend._ranks[group.places[0]]
        group._backend.mend(["main"], LONG_S)
        assert not group._backend.read_all([group._backend._ask(rank, has_left)], LONG_S)[0]
    assert group.call("add", kind="all").read(LONG_S) == 6.0
