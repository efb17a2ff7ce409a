"""A step becomes a graph: stages in order, fields on edges, and errors before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from rillflow.controller.flow import Flow
from rillflow.errors import GraphError
from rillflow.graph.drawing import as_json, as_mermaid, as_text
from rillflow.graph.graph import Graph
from rillflow.graph.loss import over
from rillflow.graph.trace import Signature, Symbol, Tracer, trace

ENDPOINTS = {
    "policy": {
        "generate": Signature(reads=("tokens",), writes=("tokens", "loss_mask"), transfer="DP_PROTO"),
        "update": Signature(reads=("tokens", "advantages"), writes=(), transfer="SPLIT_DP_REDUCE"),
        "publish": Signature(reads=(), writes=(), transfer="BROADCAST"),
    },
    "reward": {"score": Signature(reads=("tokens",), writes=("rewards",), transfer="DP_PROTO")},
}


def centred(rewards: Any, groups: Any, *, scale: float = 1.0) -> Any:
    raise AssertionError("a formula is not called while its step is traced")


def step(flow: Flow, prompts: Any, _: Any) -> Any:
    rollouts = flow.policy.generate(prompts, samples=4)
    rewards = flow.reward.score(rollouts)
    advantages = flow.compute(centred, rewards, into="advantages")
    report = flow.policy.update(rollouts, advantages)
    flow.publish(flow.policy)
    return report


def traced(program: Callable[[Flow, Symbol, Any], Any] = step) -> Graph:
    tracer = Tracer(ENDPOINTS)
    return trace("toy", lambda executor, data: program(Flow(executor), data, None), tracer, ("tokens",))


def test_stages_stand_in_the_order_of_the_program() -> None:
    graph = traced()
    assert [stage.name for stage in graph.stages] == [
        "policy.generate",
        "reward.score",
        "controller.centred",
        "policy.update",
        "policy.publish",
    ]
    assert graph.roles == ("policy", "reward")
    assert graph.stages[2].reads == ("rewards", "groups")


def test_edges_carry_the_fields_that_are_read() -> None:
    graph = traced()
    found = {
        (graph.source_name(edge), graph.stages[edge.destination].name): edge.fields for edge in graph.edges
    }
    assert found == {
        ("data", "policy.generate"): ("tokens",),
        ("policy.generate", "reward.score"): ("tokens",),
        ("reward.score", "controller.centred"): ("rewards",),
        ("policy.generate", "policy.update"): ("tokens",),
        ("controller.centred", "policy.update"): ("advantages",),
        ("policy.update", "policy.publish"): ("weights",),
    }


def test_a_missing_field_is_named_before_anything_runs() -> None:
    def without(flow: Flow, prompts: Any, _: Any) -> Any:
        return flow.policy.update(flow.policy.generate(prompts))

    with pytest.raises(GraphError, match=r"policy\.update reads the field 'advantages'"):
        traced(without)


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (bool, "the truth value"),
        (float, "the number"),
        (int, "the number"),
        (len, "the length"),
        (lambda it: it[0], "an item"),
        (lambda it: 2 * it, "the number"),
        (lambda it: it.dense("rewards"), "'dense'"),
    ],
)
def test_a_step_that_reads_a_value_is_told_so(look: Callable[[Any], Any], what: str) -> None:
    def looking(flow: Flow, prompts: Any, _: Any) -> Any:
        return look(flow.reward.score(flow.policy.generate(prompts)))

    with pytest.raises(GraphError, match=rf"reads {what} of the result of reward\.score") as caught:
        traced(looking)
    assert "flow.compute" in caught.value.fix


@pytest.mark.parametrize("returned", [None, 3.0, "both"])
def test_a_step_returns_its_report(returned: Any) -> None:
    def forgetful(flow: Flow, prompts: Any, _: Any) -> Any:
        report = flow.policy.generate(prompts)
        return (report, None) if returned == "both" else returned

    with pytest.raises(GraphError, match=r"the step returned (None|3\.0)") as caught:
        traced(forgetful)
    assert "return report" in caught.value.fix


def test_unknown_roles_and_endpoints_are_named_with_the_nearest() -> None:
    with pytest.raises(GraphError, match="no role 'polcy'") as role:
        traced(lambda flow, prompts, _: flow.polcy.generate(prompts))
    assert "policy" in role.value.fix
    with pytest.raises(GraphError, match="no endpoint 'generat'") as endpoint:
        traced(lambda flow, prompts, _: flow.policy.generat(prompts))
    assert "generate" in endpoint.value.fix


def test_numbers_and_filters_are_stages_too() -> None:
    def least(rewards: Any, *, floor: float) -> Any:
        raise AssertionError

    def with_state(flow: Flow, prompts: Any, _: Any) -> Any:
        rewards = flow.reward.score(flow.policy.generate(prompts))
        floor = flow.recall("floor", 0.5)
        flow.remember("floor", flow.number(least, rewards, floor=floor))
        kept = flow.filter(flow.compute(centred, rewards, into="kept"), "kept")
        return flow.compute(centred, kept, into="advantages", scale=flow.recall("floor", 0.5))

    graph = traced(with_state)
    assert [stage.endpoint for stage in graph.stages][2:] == ["least", "centred", "where kept", "centred"]
    last = list(graph.into(5))
    assert {graph.source_name(edge) for edge in last} == {"controller.where kept", "controller.least"}


def test_rows_filtered_by_another_batch_need_both() -> None:
    def chosen(flow: Flow, prompts: Any, _: Any) -> Any:
        rollouts = flow.policy.generate(prompts)
        kept = flow.compute(centred, flow.reward.score(rollouts), into="kept")
        return flow.filter(rollouts, "kept", by=kept)

    graph = traced(chosen)
    into = {graph.source_name(edge): edge.fields for edge in graph.into(len(graph.stages) - 1)}
    assert into == {"controller.centred": ("kept",), "policy.generate": ("tokens", "loss_mask")}


def test_drawings_name_every_stage_and_arrow() -> None:
    graph = traced()
    text, mermaid, data = as_text(graph), as_mermaid(graph), as_json(graph)
    for stage in graph.stages:
        assert stage.name in text
        assert stage.endpoint in mermaid
    assert "policy.update       tokens of 0 policy.generate; advantages of 2 controller.centred" in text
    assert "s0 -->|tokens| s1" in mermaid
    assert mermaid.count("-->") == len(graph.edges) == len(data["edges"])
    assert data["stages"][3]["transfer"] == "SPLIT_DP_REDUCE"


def test_phases_drawn_together_are_one_diagram_whose_names_differ() -> None:
    lines = as_mermaid(traced(), traced()).splitlines()
    assert [line for line in lines if line.startswith("flowchart")] == ["flowchart LR"]
    assert sum(line.strip().startswith("subgraph") for line in lines) == lines.count("    end") == 2
    boxes = [re.split(r"[\[(]", line.strip())[0] for line in lines if "-->" not in line and "s0" in line]
    assert boxes == ["p1_s0", "p2_s0"]


def first(logprobs: Any, advantages: Any, old_logprobs: Any, *, clip: float) -> Any:
    raise AssertionError("a loss is not called while its step is traced")


def second(logprobs: Any, costs: Any) -> Any:
    raise AssertionError("a loss is not called while its step is traced")


def test_an_update_reads_what_the_parameters_of_its_losses_name() -> None:
    model_outputs = ("logprobs", "old_logprobs")
    ENDPOINTS["learner"] = {
        "update": Signature(
            reads=("tokens",), writes=(), transfer="SPLIT_DP_REDUCE", model_outputs=model_outputs
        )
    }

    def both(flow: Flow, prompts: Any, _: Any) -> Any:
        rollouts = flow.policy.generate(prompts)
        scored = flow.compute(centred, flow.reward.score(rollouts), into="advantages")
        priced = flow.compute(centred, flow.reward.score(rollouts), into="costs")
        one = over(rollouts, scored, loss=first, clip=0.2)
        return flow.learner.update(one, over(priced, loss=second, weight=0.5), passes=None)

    def alone(flow: Flow, prompts: Any, _: Any) -> Any:
        rollouts = flow.policy.generate(prompts)
        scored = flow.compute(centred, flow.reward.score(rollouts), into="advantages")
        return flow.learner.update(rollouts, scored, loss=first, clip=0.2, passes=None)

    assert traced(both).stages[-1].reads == ("tokens", "advantages", "costs")
    assert traced(alone).stages[-1].reads == ("tokens", "advantages")


def test_a_loss_beside_those_that_say_their_rows_is_refused() -> None:
    def mixed(flow: Flow, prompts: Any, _: Any) -> Any:
        rollouts = flow.policy.generate(prompts)
        return flow.policy.update(over(rollouts, loss=second), rollouts)

    with pytest.raises(GraphError, match=r"policy\.update gets batches or a loss outside over"):
        traced(mixed)
