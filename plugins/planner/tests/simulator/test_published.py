"""What a plan file says of rows that flow: streamed steps, weights within a step, or replica by replica."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from plugins.planner.tests.fakes import STAGE_S, STREAMED, Toy, toy
from rillflow.errors import PlanError
from rillflow.placement.plan import plan_text, read_plan
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths

LONG = Lengths(kind="lognormal", limit=800, median=60, sigma=1.0)
TRAINING = {**STAGE_S, "policy.update": 3.0, "critic.update": 0.0, "reward.score": 0.0}


def run(one: Toy, steps: int = 12) -> Simulation:
    """Through the file that a person writes."""
    plan = read_plan(tomllib.loads(plan_text(one.plan)), "plan.toml")
    assert plan == one.plan
    return simulate(one.problem, one.costs, plan, steps=steps)


def minibatches(one: Toy, count: int) -> Toy:
    problem = replace(one.problem, workload=replace(one.problem.workload, minibatches=count))
    return replace(one, problem=problem)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_step_streamed_at_bound_0_ends_one_minibatch_after_its_longest_row(parts: int) -> None:
    """Rows end one after another, 3 s of training among them: all but the last part of it is hidden."""
    one = minibatches(toy(STREAMED, prompts=8, samples=1, response=LONG, stage_s=TRAINING, streams=1), parts)
    found = run(one, steps=1)
    rows = max(span.end_s for span in found.spans if span.stage == "policy.generate")
    trained = sum(TRAINING[name] for name in ("reference.logprobs", "critic.values", "policy.update"))
    assert max(found.ages) == 0
    assert found.step_s[0] >= rows + trained / parts
    assert found.step_s[0] <= rows + trained + 1e-9
    if parts == 1:
        assert found.step_s[0] == pytest.approx(rows + trained)


def test_streaming_a_step_is_faster_and_running_ahead_faster_still() -> None:
    steps = [
        run(minibatches(toy(STREAMED, prompts=16, response=LONG, stage_s=TRAINING, **said), 8)).settled_step_s
        for said in ({}, {"streams": 1}, {"streams": 1, "freshness": 1})
    ]
    assert steps[0] > 1.1 * steps[1] > 1.1 * steps[2]


def test_training_takes_as_many_minibatches_at_once_as_the_plan_says() -> None:
    """As verl's require_batches: 2 of 4 minibatches make 2 updates of a step, and weights arrive once."""
    one = minibatches(toy(STREAMED, prompts=16, response=LONG, freshness=1, weights_s=0.1, streams=2), 4)
    found = run(one, steps=6)
    for stage, count in (("policy.update", 2), ("policy.publish", 1)):
        assert len([span for span in found.spans if span.stage == stage]) == 6 * count


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ({"streams": 1, "prompts": 6}, "with 4 minibatches of 6 prompts"),
        ({"streams": 3}, "streams is 3, with 4 minibatches"),
    ],
)
def test_batches_that_do_not_divide_a_step_are_refused(planned: dict[str, int], said: str) -> None:
    one = minibatches(toy(STREAMED, **{"prompts": 16, **planned}), 4)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=said):
        run(one)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("streams = true", "streams is True"),
        ("freshness = -0.5", "freshness is -0.5"),
    ],
)
def test_a_plan_file_names_a_value_that_cannot_be(line: str, said: str) -> None:
    text = plan_text(toy(STREAMED, freshness=1).plan)
    told = f"freshness = 1\n{line}\n" if "freshness" not in line else f"{line}\n"
    with pytest.raises(PlanError, match=said):
        read_plan(tomllib.loads(text.replace("freshness = 1\n", told)), "plan.toml")
