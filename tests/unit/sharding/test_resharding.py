"""Tensors that a rank must hold before resharding, and slices that move between two ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement, Split
from rillflow.sharding.layout import Weight
from rillflow.sharding.reshard_plan import reshard_plan
from rillflow.sharding.resharding import Resharding, require_shapes
from rillflow.workers.collectives import ProcessRanks


class GlooThread(ProcessRanks):
    """A rank of a gloo group whose ranks are threads of this process."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        gloo = dist.ProcessGroup.BackendType.GLOO
        self.rank, self.size, self.members = rank, size, tuple(range(size))
        self.group = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        self.group._register_backend(torch.device("cpu"), gloo, backend)
        self.group._set_default_backend(gloo)


def test_halves_cross_between_two_ranks() -> None:
    """Rows in training, columns in generation: each rank keeps a quarter and receives another."""
    weights = {"up": Weight(name="up", shape=(4, 6), dtype=torch.float32)}
    rows, columns = ({"up": Placement(Mesh.of(tp=2), {"tp": Split(dim)})} for dim in (0, 1))
    plan, whole = reshard_plan(weights, rows, columns), torch.arange(24.0).view(4, 6)
    store = dist.PrefixStore("halves", dist.HashStore())

    def cross(rank: int) -> tuple[Resharding, Tensor]:
        resharding = Resharding(plan, GlooThread(store, rank, 2))
        found = torch.zeros(4, 3)
        for place in range(len(plan.buckets)):
            resharding.pack(place, {"up": whole[2 * rank : 2 * rank + 2]})
            resharding.exchange(place, {"up": found})
        return resharding, found

    with ThreadPoolExecutor(2) as threads:
        crossed = list(threads.map(cross, range(2)))
    for rank, (resharding, found) in enumerate(crossed):
        got = slice(2 - 2 * rank, 4 - 2 * rank)
        assert torch.equal(found[got], whole[got, 3 * rank : 3 * rank + 3])
        assert resharding.sent_bytes == resharding.received_bytes == 6 * 4
        assert resharding.buffer_bytes == 2 * 6 * 4
        resharding.close()
        assert resharding.buffer_bytes == 0


def test_a_rank_whose_share_is_empty_needs_no_tensor() -> None:
    """One row over two ranks: the first has it, the second has nothing."""
    weights = {"bias": Weight(name="bias", shape=(1, 4), dtype=torch.float32)}
    layout = {"bias": Placement(Mesh.of(tp=2), {"tp": Split(0)})}
    plan = reshard_plan(weights, layout, layout)
    require_shapes({}, plan, layout, 1)
    with pytest.raises(WeightError, match="rank 0 has no bias"):
        require_shapes({}, plan, layout, 0)


def test_a_rank_needs_its_own_weights_behind_those_of_others() -> None:
    weights = {name: Weight(name=name, shape=(4,), dtype=torch.float32) for name in ("first", "second")}
    layout = {name: Placement(Mesh.of(first=rank, dp=1)) for rank, name in enumerate(weights)}
    plan = reshard_plan(weights, layout, layout)
    with pytest.raises(WeightError, match="rank 1 has no second"):
        require_shapes({}, plan, layout, 1)
