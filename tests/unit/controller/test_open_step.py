"""A phase knows how often the weights of its roles have changed, and when their ranks differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.controller.open_step import Phase
from rillflow.controller.source import Source
from rillflow.placement.mesh import Mesh
from rillflow.workers.backend import Pool
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from tests.unit.controller.test_source import stream


@pytest.fixture
def backend() -> Iterator[InlineBackend]:
    backend = InlineBackend()
    backend.open([Pool(name="main", size=2)])
    yield backend
    backend.close()


@pytest.mark.parametrize(("updates", "counted"), [([0, 0], 0), ([3, 3], 3), ([0, 1], -1), ([4, 3], -1)])
def test_updates_of_a_role_are_minus_one_if_its_ranks_differ(
    backend: InlineBackend, updates: Sequence[int], counted: int
) -> None:
    group = Group("policy", {}, mesh=Mesh.of(dp=2), pool="main", backend=backend)
    group.start(lambda site: SimpleNamespace(updates=updates[site.place.rank]))
    executor = GroupExecutor({"policy": group}, backend)
    phase = Phase(
        name="only",
        index=0,
        first=0,
        steps=1,
        rows=1,
        step=lambda: None,
        config=None,
        flow=Flow(executor),
        executor=executor,
        trained=("policy",),
        source=Source(executor, stream()),
        beside=None,
        evaluated=False,
    )
    assert phase.updates(5.0) == {"policy": counted}
