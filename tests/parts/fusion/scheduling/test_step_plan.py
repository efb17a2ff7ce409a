"""The plan of one step: found in little time, never slower than both pipelines one after the other."""

from __future__ import annotations

import pytest

from rillflow.placement.pipeline import Pipeline
from rillflow_parts.fusion.scheduling.problem import FusedProblem, lower_bound
from rillflow_parts.fusion.scheduling.step import LEAST_GAIN, in_1f1b, step_plan
from tests.parts.fusion.scheduling.check import check
from tests.parts.fusion.scheduling.toys import even

ACTOR = even("actor", stages=4, micro_batches=8, forward_s=5.0, activation_bytes=1.95)
CRITIC = even("critic", stages=2, micro_batches=4, forward_s=4.0, activation_bytes=2.0)


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 5), (2, 1), (4, 3), (4, 4), (8, 32)])
def test_1f1b_of_equal_stages_takes_its_formula(stages: int, count: int) -> None:
    pipeline = even("one", stages=stages, micro_batches=count, forward_s=2.0, activation_bytes=1.0)
    assert in_1f1b(pipeline) == pytest.approx((count + stages - 1) * 6.0)


def test_1f1b_of_unequal_stages_waits_for_the_slowest() -> None:
    uneven = Pipeline(
        name="one", micro_batches=2, forward_s=(1.0, 4.0), backward_s=(1.0, 2.0), activation_bytes=1.0
    )
    # stage 0: F0 0-1, F1 1-2;  stage 1: F0 1-5, B0 5-7, F1 7-11, B1 11-13;  stage 0: B0 7-8, B1 13-14
    assert in_1f1b(uneven) == 14.0


def test_a_plan_saves_time_within_the_memory_of_the_larger_pipeline_alone() -> None:
    plan = step_plan(ACTOR, CRITIC)
    problem = FusedProblem(devices=4, ascending=ACTOR, descending=CRITIC, memory_bytes=4 * 1.95)
    assert check(problem, plan.schedule) == []
    assert plan.alone_s == 225.0 and plan.schedule.latency_s <= 203.0 and plan.pays
    assert plan.gain == pytest.approx(1 - plan.schedule.latency_s / 225.0)
    assert 0 < plan.idle < 0.5


@pytest.mark.parametrize(
    ("stages", "counts", "forward", "kept"),
    [
        ((8, 4), (32, 16), (5, 4), (1.95, 2)),
        ((8, 4), (16, 8), (5, 4), (1.95, 2)),
        ((8, 4), (8, 4), (5, 4), (1.95, 2)),
        ((8, 8), (16, 16), (5, 2), (1.95, 1)),
        ((4, 2), (8, 4), (5, 4), (1.95, 2)),
        ((4, 4), (8, 8), (5, 2), (1.95, 1)),
        ((2, 2), (8, 8), (5, 5), (2, 2)),
    ],
)
def test_a_quarter_more_memory_leads_near_the_bound(
    stages: tuple[int, int], counts: tuple[int, int], forward: tuple[int, int], kept: tuple[float, float]
) -> None:
    one, other = (
        even(name, stages=size, micro_batches=count, forward_s=forward_s, activation_bytes=each)
        for name, size, count, forward_s, each in zip("ab", stages, counts, forward, kept, strict=True)
    )
    cap = 1.25 * max(size * each for size, each in zip(stages, kept, strict=True))
    problem = FusedProblem(devices=stages[0], ascending=one, descending=other, memory_bytes=cap)
    plan = step_plan(one, other, memory_bytes=cap)
    assert check(problem, plan.schedule) == []
    assert plan.gain >= 1 - lower_bound(problem) / plan.alone_s - 0.03


def test_equal_arguments_give_equal_plans() -> None:
    assert step_plan(ACTOR, CRITIC) == step_plan(ACTOR, CRITIC)


def test_a_plan_is_at_least_as_good_as_the_one_before() -> None:
    before = step_plan(ACTOR, CRITIC, memory_bytes=1e9).schedule
    after = step_plan(ACTOR, CRITIC, memory_bytes=1e9, begin=before)
    assert after.schedule.latency_s <= before.latency_s
    fewer = even("critic", stages=2, micro_batches=3, forward_s=4.0, activation_bytes=2.0)
    assert step_plan(ACTOR, fewer, begin=before) == step_plan(ACTOR, fewer)


def test_many_micro_batches_leave_nothing_to_save() -> None:
    one, other = (
        even(name, stages=2, micro_batches=100, forward_s=1.0, activation_bytes=1.0) for name in "ab"
    )
    plan = step_plan(one, other)
    assert 0 <= plan.gain < LEAST_GAIN and not plan.pays


def test_a_measured_longer_step_is_searched_for_longer() -> None:
    longer = [even(name, stages=4, micro_batches=8, forward_s=0.5, activation_bytes=1.0) for name in "ab"]
    quick, slow = step_plan(*longer), step_plan(*longer, is_measured=True)
    assert slow.schedule.latency_s <= quick.schedule.latency_s
