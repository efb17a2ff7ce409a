"""With the real cost model too the search finds what trying every plan finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.factors import Factors
from rillflow.planner.hardware import Fleet, Hardware, shipped_devices
from rillflow.planner.mapping.ranking import Effort
from rillflow.planner.mapping.search import search
from rillflow.planner.model_shape import ModelShape
from rillflow.planner.objective import Objective
from rillflow.planner.problem import Problem
from rillflow.planner.workload import Lengths, Workload
from tests.unit.planner.mapping.toys import every_plan, toy_fleet, toy_problem

SHAPE = ModelShape(
    name="7b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inner=11008, vocabulary=32000
)
WORKLOAD = Workload(
    prompts=64,
    samples=8,
    prompt=Lengths(kind="fixed", limit=512),
    response=Lengths(kind="lognormal", median=800, sigma=0.9, limit=4096),
)


def problem() -> Problem:
    fleet = Fleet(
        name="a100", device=shipped_devices()["A100-80"], devices=8, per_machine=8, between_bandwidth=25e9
    )
    toy = toy_problem(7, roles=2, fleets=[toy_fleet()], functions=0)
    return replace(
        toy,
        shapes={"policy": SHAPE, "critic": replace(SHAPE, is_scalar=True)},
        workload=WORKLOAD,
        hardware=Hardware(name="machine", fleets=(fleet,), factors=Factors()),
    )


@pytest.mark.parametrize("freshness", [0, 1])
def test_seven_billions_on_one_machine_equal_brute_force(freshness: int) -> None:
    step = problem().apart(freshness) if freshness else problem()
    best: dict[object, tuple[float, int]] = {}
    for one in every_plan(step, CostModel(step), Objective()):
        best[one.names] = min(best.get(one.names, (float("inf"), 0)), (one.value, one.devices))
    ranking = search(problem(), CostModel, freshness=(freshness,), effort=Effort(kept=100))
    assert best
    assert [(one.value, one.evaluation.devices) for one in ranking.best] == sorted(best.values())


def test_seven_billions_with_a_sampler_apart_in_step_equal_brute_force() -> None:
    together, apart = problem(), problem().apart()
    best: dict[object, tuple[float, int]] = {}
    for step in (together, apart):
        for one in every_plan(step, CostModel(step), Objective()):
            best[one.names] = min(best.get(one.names, (float("inf"), 0)), (one.value, one.devices))
    ranking = search(together, CostModel, apart_in_step=True, effort=Effort(kept=100))
    assert any("sampler" in one.plan.units for one in ranking.best)
    assert [(one.value, one.evaluation.devices) for one in ranking.best] == sorted(best.values())
    few = search(together, CostModel, apart_in_step=True, effort=Effort(kept=1))
    assert len(few.losers) == len(best) - 1
    assert all(loser.why for loser in few.losers)
