"""Plan and simulator say the same of drawn problems: in step by the formulas, ahead as the plan is shown."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "planner"))

from drawn_plans import compared, compared_plan, drawn, drawn_on_processor

from rillflow.app.recipe import load_recipe
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.turns import DRAWN_ROWS
from rillflow_planner.evaluate import evaluate
from rillflow_planner.recipe_problem import open_cluster, state_problem
from rillflow_planner.search import search
from rillflow_planner.simulator.simulate import simulate

ROOT = Path(__file__).parents[4]
QUICK = (8, 12, 25)
"""Those of every day: in step and ahead, with light and heavy tails."""


@pytest.mark.parametrize("recipe", ["ppo", "rloo", "safe_rlhf", "arithmetic"])
def test_on_cores_formulas_and_simulation_have_the_same_terms(recipe: str) -> None:
    hardware = open_cluster(ROOT / "clusters/laptop.toml")
    problem = state_problem(load_recipe(ROOT / "recipes" / recipe / "run.toml"), hardware).problem
    for one in search(problem, CostModel).best[:3]:
        step = problem.of_plan(one.plan)
        found = simulate(step, CostModel(step), one.plan, steps=8)
        assert found.mean_step_s == pytest.approx(one.evaluation.step_s, rel=0.03)


def test_on_cores_drawn_problems_agree_to_a_hundredth_in_the_median() -> None:
    found = [compared_plan(drawn_on_processor(seed), times=1) for seed in range(16)]
    assert median(abs(one.shown_s / one.simulated_s - 1) for one in found) < 0.01


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=8, deadline=None)
def test_on_cores_every_drawn_problem_agrees(seed: int) -> None:
    """Within 10%: the simulated steps are few, so their lengths differ from the plan's."""
    found = compared_plan(drawn_on_processor(seed), times=1)
    assert found.shown_s == pytest.approx(found.simulated_s, rel=0.1)


@pytest.mark.parametrize("seed", [73, 140])
def test_on_cores_drawn_rows_in_few_slots_take_the_simulated_seconds(seed: int) -> None:
    """Both draw the same lengths: the plan means over as many blocks as the simulation runs."""
    one = drawn_on_processor(seed)
    costs, rows = CostModel(one.problem), one.problem.workload.rows
    assert one.problem.workload.rows_at_once == 4
    found = simulate(one.problem, costs, one.plan, steps=DRAWN_ROWS // rows, seed=0)
    assert evaluate(one.problem, costs, one.plan).step_s == pytest.approx(found.mean_step_s, rel=0.002)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=8, deadline=None)
def test_a_term_of_a_rows_beginning_is_in_both(seed: int) -> None:
    """A second for every row that enters is in the plan and in the simulation."""
    one = drawn_on_processor(seed)
    factors = replace(one.problem.hardware.factors, row_s=1.0, call_s=2.0)
    problem = replace(one.problem, hardware=replace(one.problem.hardware, factors=factors))
    found = compared_plan(replace(one, problem=problem), times=1)
    assert found.shown_s == pytest.approx(found.simulated_s, rel=0.05)


@pytest.mark.parametrize("seed", QUICK)
def test_what_is_shown_of_a_plan_is_what_is_simulated(seed: int) -> None:
    found = compared(seed, times=1)
    assert found.shown_s == pytest.approx(found.simulated_s, rel=0.05)


@pytest.mark.parametrize("seed", [8, 23])
def test_idle_time_in_step_is_the_same_by_formulas_and_simulated(seed: int) -> None:
    """Within 3 points of the step; with the work it is all of it."""
    one = drawn(seed)
    costs = CostModel(one.problem)
    found = simulate(one.problem, costs, one.plan, steps=20)
    for use, time in zip(evaluate(one.problem, costs, one.plan).pools, found.pools, strict=True):
        assert use.idle_share == pytest.approx(time.idle_share, abs=0.03)
        assert time.busy_s + sum(time.idle_s.values()) == pytest.approx(sum(found.step_s))


@pytest.mark.parametrize("drains", [False, True])
def test_without_interruption_formulas_say_who_waits_for_whom(drains: bool) -> None:
    """Replicas that each take weights when their own rows have ended, or all when the last of all has."""
    problem, plan = (one := drawn(163)).problem, one.plan
    engine = replace(problem.hardware.engine, interrupts=False, drains=drains)
    problem = replace(problem, hardware=replace(problem.hardware, engine=engine))
    found = simulate(problem, CostModel(problem), plan, steps=64).settled_step_s
    assert evaluate(problem, CostModel(problem), plan).step_s == pytest.approx(found, rel=0.06)
