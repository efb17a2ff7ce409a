"""In step: the schedule's seconds for the same stages, every second of a pool accounted for, rows counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugins.planner.tests.fakes import SPLIT, STAGE_S, TOGETHER, FakeDecoder, Toy, toy
from rillflow.errors import PlanError
from rillflow.placement.plan import SAMPLER
from rillflow_planner.evaluate import evaluate, in_turn, last_s, tasks_of
from rillflow_planner.simulator.result import IdleCause, Simulation
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths

LOGNORMAL = Lengths(kind="lognormal", limit=400, median=40, sigma=1.0)
PLACEMENTS = [TOGETHER, SPLIT, {**SPLIT, SAMPLER: "third"}, {**TOGETHER, "critic": "b", "reference": "c"}]


def run(one: Toy, steps: int = 1, seed: int = 0) -> Simulation:
    return simulate(one.problem, one.costs, one.plan, steps=steps, seed=seed)


def in_order(one: Toy, found: Simulation) -> float:
    """The schedule's seconds of a step whose generation takes as long as it was simulated to."""
    known = evaluate(one.problem, one.costs, one.plan)
    owners = {index: unit.pool.name for unit in known.units.values() for index in unit.unit.stages}
    stages = one.problem.graph.stages
    seconds = [found.generation_s[0] if stage.index == 0 else known.seconds[stage.index] for stage in stages]
    pools = [owners.get(stage.index, "") for stage in stages]
    tasks = tasks_of(one.problem.graph, seconds=seconds, pools=pools, transfers=known.transfers_s)
    return last_s(in_turn(tasks))


SECONDS = st.fixed_dictionaries({name: st.floats(0.0, 5.0) for name in STAGE_S})


@given(
    stage_s=SECONDS, link_s=st.floats(0.0, 2.0), pools=st.sampled_from(PLACEMENTS), seed=st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_a_step_is_the_schedule_of_its_stages(
    stage_s: dict[str, float], link_s: float, pools: dict[str, str], seed: int
) -> None:
    one = toy(pools, stage_s=stage_s, link_s=link_s, weights_s=1.0, response=LOGNORMAL)
    found = run(one, seed=seed)
    assert found.step_s[0] == pytest.approx(in_order(one, found), rel=1e-12)


@pytest.mark.parametrize("pools", PLACEMENTS)
def test_rows_of_one_length_take_what_the_evaluation_says(pools: dict[str, str]) -> None:
    one = toy(pools, link_s=0.1, weights_s=0.3, step_s=0.7)
    found = run(one, steps=3)
    assert found.step_s == pytest.approx([evaluate(one.problem, one.costs, one.plan).step_s] * 3)


@given(stage_s=SECONDS, pools=st.sampled_from(PLACEMENTS), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_busy_and_idle_make_up_the_wall(stage_s: dict[str, float], pools: dict[str, str], seed: int) -> None:
    one = toy(pools, stage_s=stage_s, link_s=0.2, weights_s=1.0, response=LOGNORMAL, step_s=0.1)
    found = run(one, steps=3, seed=seed)
    for pool in found.pools:
        assert pool.busy_s + sum(pool.idle_s.values()) == pytest.approx(sum(found.step_s))


def test_idleness_has_its_cause() -> None:
    found = run(toy({**SPLIT, SAMPLER: "third"}, response=LOGNORMAL, link_s=0.1, weights_s=1.0, step_s=0.5))
    by_name = {pool.pool: pool.idle_s for pool in found.pools}
    assert set(by_name["third"]) == {IdleCause.TAIL, IdleCause.WEIGHTS, IdleCause.OVERHEAD}
    assert set(by_name["left"]) == {IdleCause.DATA, IdleCause.OVERHEAD}
    assert set(by_name["right"]) == {IdleCause.DATA, IdleCause.NOTHING, IdleCause.OVERHEAD}
    assert by_name["left"][IdleCause.OVERHEAD] == pytest.approx(0.5)


@given(factor=st.floats(0.1, 1.0), name=st.sampled_from(sorted(STAGE_S)), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_faster_devices_never_make_a_step_longer(factor: float, name: str, seed: int) -> None:
    slow = toy(SPLIT, response=LOGNORMAL)
    usual, quicker = slow.costs.replica, FakeDecoder(token_s=0.01 * factor, row_s=0.0005 * factor)
    before = run(slow, seed=seed).step_s[0]
    faster_stage = {**STAGE_S, name: STAGE_S[name] * factor}
    for stage_s, replica in ((faster_stage, usual), (STAGE_S, quicker)):
        one = toy(SPLIT, response=LOGNORMAL, stage_s=stage_s, replica=replica)
        assert run(one, seed=seed).step_s[0] <= before * (1 + 1e-9)


def test_the_same_seed_gives_the_same_simulation_and_another_one_another() -> None:
    one = toy(SPLIT, response=LOGNORMAL)
    assert run(one, steps=3, seed=5) == run(one, steps=3, seed=5)
    assert run(one, steps=3, seed=5).step_s != run(one, steps=3, seed=6).step_s


def test_a_step_is_the_same_however_many_come_after_it() -> None:
    one = toy(SPLIT, response=LOGNORMAL)
    assert run(one, steps=5).step_s[:2] == run(one, steps=2).step_s


@given(
    prompts=st.floats(1.0, 2.0), samples=st.floats(1.0, 2.0), steps=st.integers(1, 8), seed=st.integers(0, 99)
)
@example(prompts=2.0, samples=1.25, steps=1, seed=42)  # two prompts are complete at the same moment
@settings(max_examples=30, deadline=None)
def test_every_row_is_trained_once_or_dropped_with_a_reason(
    prompts: float, samples: float, steps: int, seed: int
) -> None:
    one = toy(TOGETHER, response=LOGNORMAL, oversample_prompts=prompts, oversample_samples=samples)
    found = run(one, steps=steps, seed=seed)
    assert found.trained == steps * one.problem.workload.rows
    assert found.begun == found.trained + sum(found.dropped.values())
    assert all(found.dropped.values())


def test_prompts_put_aside_come_back_once_they_fill_a_step() -> None:
    """A quarter more prompts than wanted: every fifth step trains those put aside, and takes longest."""
    one = toy(TOGETHER, prompts=16, response=LOGNORMAL, oversample_prompts=1.25)
    seconds = run(one, steps=10).generation_s
    assert sorted(range(10), key=lambda step: seconds[step])[-2:] in ([4, 9], [9, 4])


def test_over_sampling_shortens_generation_with_a_long_tail() -> None:
    plain = run(toy(TOGETHER, prompts=16, response=LOGNORMAL), steps=10)
    begun = run(toy(TOGETHER, prompts=16, response=LOGNORMAL, oversample_samples=1.5), steps=10)
    assert sum(begun.generation_s) < sum(plain.generation_s)


def test_memory_peaks_grow_with_the_rows_in_the_cache() -> None:
    few = run(toy(SPLIT, prompts=1, samples=1, replica=FakeDecoder(capacity_tokens=500)))
    many = run(toy(SPLIT, prompts=8, samples=8, replica=FakeDecoder(capacity_tokens=500)))
    left = [next(pool for pool in found.pools if pool.pool == "left") for found in (few, many)]
    assert 50.0 <= left[0].peak_bytes < left[1].peak_bytes <= 90.0 + 5.0


def test_spans_are_the_stages_of_every_step() -> None:
    found = run(toy(SPLIT), steps=2)
    update = [span for span in found.spans if span.stage == "policy.update"]
    assert [span.step for span in update] == [1, 2]
    span = update[0]
    assert span.stage == "policy.update"
    assert span.end_s - span.start_s == pytest.approx(STAGE_S["policy.update"])
    lanes = {span.lane for span in found.spans if span.stage == "policy.generate"}
    assert lanes == {1, 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"oversample_prompts": 0.5}, "oversample_prompts is 0.5"),
        ({"oversample_samples": float("nan")}, "oversample_samples is nan"),
    ],
)
def test_plans_that_cannot_be_simulated_are_refused(changes: dict[str, float], said: str) -> None:
    one = toy(TOGETHER)
    with pytest.raises(PlanError, match=said):
        simulate(one.problem, one.costs, replace(one.plan, **changes), steps=1)


@pytest.mark.parametrize("steps", [0, -1, 10**9])
def test_steps_are_a_sensible_number(steps: int) -> None:
    with pytest.raises(PlanError, match=f"the number of steps is {steps}"):
        run(toy(TOGETHER), steps=steps)
