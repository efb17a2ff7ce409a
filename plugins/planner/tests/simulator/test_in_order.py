"""In order: k + 1 steps open, a step's rows handed on part by part; by hand, as a run does it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plugins.planner.tests.fakes import FakeDecoder, fixed, toy
from rillflow.placement.plan import SAMPLER
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import simulate

SECOND = FakeDecoder(replicas=1, most_rows=64, token_s=1.0, row_s=0.0, prompt_s=0.0)
"""A token of all rows takes a second."""
APART = {
    "policy": "main",
    "critic": "others",
    "reference": "others",
    SAMPLER: "answers",
}
STAGES = {"reward.score": 2.0, "policy.update": 4.0}


def run(freshness: int, parts: int, *, steps: int = 8, length: int = 6, **how: object) -> Simulation:
    """Generation of 6 s, a reward's function of 2 s, an update of 4 s; what else there is takes no time."""
    stage_s = {**dict.fromkeys(("reference.logprobs", "critic.values", "critic.update"), 0.0), **STAGES}
    one = toy(APART, response=fixed(length), replica=SECOND, stage_s=stage_s, freshness=freshness)
    plan = replace(one.plan, streams=int(parts > 1), **how)
    return simulate(one.problem, one.costs, plan, steps=steps, parts=parts)


def test_in_step_and_whole_is_one_stage_after_another() -> None:
    assert run(0, 1).step_s == pytest.approx([12.0] * 8)


def test_one_version_ahead_the_sampler_answers_while_the_last_step_trains() -> None:
    """Step 1 ends at 12, step 2, sampled from 6 to 12, at 18; step 3 begins at 12, step 4 at 18: 6 s each."""
    found = run(1, 1)
    assert found.step_s == pytest.approx([12.0, *[6.0] * 7])
    sampled = [span.start_s for span in found.spans if span.stage == "policy.generate"]
    assert sampled == pytest.approx([0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 42.0])


def test_a_longer_way_than_two_generations_holds_up_what_is_sampled_with_its_weights() -> None:
    """Generation of 1 s: a step takes 7 s on its way, and two are open, so two end every 7 or 4 s apart."""
    found = run(1, 1, length=1)
    assert found.step_s == pytest.approx([7.0, *[4.0] * 7])
    waits = [span.start_s for span in found.spans if span.stage == "policy.generate"]
    assert waits == pytest.approx([0.0, 1.0, 7.0, 11.0, 15.0, 19.0, 23.0, 27.0]), "step 3 waits for step 1"


def test_parts_are_trained_while_later_ones_are_sampled() -> None:
    """Rows of one length end together, so parts overlap in scoring and training alone: 6 + 0.5 + 4."""
    assert run(0, 4).step_s == pytest.approx([6.0 + 2.0 / 4 + 4.0] * 8)


def test_a_part_goes_on_when_its_longest_row_and_those_before_it_have_ended() -> None:
    """Two prompts of 4 and 8 tokens: the second part is there at 8, and trained for 2 s from 9 on."""
    rows = replace(fixed(8), kind="measured", values=(4, 8), in_order=(4, 4, 4, 4, 8, 8, 8, 8))
    one = toy(
        APART, prompts=2, response=rows, replica=SECOND, stage_s={**dict.fromkeys(STAGES, 0.0), **STAGES}
    )
    plan = replace(one.plan, streams=1)
    found = simulate(one.problem, one.costs, plan, steps=2, parts=2)
    updates = [(span.start_s, span.end_s) for span in found.spans if span.stage == "policy.update"]
    assert updates[:2] == [pytest.approx((5.0, 7.0)), pytest.approx((9.0, 11.0))]
    assert found.step_s == pytest.approx([11.0, 11.0])
    whole = simulate(one.problem, one.costs, one.plan, steps=1, parts=2)
    assert whole.step_s == pytest.approx([8.0 + 1.0 + 4.0]), "an update of all rows waits for all"


def test_every_second_of_a_pool_is_accounted_for() -> None:
    for found in (run(2, 2), run(0, 3), run(1, 1, length=1)):
        for pool in found.pools:
            assert pool.busy_s + sum(pool.idle_s.values()) == pytest.approx(sum(found.step_s))
