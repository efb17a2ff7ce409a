"""A model whose first stage is on the last rank has the weights, files and gradients of the usual order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rillflow.placement.mesh import Mesh
from rillflow.records.metrics import merge_metrics
from rillflow.sharding.layout import Layout, logical_weights, training_layout
from rillflow.sharding.mesh import rank_groups
from rillflow.sharding.module import Parallel
from rillflow.sharding.resharding import gathered
from rillflow.sharding.sharded_file import load_sharded
from rillflow.workers.collectives import Ranks

sys.path.insert(0, str(Path(__file__).parent))
from meshes import Case, decoder, own_rows, scores, trainer, update, whole
from processes import together
from sharded import save_sharded


def made(case: Case, ranks: Ranks, *, is_descending: bool) -> tuple[Parallel, Layout]:
    mesh = Mesh.of(dp=case.dp, pp=case.pp, tp=case.tp)
    mesh = mesh.turned("pp") if is_descending else mesh
    parallel = Parallel(decoder(case), rank_groups(mesh, ranks, case.fsdp))
    weights = logical_weights(decoder(case))
    return parallel, training_layout(weights, parallel.parts, parallel.stages, mesh, fsdp=case.fsdp)


def everything(case: Case, parallel: Parallel, layout: Layout, ranks: Ranks) -> dict[str, Tensor]:
    """All weights, gathered on the first rank."""
    weights = logical_weights(decoder(case))
    to = dict.fromkeys(weights, 0)
    return {name: each.clone() for name, each in gathered(weights, layout, parallel.parameters, ranks, to)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def turned(ranks: Ranks, case: Case, folder: Path) -> dict[str, Any]:
    """Train a step both ways; gather both, save the descending model and read it into the other."""
    (usual, layout), (other, turned_layout) = (
        made(case, ranks, is_descending=is_descending) for is_descending in (False, True)
    )
    weights = logical_weights(decoder(case))
    begun = everything(case, usual, layout, ranks)
    found: dict[str, Any] = {
        "gathered": same(begun, everything(case, other, turned_layout, ranks)),
        "complete": ranks.rank > 0 or begun.keys() == weights.keys(),
        "stages": [usual.groups.stage, other.groups.stage],
        "speaks": [usual.groups.speaks, other.groups.speaks],
    }
    for name, parallel in (("usual", usual), ("turned", other)):
        rows = own_rows(case, parallel.groups)
        learner = trainer(case, parallel.module, parallel)
        before = scores(case, learner, rows)
        metrics = update(case, learner, rows)
        held = {each: whole(parameter).clone() for each, parameter in parallel.parameters.items()}
        found[name] = {
            "scores": before.values.numpy(),
            "metrics": metrics,
            "weights": {each: tensor.numpy() for each, tensor in held.items()},
        }
    save_sharded(folder, weights, turned_layout, other.local_weights(), ranks)
    load_sharded(folder, weights, layout, usual.local_weights(), ranks)
    loaded = everything(case, usual, layout, ranks)
    found["loaded"] = same(loaded, everything(case, other, turned_layout, ranks))
    found["changed"] = ranks.rank > 0 or not same(loaded, begun)
    return found


def check(case: Case, folder: Path) -> None:
    size = case.dp * case.pp * case.tp
    by_rank = together(size, turned, case, folder)
    for found in by_rank:
        assert found["gathered"] and found["complete"] and found["loaded"] and found["changed"]
        assert sum(found["stages"]) == case.pp - 1
    assert sum(found["speaks"][1] for found in by_rank) == case.dp
    usual, other = (
        {name: each for found in by_rank for name, each in found[way]["weights"].items()}
        for way in ("usual", "turned")
    )
    assert usual.keys() == other.keys()
    for name, weight in usual.items():
        assert abs(weight - other[name]).max() <= 1e-6, name
    spoken = [
        [found[way] for found in by_rank if found["speaks"][way == "turned"]] for way in ("usual", "turned")
    ]
    for one, two in zip(*spoken, strict=True):
        assert (one["scores"] == two["scores"]).all()
    metrics = [merge_metrics([each["metrics"] for each in way]) for way in spoken]
    assert metrics[0].keys() == metrics[1].keys()
    for name, metric in metrics[0].items():
        assert metrics[1][name].value == pytest.approx(metric.value, rel=1e-6), name


def test_a_descending_model_is_the_usual_one(tmp_path: Path) -> None:
    check(Case(kind="qwen3", dtype="float32", pp=2), tmp_path / "tied")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(kind="qwen3", dtype="float32", pp=4, scalar=True),
        Case(kind="qwen3", dtype="float32", pp=2, tp=2, tied=False),
        Case(kind="qwen3", dtype="float32", pp=2, tp=2, sequence=False, checkpointing=True),
        Case(kind="qwen3", dtype="float32", dp=2, pp=2, fsdp=2),
        Case(kind="qwen3", dtype="float32", dp=2, pp=2, lopsided=True),
    ],
    ids=lambda case: f"dp{case.dp}-pp{case.pp}-tp{case.tp}-fsdp{case.fsdp}",
)
def test_every_descending_mesh_is_the_usual_one(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path / "model")
