"""Fused schedules: published instances at their bound, small ones exact, the front, and impossible input."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow.placement.pipeline import Pipeline
from rillflow_parts.fusion.scheduling.problem import FusedProblem, lower_bound
from rillflow_parts.fusion.scheduling.solve import schedule
from tests.parts.fusion.scheduling.check import check
from tests.parts.fusion.scheduling.exhaustive import Exhaustive, drawn
from tests.parts.fusion.scheduling.toys import even, front, within

PUBLISHED = {
    # stages, micro-batches, forward, memory of both models; RLHFuse's latency, peak memory
    0: ((8, 4), (32, 16), (5, 4), (1.95, 2), 708, 19.70),
    1: ((8, 4), (16, 8), (5, 4), (1.95, 2), 372, 15.75),
    2: ((8, 4), (8, 4), (5, 4), (1.95, 2), 225, 15.60),
    3: ((8, 8), (32, 32), (5, 2), (1.95, 1), 702, 20.50),
    4: ((8, 8), (16, 16), (5, 2), (1.95, 1), 366, 18.55),
    5: ((8, 8), (8, 8), (5, 2), (1.95, 1), 225, 15.60),
    6: ((16, 8), (64, 32), (2, 2), (1.64, 2), 618, 39.72),
    7: ((16, 8), (32, 16), (2, 2), (1.64, 2), 330, 29.88),
}
QUICK = {2, 5}


def published(number: int) -> FusedProblem:
    stages, batches, forward, memory, _, peak = PUBLISHED[number]
    models = [
        even(name, stages=n, micro_batches=m, forward_s=f, activation_bytes=kept)
        for name, n, m, f, kept in zip("ab", stages, batches, forward, memory, strict=True)
    ]
    return FusedProblem(
        devices=8 if number < 6 else 16, ascending=models[0], descending=models[1], memory_bytes=peak
    )


def pair(**changes: object) -> FusedProblem:
    """Two stages of 1 s, two micro-batches, each way."""
    one = even("actor", stages=2, micro_batches=2, forward_s=1.0, activation_bytes=1.0)
    two = even("critic", stages=2, micro_batches=2, forward_s=1.0, activation_bytes=1.0)
    given_: dict = {"devices": 2, "ascending": one, "descending": two, **changes}
    return FusedProblem(**given_)


@pytest.mark.parametrize(
    "number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED]
)
def test_published_instances_reach_the_bound_within_the_authors_memory(number: int) -> None:
    problem = published(number)
    latency, peak = PUBLISHED[number][4:]
    found = schedule(problem, budget=80_000)
    assert check(problem, found) == []
    assert lower_bound(problem) == latency == found.latency_s
    assert max(found.peak_bytes) <= peak + 1e-9


def equal_to_exhaustive(seeds: range) -> None:
    for seed in seeds:
        problem = drawn(seed)
        found = schedule(problem)
        assert check(problem, found) == []
        assert Exhaustive(problem, found.latency_s).shortest_s() == found.latency_s, seed
        assert lower_bound(problem) <= found.latency_s


def test_small_problems_have_the_latency_of_exhaustive_search() -> None:
    equal_to_exhaustive(range(10))


@pytest.mark.slow
def test_two_hundred_small_problems_have_the_latency_of_exhaustive_search() -> None:
    equal_to_exhaustive(range(200))


def test_exhaustive_search_knows_a_hand_made_schedule() -> None:
    """One micro-batch each way through two stages: 6 s each alone.

    Uncapped, device 0 runs A forward, B forward, B backward, A backward, and device 1 the mirror image: 6 s.
    With memory for one micro-batch, device 1 is free for B at 4 s, device 0 at 6 s: 4 + 1, 6 + 1 + 2, + 2.
    """
    one = even("a", stages=2, micro_batches=1, forward_s=1.0, activation_bytes=1.0)
    problem = FusedProblem(devices=2, ascending=one, descending=replace(one, name="b"))
    assert Exhaustive(problem, 100.0).shortest_s() == schedule(problem).latency_s == 6.0
    assert Exhaustive(problem, 5.9).shortest_s() is None
    tight = within(problem, 1.0)
    assert Exhaustive(tight, 100.0).shortest_s() == schedule(tight).latency_s == 11.0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), replicas=st.sampled_from([(1, 2), (2, 3), (1, 1), (4, 1), (1, 3)]))
def test_any_sizes_and_ratios_give_a_correct_schedule(seed: int, replicas: tuple[int, int]) -> None:
    small = drawn(seed)
    models = [
        even(each.name, stages=count, micro_batches=each.micro_batches, forward_s=each.forward_s[0],
             activation_bytes=each.activation_bytes, send_s=each.send_s)
        for each, count in zip(small.pipelines, replicas, strict=True)
    ]  # fmt: skip
    problem = FusedProblem(
        devices=math.lcm(*replicas),
        ascending=models[0],
        descending=models[1],
        memory_bytes=small.memory_bytes,
    )
    found = schedule(problem, budget=300, seed=seed)
    assert check(problem, found) == []
    assert lower_bound(problem) * (1 - 1e-9) <= found.latency_s


def test_a_schedule_depends_on_its_arguments_alone() -> None:
    problem = published(4)
    assert schedule(problem, budget=200, seed=3) == schedule(problem, budget=200, seed=3)


def test_no_schedule_of_a_front_is_worse_than_another_in_both() -> None:
    problem = published(2)
    found = front(problem, points=6, budget=300)
    assert len(found) > 2
    for one, two in pairwise(found):
        assert one.latency_s < two.latency_s
        assert max(one.peak_bytes) > max(two.peak_bytes)
    for each in found:
        assert check(within(problem, max(each.peak_bytes)), each) == []


def test_a_known_schedule_is_never_lost() -> None:
    problem = published(5)
    known = schedule(problem)
    assert schedule(problem, budget=1, begin=known).latency_s == known.latency_s == 225
    assert front(problem, points=1, budget=1, begin=known)[0].latency_s == 225
    tighter = within(problem, max(known.peak_bytes) - 1)
    assert check(tighter, schedule(tighter, budget=50, begin=known)) == []


def test_the_lower_bound_by_hand() -> None:
    """Uneven stages: the slow stage of the actor, then the work of a device and its ways in and out."""
    uneven = Pipeline(
        name="actor",
        micro_batches=3,
        forward_s=(1.0, 2.0),
        backward_s=(1.0, 4.0),
        activation_bytes=1.0,
        send_s=0.5,
    )
    assert uneven.bound_s == 1.5 + 3 * (2.0 + 4.0) + 1.5
    assert lower_bound(pair(ascending=uneven)) == 18.0 + 6.0  # device 1: the critic starts and ends there
    longer = replace(uneven, micro_batches=1)
    assert lower_bound(pair(ascending=longer, descending=replace(longer, name="critic"))) == 1.5 + 6.0 + 1.5


def test_without_any_budget_the_pipelines_run_one_after_the_other() -> None:
    problem = pair()
    found = schedule(problem, budget=0)
    assert check(problem, found) == []
    assert found.latency_s <= sum(each.bound_s for each in problem.pipelines)


def test_pipelines_that_cannot_be_aligned_are_refused() -> None:
    with pytest.raises(PlanError, match=r"(?s)3 stages of 'critic' cannot be aligned with 2 devices.*take 6"):
        pair(descending=even("critic", stages=3, micro_batches=1, forward_s=1.0, activation_bytes=1.0))


def test_a_cap_below_one_micro_batch_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cap of 0\.9 bytes is below one micro-batch of 'actor'"):
        pair(memory_bytes=0.9)
    with pytest.raises(PlanError, match=r"cap of nan bytes"):
        pair(memory_bytes=math.nan)


@pytest.mark.parametrize("spent", [0.0, -1.0, math.inf, math.nan])
def test_a_stage_without_positive_seconds_is_refused(spent: float) -> None:
    model = Pipeline(
        name="m", micro_batches=1, forward_s=(1.0, spent), backward_s=(1.0, 1.0), activation_bytes=0.0
    )
    with pytest.raises(PlanError, match=r"stage 1 of 'm' takes \S+ seconds"):
        pair(ascending=model)


def test_other_impossible_pipelines_are_refused() -> None:
    model = pair().ascending
    with pytest.raises(PlanError, match="has 0 micro-batches"):
        pair(ascending=replace(model, micro_batches=0))
    with pytest.raises(PlanError, match="2 forward and 1 backward times"):
        pair(ascending=replace(model, backward_s=(1.0,)))
    with pytest.raises(PlanError, match="-1 activation bytes"):
        pair(ascending=replace(model, activation_bytes=-1.0))
    with pytest.raises(PlanError, match="0 devices"):
        pair(devices=0)
