"""The switch of one rank between training and generation if nothing has to move."""

from __future__ import annotations

import pytest
import torch

from rillflow.errors import WeightError
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Placement
from rillflow.sharding.layout import Weight
from rillflow.sharding.reshard_plan import reshard_plan
from rillflow.sharding.switch import WeightSwitch
from rillflow.workers.collectives import SingleRank, Stranded, ThreadGroup, ThreadRanks

WEIGHTS = {"up": Weight(name="up", shape=(3, 4), dtype=torch.bfloat16)}


def test_a_rank_generates_in_another_dtype_than_it_trains_in() -> None:
    layout = {"up": Placement(Mesh.of(tp=1))}
    training = {"up": torch.randn(3, 4)}
    switch = WeightSwitch(reshard_plan(WEIGHTS, layout, layout), SingleRank(), training)
    assert torch.equal(switch.to_generation()["up"], training["up"].bfloat16())
    assert switch.held_bytes == 12 * (4 + 2)
    switch.to_training()
    assert switch.held_bytes == 12 * 4


def test_a_rank_outside_generations_mesh_has_no_generation_tensor() -> None:
    before, after = ({"up": Placement(Mesh.of(dp=size))} for size in (2, 1))
    switch = WeightSwitch(
        reshard_plan(WEIGHTS, before, after), ThreadRanks(ThreadGroup(2, 1.0), 1), {"up": torch.ones(3, 4)}
    )
    assert dict(switch.to_generation()) == {}


def test_weights_that_a_failure_has_torn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the training memory is freed by then, so nothing could be trained or saved."""
    layout = {"up": Placement(Mesh.of(tp=1))}
    switch = WeightSwitch(reshard_plan(WEIGHTS, layout, layout), SingleRank(), {"up": torch.randn(3, 4)})

    def fails(*_: object) -> None:
        raise Stranded("a rank has left the collective")

    monkeypatch.setattr(switch.resharding, "exchange", fails)
    with pytest.raises(Stranded):
        switch.to_generation()
    with pytest.raises(WeightError, match="half-way between training and generation"):
        switch.to_training()
