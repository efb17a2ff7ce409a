"""Calibration: what was measured under some factors is predicted after fitting from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit
from rillflow_planner.calibration import Observation, calibrate, stages_by_name
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import Factors, Hardware, read_hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem
from rillflow_planner.workload import Lengths, Workload

CORES = {"machine_type": [{"name": "cores", "device": "cpu", "devices": 2, "per_machine": 2}]}
SHAPE = ModelShape(
    name="small", hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, inner=384, vocabulary=14
)
FACTORS = st.builds(
    Factors,
    train_flops=st.floats(0.1, 0.9),
    score_flops=st.floats(0.1, 0.9),
    decode_flops=st.floats(0.1, 0.9),
    launch_s=st.floats(2e-5, 5e-4),
    decode_launch_s=st.floats(5e-6, 1e-4),
)


def graph(*names: str) -> Graph:
    stages = tuple(
        Stage(index=index, role=role, endpoint=endpoint, reads=(), writes=())
        for index, (role, _, endpoint) in enumerate(name.partition(".") for name in names)
    )
    edges = tuple(
        Edge(source=index, destination=index + 1, fields=("tokens",)) for index in range(len(stages) - 1)
    )
    return Graph(name="toy", stages=stages, edges=edges)


LEARN = graph("policy.update")
IMPROVE = graph(
    "policy.generate",
    "reward.score",
    "policy.logprobs",
    "controller.advantages",
    "policy.update",
    "policy.publish",
)


def observed(
    name: str, steps: Graph, prompts: int, samples: int, factors: Factors, devices: int = 1
) -> Observation:
    """What a run would measure whose every stage takes what the factors say."""
    length = Lengths(kind="lognormal", limit=32, median=8, sigma=0.6)
    workload = Workload(
        prompts=prompts, samples=samples, prompt=length, response=length, dtype="float32", function_s=1e-5
    )
    hardware = read_hardware(CORES, "cores")
    problem = Problem(graph=steps, shapes={"policy": SHAPE}, workload=workload, hardware=hardware)
    generates = int(steps is IMPROVE)
    plan = Plan(
        name="toy",
        pools=(PlannedPool(name="main", machine_type="cores", devices=devices),),
        units={"policy": PlannedUnit(pool="main", grid=Grid(tp=devices), generate_tp=devices * generates)},
    )
    true = with_factors(problem, factors)
    paper = evaluate(true, CostModel(true), plan)
    return Observation(
        name=name,
        problem=problem,
        plan=plan,
        stages_s=stages_by_name(true, paper),
        step_s=paper.step_s,
        is_recorded=bool(generates),
    )


def with_factors(problem: Problem, factors: Factors) -> Problem:
    hardware: Hardware = replace(problem.hardware, factors=factors)
    return replace(problem, hardware=hardware)


def run(factors: Factors) -> list[Observation]:
    return [observed("learn", LEARN, 64, 1, factors), observed("improve", IMPROVE, 64, 8, factors)]


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(FACTORS)
def test_every_stage_is_met(factors: Factors) -> None:
    found = calibrate(run(factors))
    assert {stage.stage for stage in found.stages} == {
        "policy.update",
        "policy.generate",
        "policy.logprobs",
    }
    for stage in found.stages:
        assert stage.error == pytest.approx(0, abs=0.05), stage


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(FACTORS)
def test_another_batch_is_predicted(factors: Factors) -> None:
    found = calibrate(run(factors))
    other = observed("other", IMPROVE, 128, 8, factors)
    problem = with_factors(other.problem, found.factors)
    step_s = evaluate(problem, CostModel(problem), other.plan).step_s
    assert step_s == pytest.approx(other.step_s, rel=0.08)


def test_what_is_left_of_a_step_is_overhead() -> None:
    learn, improve = run(Factors())
    slower = [replace(learn, step_s=learn.step_s + 0.5), replace(improve, step_s=improve.step_s + 2.5)]
    found = calibrate(slower).factors
    assert found.step_s == pytest.approx(0.5, abs=1e-3)
    assert found.step_row_s == pytest.approx(2.0 / 512, rel=1e-3)
    alone = calibrate(slower[1:]).factors
    assert (alone.step_s, alone.step_row_s) == (0.0, pytest.approx(2.5 / 512, rel=1e-3))


def test_rows_that_took_less_than_a_plain_step_s_overhead_cost_nothing() -> None:
    learn, improve = run(Factors())
    odd = [replace(learn, step_s=learn.step_s + 0.5), replace(improve, step_s=improve.step_s + 0.2)]
    assert calibrate(odd).factors.step_row_s == 0.0


def test_what_a_run_says_nothing_of_stays_as_guessed() -> None:
    found = calibrate(run(Factors(train_flops=0.2))).factors
    guess = Factors()
    assert (found.inside_links, found.between_links, found.memory) == (
        guess.inside_links,
        guess.between_links,
        guess.memory,
    )


def test_links_are_fitted_where_devices_worked_together() -> None:
    factors = replace(Factors(), collective_s=5e-3)
    both = [observed("improve", IMPROVE, 64, 8, factors, devices=2)]
    found = calibrate([*run(factors), *both])
    assert found.factors.collective_s > 10 * Factors().collective_s
    assert all(abs(stage.error) < 0.05 for stage in found.stages)


def test_a_device_that_does_more_than_it_says_is_named() -> None:
    quick = [
        replace(one, stages_s={name: seconds / 20 for name, seconds in one.stages_s.items()})
        for one in run(Factors(train_flops=0.9, score_flops=0.9))
    ]
    assert "train_flops" in calibrate(quick).at_limit


def test_nothing_measured_is_refused() -> None:
    empty = [replace(one, stages_s={}) for one in run(Factors())]
    with pytest.raises(PlanError, match="no times to calibrate with"):
        calibrate(empty)
