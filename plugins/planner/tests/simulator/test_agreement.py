"""Plan and simulator say the same of drawn problems: in step by the formulas, ahead as the plan is shown."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from drawn_plans import compared, drawn

from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate
from rillflow_planner.simulator.simulate import simulate

QUICK = (8, 12, 25)
"""Those of every day: in step and ahead, with light and heavy tails."""


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
