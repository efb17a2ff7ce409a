"""What a plan costs: its memory, its seconds, and what is said of one that cannot be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.planner.tests.toys import ToyCosts, toy_fleet, toy_problem
from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool
from rillflow_planner.evaluate import evaluate, last_s
from rillflow_planner.problem import Problem
from rillflow_planner.search import search

PROBLEM = toy_problem(1, roles=3, fleets=[toy_fleet()])


def costs(problem: Problem, memory: float = 400.0) -> ToyCosts:
    return ToyCosts(problem=problem, seed=1, memory=memory)


def best_plan(problem: Problem, *, pools: int) -> Plan:
    """The best plan of those with so many pools."""
    ranking = search(problem, costs, freshness=(problem.freshness,), kept=100)
    return next(one.plan for one in ranking.best if len(one.plan.pools) == pools)


def test_one_pool_takes_the_sum_of_its_stages_and_never_idles_for_another() -> None:
    plan = best_plan(PROBLEM, pools=1)
    found = evaluate(PROBLEM, costs(PROBLEM), plan)
    owned = {index for unit in PROBLEM.units for index in unit.stages}
    assert found.pools[0].busy_s == pytest.approx(sum(found.seconds[index] for index in owned))
    assert found.step_s == pytest.approx(last_s(found.timings) + PROBLEM.overhead_s)
    assert found.transfers_s == (0.0,) * len(PROBLEM.graph.edges)
    assert found.pools[0].idle_share == pytest.approx(1 - found.pools[0].busy_s / found.step_s)


def test_apart_the_weights_cross_and_both_pools_stand_still_meanwhile() -> None:
    problem = PROBLEM.apart(2)
    plan = best_plan(problem, pools=2)
    found = evaluate(problem, costs(problem), plan)
    publish = problem.graph.stages[-1].index
    policy, sampler = found.units["policy"], found.units[SAMPLER]
    assert found.seconds[publish] == costs(problem).crossing_s(policy, sampler)
    loads = {pool.name: pool.busy_s for pool in found.pools}
    streamed = 0.6 * found.seconds[0]
    assert loads[sampler.pool.name] == pytest.approx(streamed + found.seconds[publish])
    longer = costs(problem).longest_s(problem.graph.stages[0], sampler.decoder) - found.seconds[0]
    latency = found.timings[publish].end_s + float(np.mean(longer))
    assert found.step_s == pytest.approx(max(*loads.values(), latency / 3) + problem.overhead_s)


def test_what_does_not_fit_is_told_by_bytes_role_and_devices() -> None:
    plan = best_plan(PROBLEM, pools=1)
    with pytest.raises(PlanError, match="more memory on every device") as error:
        evaluate(PROBLEM, _NeverFits(problem=PROBLEM, seed=1, memory=400.0), plan)
    assert "needs the largest part" in error.value.why
    assert "4096 machines" in error.value.fix


class _NeverFits(ToyCosts):
    def room_bytes(self, fleet: str, options: object) -> float:
        return -13.5e9 if len(options) > 1 else 1.0  # type: ignore[arg-type]


def with_policy(plan: Plan, **changes: object) -> Plan:
    """The plan with the policy placed otherwise."""
    return replace(plan, units={**plan.units, "policy": replace(plan.units["policy"], **changes)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: replace(plan, units={"policy": plan.units["policy"]}), "does not place 'critic'"),
        (lambda plan: with_policy(plan, grid=Grid(dp=7)), "policy is dp 7"),
        (lambda plan: with_policy(plan, generate_tp=3), "policy.generate_tp is 3"),
        (lambda plan: replace(plan, units={**plan.units, "crytic": plan.units["critic"]}), "crytic"),
        (lambda plan: replace(plan, freshness=1), "freshness is 1"),
        (
            lambda plan: replace(plan, pools=(replace(plan.pools[0], machine_type="her"),)),
            "machine type 'her'",
        ),
        (lambda plan: replace(plan, pools=(replace(plan.pools[0], devices=5),)), "pool policy has 5 devices"),
        (
            lambda plan: replace(
                plan, pools=(*plan.pools, PlannedPool(name="x", machine_type="here", devices=1))
            ),
            "the pool x has no unit",
        ),
        (lambda plan: replace(plan, pools=()), "pool is 'policy'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: object, said: str) -> None:
    plan = change(best_plan(PROBLEM, pools=1))  # type: ignore[operator]
    with pytest.raises(PlanError, match=said):
        evaluate(PROBLEM, costs(PROBLEM), plan)


def test_pools_that_need_more_machines_than_there_are_are_refused() -> None:
    plan = best_plan(PROBLEM, pools=2)
    pools = tuple(replace(pool, devices=4) for pool in plan.pools)
    units = {name: replace(unit, grid=Grid(dp=4)) for name, unit in plan.units.items()}
    with pytest.raises(PlanError, match="device groups of 4, 4 devices"):
        evaluate(PROBLEM, costs(PROBLEM), replace(plan, pools=pools, units=units))


def pack_naively(sizes: list[int], room: int) -> int:
    """The least machines over all ways to give each pool a machine."""
    whole = sum(size // room for size in sizes if size % room == 0)
    parts = [size for size in sizes if size % room]
    for count in range(len(parts) + 1):
        for given_to in itertools.product(range(count), repeat=len(parts)):
            filled = [
                sum(size for size, one in zip(parts, given_to, strict=True) if one == machine)
                for machine in range(count)
            ]
            if all(one <= room for one in filled):
                return whole + count
    raise AssertionError("every part fits a machine of its own")


@settings(max_examples=60, deadline=None)
@given(
    room=st.sampled_from([4, 6, 8, 12]),
    picks=st.lists(st.integers(0, 20), max_size=5),
)
def test_pools_are_packed_as_well_as_can_be(room: int, picks: list[int]) -> None:
    fleet = toy_fleet(devices=3 * room, per_machine=room)
    sizes = [fleet.sizes[pick % len(fleet.sizes)] for pick in picks]
    assert fleet.machines_needed(sizes) == pack_naively(sizes, room)
