"""The ranks of one copy of a sharded model compute and agree upon errors; those of the other do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rillflow.errors import TrainingError
from rillflow.placement.mesh import Mesh
from rillflow.sharding.mesh import rank_groups
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import Scorer
from rillflow.workers.collectives import Ranks
from tests.distributed.meshes import Case, decoder, rows
from tests.distributed.processes import together

BUDGET = TrainConfig(tokens_per_micro_batch=20)


def scored(ranks: Ranks, case: Case) -> dict[str, Any]:
    """What a rank computes, and the errors that it hears; the second copy computes nothing alone."""
    torch.set_num_threads(1)
    groups = rank_groups(Mesh.of(dp=case.dp, pp=case.pp, tp=case.tp), ranks)
    parallel = Parallel(decoder(case), groups)
    scorer, found = Scorer(parallel.module, BUDGET, parallel=parallel), dict[str, Any]()
    if groups.dp.rank == 0:
        with parallel.copy_alone():
            found["alone"] = scorer.logprobs(rows()).values.tolist()
            try:
                parallel.agree(TrainingError("the row is bad", why="it is") if ranks.rank == 0 else None)
            except TrainingError as error:
                found["error"] = error.what
    found["together"] = scorer.logprobs(rows()).values.tolist()
    parallel.agree()
    return found


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_one_copy_computes_alone_and_agrees_upon_errors(axis: str) -> None:
    case = Case(dp=2, layers=2, pp=2 if axis == "pp" else 1, tp=2 if axis == "tp" else 1)
    found = together(4, scored, case)
    copy, other = found[:2], found[2:]
    assert [each["error"] for each in copy] == ["the row is bad"] * 2
    assert not any({"alone", "error"} & each.keys() for each in other)
    for one, two in zip(copy, other, strict=True):
        assert one["alone"] == one["together"] == two["together"]
    assert any(any(each["alone"]) for each in copy)
