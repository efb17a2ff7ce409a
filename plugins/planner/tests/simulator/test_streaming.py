"""Rows flow: none is trained too old, none is lost, and the steady step is the one on paper."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.planner.tests.fakes import APART, STAGE_S, STREAMED, FakeDecoder, Toy, toy
from rillflow.errors import PlanError
from rillflow.placement.plan import SAMPLER
from rillflow_planner.evaluate import evaluate
from rillflow_planner.simulator.result import IdleCause, Simulation
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths

HEAVY = Lengths(kind="lognormal", limit=800, median=30, sigma=1.2)
SLOW_TRAINING = {**STAGE_S, "policy.update": 6.0}
SLOW_SAMPLING = FakeDecoder(token_s=0.05, row_s=0.01)


def run(one: Toy, steps: int = 12, seed: int = 0) -> Simulation:
    return simulate(one.problem, one.costs, one.plan, steps=steps, seed=seed)


SITUATIONS = st.fixed_dictionaries(
    {
        "freshness": st.integers(1, 4),
        "interrupts": st.booleans(),
        "prompts": st.integers(1, 6),
        "samples": st.integers(1, 4),
        "weights_s": st.sampled_from([0.0, 0.5, 4.0]),
        "counts": st.booleans(),
        "link_s": st.sampled_from([0.0, 0.3]),
        "replica": st.sampled_from(
            [FakeDecoder(), SLOW_SAMPLING, FakeDecoder(replicas=3, most_rows=2, capacity_tokens=900)]
        ),
    }
)


@given(
    given_=SITUATIONS,
    pools=st.sampled_from([APART, STREAMED]),
    seed=st.integers(0, 999),
    streams=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_the_laws_hold_in_every_situation(
    given_: dict[str, object],
    pools: dict[str, str],
    seed: int,
    streams: int,
) -> None:
    one = toy(pools, response=HEAVY, streams=streams, **given_)
    workload = replace(one.problem.workload, minibatches=one.problem.workload.prompts)
    one = replace(one, problem=replace(one.problem, workload=workload))
    found = run(one, steps=8, seed=seed)
    rows = one.problem.workload.rows
    assert max(found.ages) <= one.plan.freshness or given_["counts"]
    assert found.unfinished <= (one.plan.freshness + 1) * rows
    assert found.trained == 8 * rows == sum(found.ages.values())
    assert found.begun == found.trained + found.unfinished and not found.dropped
    for pool in found.pools:
        assert pool.busy_s + sum(pool.idle_s.values()) == pytest.approx(sum(found.step_s))
    assert sum(found.step_s) >= found.step_s[0] > 0.0


@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_the_same_seed_gives_the_same_simulation(seed: int) -> None:
    one = toy(APART, response=HEAVY, freshness=2)
    again, other = run(one, seed=seed), run(one, seed=seed + 1)
    assert run(one, seed=seed) == again != other


@pytest.mark.parametrize("freshness", [1, 2, 4])
@pytest.mark.parametrize(
    ("stage_s", "replica"),
    [(SLOW_TRAINING, FakeDecoder()), (STAGE_S, SLOW_SAMPLING)],
    ids=["training is slow", "sampling is slow"],
)
def test_a_steady_step_of_rows_of_one_length_is_the_one_on_paper(
    freshness: int, stage_s: dict[str, float], replica: FakeDecoder
) -> None:
    """A batch fills all slots four times, so that replicas run dry neither on paper nor here."""
    one = toy(STREAMED, prompts=16, stage_s=stage_s, replica=replica, freshness=freshness, weights_s=0.1)
    paper = evaluate(one.problem, one.costs, one.plan).step_s
    assert run(one, steps=30).settled_step_s == pytest.approx(paper, rel=0.05)


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_looser_bound_is_never_much_slower(interrupts: bool) -> None:
    """Not a law: which replica begins what differs, so a step may be a little longer; over many it is not."""
    steps = [
        run(
            toy(STREAMED, prompts=8, response=HEAVY, freshness=k, interrupts=interrupts), steps=30
        ).settled_step_s
        for k in (1, 2, 3, 4, 8)
    ]
    assert all(after <= before * 1.05 for before, after in pairwise(steps))
    assert steps[-1] < 0.9 * steps[0], "with a long tail the bound is worth something"


@pytest.mark.parametrize("more", range(5))
def test_a_settled_step_does_not_depend_on_where_in_a_burst_the_last_one_lies(more: int) -> None:
    """Bursts of five steps, 2 s each; the mean of the later half is off by up to a fifth."""
    found = replace(run(toy(STREAMED, freshness=1), steps=1), step_s=(9.0, 0.25, 0.25, 0.25, 0.25) * 8)
    found = replace(found, step_s=found.step_s[more:])
    assert found.settled_step_s == pytest.approx(2.0, rel=0.05)


def test_flowing_rows_are_faster_than_steps_in_step() -> None:
    flowing = run(toy(STREAMED, response=HEAVY, prompts=8, freshness=1), steps=20)
    in_step = run(toy(STREAMED, response=HEAVY, prompts=8), steps=20)
    assert flowing.settled_step_s < in_step.mean_step_s


@pytest.mark.parametrize("samples", [1, 4])
def test_a_fraction_of_a_step_in_advance_leaves_the_longest_rows_for_later(samples: int) -> None:
    """As verl's staleness_threshold: the more rows may have begun, the shorter a step; rows may get old."""
    found = [
        run(
            toy(
                STREAMED,
                prompts=20,
                samples=samples,
                response=HEAVY,
                replica=FakeDecoder(most_rows=200),
                freshness=k,
                counts=True,
                streams=1,
            ),
            steps=30,
        )
        for k in (0, 0.1, 0.5, 1)
    ]
    steps = [one.settled_step_s for one in found]
    assert all(after < 0.99 * before for before, after in pairwise(steps)), steps
    assert max(found[0].ages) == 0 and max(found[2].ages) > 1
    assert found[1].unfinished <= 1.1 * 20 * samples


def test_a_fraction_is_refused_where_the_age_of_a_row_is_bounded() -> None:
    with pytest.raises(PlanError, match=r"freshness is 0\.5"):
        run(toy(STREAMED, freshness=0.5))
    one = toy(STREAMED, freshness=0.5, counts=True)
    with pytest.raises(PlanError, match=r"parts is 2 and freshness 0\.5"):
        simulate(one.problem, one.costs, one.plan, steps=1, parts=2)


def test_idleness_has_its_cause() -> None:
    trained = run(toy(APART, stage_s=SLOW_TRAINING, freshness=1, weights_s=0.5))
    by_name = {pool.pool: pool.idle_s for pool in trained.pools}
    assert max(by_name["sample"], key=by_name["sample"].__getitem__) is IdleCause.FRESHNESS
    assert by_name["sample"][IdleCause.WEIGHTS] > 0
    assert set(by_name["score"]) == {IdleCause.DATA}
    sampled = run(toy(APART, replica=SLOW_SAMPLING, freshness=2))
    assert next(pool for pool in sampled.pools if pool.pool == "train").idle_s[IdleCause.DATA] > 0


def test_interrupted_rows_keep_the_age_of_their_oldest_token() -> None:
    """One prompt a step, and rows that outlast many updates: they are as old as allowed, and never older."""
    long = Lengths(kind="fixed", limit=500)
    found = run(toy(STREAMED, prompts=1, response=long, freshness=3), steps=20)
    assert max(found.ages) == 3


@pytest.mark.parametrize(
    ("pools", "changes", "said"),
    [
        ({**APART, "reference": "sample"}, {}, "generation shares its devices with reference"),
        (APART, {"oversample_prompts": 1.5}, "freshness is 1: oversample_prompts is 1.5"),
        (APART, {"oversample_samples": 1.5}, "oversample_prompts is 1, samples 1.5"),
    ],
)
def test_what_is_not_simulated_is_refused(
    pools: dict[str, str], changes: dict[str, float], said: str
) -> None:
    one = toy(pools, freshness=1)
    with pytest.raises(PlanError, match=said):
        simulate(one.problem, one.costs, replace(one.plan, **changes), steps=1)


def test_a_row_too_long_for_every_cache_is_an_error_at_once() -> None:
    one = toy({**APART, SAMPLER: "sample"}, freshness=1, replica=FakeDecoder(capacity_tokens=39))
    with pytest.raises(PlanError, match="a row of 40 tokens does not fit"):
        run(one)
