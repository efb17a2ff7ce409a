"""Fused updates: their price, their place beside the best plan without fusion, and plans that are refused."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from plugins.planner.tests.toys import question
from rillflow.errors import PlanError
from rillflow.graph.graph import Edge
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit
from rillflow_parts.fusion.alignment import FUSED, fused_of
from rillflow_parts.fusion.scheduling.problem import lower_bound
from rillflow_parts.fusion.scheduling.solve import quick_schedule
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.fused import PASSES, scheduled
from rillflow_planner.evaluate import StepEvaluation, evaluate
from rillflow_planner.fusion import with_fusion
from rillflow_planner.hardware import shipped_stacks
from rillflow_planner.problem import Problem
from rillflow_planner.ranking import PAYS, Ranking, SearchObjective
from rillflow_planner.search import search
from tests.parts.fusion.scheduling.check import check

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "streaming"))
from as_run import GivenCosts

MODEL = Path(__file__).parents[3] / "examples/planning/qwen2.5-7b/config.json"
PAIR = ("policy", "critic")


@cache
def problem_of(between: str = "1 GB/s", minibatches: int = 1, algorithm: str = "ppo") -> Problem:
    """Return a step timed by published steps of Megatron, whose updates are short beside slow links."""
    problem = question(
        model=MODEL,
        gpus="64xH100",
        algorithm=algorithm,
        response="mean=300,max=1024",
        prompt="1024",
        prompts=512,
        samples=1,
        minibatches=minibatches,
        between=between,
    ).problem
    hardware = replace(problem.hardware, factors=shipped_stacks()["areal"].factors)
    return replace(problem, hardware=hardware)


@cache
def ranking_of(between: str = "1 GB/s", minibatches: int = 1, algorithm: str = "ppo") -> Ranking:
    problem = problem_of(between, minibatches, algorithm)
    return with_fusion(problem, search(problem, CostModel), SearchObjective())


def placed(policy: Grid, critic: Grid, fused: tuple[str, ...] = PAIR) -> Plan:
    grids = {"policy": policy, "reference": Grid(dp=64), "critic": critic}
    units = {
        name: PlannedUnit(pool="all", grid=grid, generate_tp=grid.tp if name == "policy" else 0)
        for name, grid in grids.items()
    }
    pool = PlannedPool(name="all", machine_type=problem_of().hardware.fleets[0].name, devices=64)
    return Plan(name="ppo", pools=(pool,), units=units, settings={FUSED: [*fused]} if fused else {})


def updates_s(problem: Problem, found: StepEvaluation) -> float:
    return sum(found.seconds[index] for index in sorted(problem.training))


LONG, SHORT = Grid(dp=2, pp=8, tp=4), Grid(dp=4, pp=4, tp=4)


@pytest.mark.parametrize("critic", [LONG, SHORT])
def test_fused_updates_take_less_than_in_turn_and_not_less_than_their_bound(critic: Grid) -> None:
    problem, plan = problem_of(), placed(LONG, critic)
    apart = evaluate(problem, CostModel(problem), replace(plan, settings={}))
    fused = evaluate(problem, CostModel(problem), plan)
    bound = evaluate(problem, CostModel(problem, 0), plan)
    least_s, fused_s, apart_s = (updates_s(problem, one) for one in (bound, fused, apart))
    assert least_s * (1 - 1e-9) <= fused_s < 0.95 * apart_s
    assert fused.step_s - apart.step_s == pytest.approx(updates_s(problem, fused) - updates_s(problem, apart))
    assert fused.pools[0].room_bytes >= 0


def test_the_price_is_that_of_a_schedule_which_passes_the_check() -> None:
    problem, plan = problem_of(), placed(LONG, SHORT)
    costs = CostModel(problem)
    seats = evaluate(problem, costs, replace(plan, settings={})).units
    options = {name: seat.option for name, seat in seats.items()}
    pair = [seats[name].unit for name in PAIR]
    parts, whole = costs.fused_stage(plan.pools[0].machine_type, options, pair)
    made = quick_schedule(whole)
    assert check(whole, made) == []
    assert (whole.ascending.name, whole.descending.name) == PAIR
    told = updates_s(problem, evaluate(problem, costs, plan))
    called = 2 * problem.hardware.factors.call_s
    assert told == pytest.approx(made.latency_s + sum(part.beside_s for part in parts) + called, rel=0.02)


def test_long_pipelines_are_scheduled_with_fewer_micro_batches() -> None:
    problem, plan = problem_of(), placed(LONG, LONG)
    costs = CostModel(problem)
    seats = evaluate(problem, costs, replace(plan, settings={})).units
    options = {name: seat.option for name, seat in seats.items()}
    _, short = costs.fused_stage("h100", options, [seats[name].unit for name in PAIR])
    more = [replace(one, micro_batches=96) for one in short.pipelines]
    long = replace(short, ascending=more[0], descending=more[1])
    assert PASSES < 2 * 8 * 192
    found_s, peak = scheduled(long, 4)
    assert lower_bound(long) * (1 - 1e-9) <= found_s <= 1.05 * quick_schedule(long).latency_s
    assert peak <= long.memory_bytes


def test_a_fused_plan_leads_where_it_pays() -> None:
    ranking, problem = ranking_of(), problem_of()
    fusion, best = ranking.fusion, ranking.best[0]
    assert fusion is not None and fusion.best is best and not fusion.is_bound and not fusion.why
    assert set(fused_of(best.plan)) == set(PAIR)
    assert fusion.gain >= PAYS and fusion.plain.value == ranking.best[1].value
    assert all(one.why for one in ranking.best[1:])
    assert evaluate(problem, CostModel(problem), best.plan).step_s == best.evaluation.step_s
    assert not any(fused_of(one.plan) for one in ranking.best[1:])


@pytest.mark.parametrize(
    ("between", "minibatches", "told"),
    [
        ("50 GB/s", 1, "policy.update takes"),
        ("3 GB/s", 8, "it gains"),
        ("1 GB/s", 32, "its stages take turns"),
    ],
)
def test_no_fused_plan_leads_where_it_does_not_pay(between: str, minibatches: int, told: str) -> None:
    ranking = ranking_of(between, minibatches)
    assert ranking.fusion is not None and ranking.fusion.best is not None
    assert told in ranking.fusion.why
    assert ranking.fusion.gain < PAYS
    assert ranking.fusion.plain is ranking.best[0]
    assert not any(fused_of(one.plan) for one in ranking.best)


def test_safe_rlhf_has_three_pairs_and_a_step_with_one_model_none() -> None:
    pairs = [(one.name, two.name) for one, two in problem_of(algorithm="safe_rlhf").fusable]
    assert len(pairs) == 3 and ("policy", "critic") in pairs
    assert ranking_of(algorithm="safe_rlhf").fusion is not None
    assert problem_of(algorithm="grpo").fusable == ()
    assert ranking_of(algorithm="grpo").fusion is None


def test_measured_seconds_of_both_updates_are_used_as_they_are() -> None:
    problem, plan = problem_of(), placed(LONG, SHORT)
    given = GivenCosts(problem, {"policy.update": 3.0, "critic.update": 2.0})
    assert updates_s(problem, evaluate(problem, given, plan)) == 5.0


def test_updates_that_need_each_other_are_refused() -> None:
    problem = problem_of()
    first, second = sorted(problem.training)
    edges = (*problem.graph.edges, Edge(source=first, destination=second, fields=("values",)))
    chained = replace(problem, graph=replace(problem.graph, edges=edges))
    with pytest.raises(PlanError, match="neither update may need the other's result") as caught:
        evaluate(chained, CostModel(chained), placed(LONG, SHORT))
    assert "can fuse nothing" in caught.value.why
    assert with_fusion(chained, search(chained, CostModel), SearchObjective()).fusion is None


def test_a_role_without_an_update_is_refused() -> None:
    plan = placed(LONG, SHORT, ("policy", "reference"))
    units = {**plan.units, "reference": replace(plan.units["reference"], grid=SHORT)}
    with pytest.raises(PlanError, match="can fuse policy and critic"):
        evaluate(problem_of(), CostModel(problem_of()), replace(plan, units=units))


def test_an_update_without_seconds_is_refused() -> None:
    workload = replace(problem_of().workload, gradient_share=0.0)
    problem = replace(problem_of(), workload=workload)
    with pytest.raises(PlanError, match="takes 0 seconds"):
        evaluate(problem, CostModel(problem), placed(LONG, SHORT))


def test_memory_below_one_micro_batch_is_refused() -> None:
    problem, plan = problem_of(), placed(LONG, SHORT)
    whole = evaluate(problem, CostModel(problem), replace(plan, settings={}))
    (fleet,) = problem.hardware.fleets
    held = whole.pools[0].resident_bytes / problem.hardware.factors.memory
    device = replace(fleet.device, memory_bytes=math.ceil(held) + 1)
    small = replace(problem, hardware=replace(problem.hardware, fleets=(replace(fleet, device=device),)))
    with pytest.raises(PlanError, match="below one micro-batch"):
        evaluate(small, CostModel(small), plan)
