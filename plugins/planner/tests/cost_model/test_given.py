"""Given seconds are what evaluation and simulator say of a step; formulas give what nobody gave."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plugins.planner.tests.test_calibration import CORES, IMPROVE, SHAPE
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate, stages_by_name
from rillflow_planner.hardware import read_hardware
from rillflow_planner.problem import Problem
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths, Workload

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "streaming"))
from as_run import GivenCosts

ROWS = tuple(range(1, 33))
WORKLOAD = Workload(
    prompts=8,
    samples=4,
    prompt=Lengths(kind="fixed", limit=8),
    response=Lengths(kind="measured", limit=32, values=ROWS, in_order=ROWS),
)
PROBLEM = Problem(
    graph=IMPROVE, shapes={"policy": SHAPE}, workload=WORKLOAD, hardware=read_hardware(CORES, "here")
)
GIVEN = {
    "policy.generate": 3.0,
    "reward.score": 0.5,
    "policy.logprobs": 0.25,
    "policy.update": 2.0,
    "policy.publish": 0.125,
}
PLAN = Plan(
    name="toy",
    pools=tuple(PlannedPool(name=name, machine_type="cores", devices=1) for name in ("main", "answers")),
    units={
        "policy": PlannedUnit(pool="main", grid=Grid()),
        SAMPLER: PlannedUnit(pool="answers", grid=Grid(), generate_tp=1),
    },
)


def test_stages_take_what_they_are_given_and_the_rest_what_formulas_say() -> None:
    problem = PROBLEM.of_plan(PLAN)
    said = stages_by_name(problem, evaluate(problem, GivenCosts(problem, GIVEN), PLAN))
    formulas = stages_by_name(problem, evaluate(problem, CostModel(problem), PLAN))
    assert said == pytest.approx(GIVEN | {"controller.advantages": formulas["controller.advantages"]})
    one = stages_by_name(problem, evaluate(problem, GivenCosts(problem, {"policy.update": 2.0}), PLAN))
    assert one == pytest.approx(formulas | {"policy.update": 2.0})


def test_a_simulated_step_is_the_sum_of_what_is_given_and_ahead_its_longest_pool() -> None:
    """Rows 1 to 32 tokens long, the longest of which the given seconds are of."""
    problem = PROBLEM.of_plan(PLAN)
    costs, formula_s = GivenCosts(problem, GIVEN), 32e-6
    in_step = simulate(problem, costs, PLAN, steps=2, parts=1)
    assert in_step.step_s == pytest.approx([sum(GIVEN.values()) + formula_s] * 2, rel=0.01)
    plan = replace(PLAN, freshness=1)
    problem = PROBLEM.of_plan(plan)
    ahead = simulate(problem, GivenCosts(problem, GIVEN), plan, steps=6, parts=1)
    assert ahead.step_s[2:] == pytest.approx(
        [GIVEN["policy.generate"] + GIVEN["policy.publish"]] * 4, rel=0.01
    )
