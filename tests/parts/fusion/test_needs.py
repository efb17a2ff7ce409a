"""What two fused updates need is checked before a run, and every refusal names the cause."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow_parts.fusion.config import fused_roles
from rillflow_parts.fusion.needs import require_independent

NEW = {"hidden": 64, "heads": 8, "kv_heads": 4, "layers": 4, "context": 64}
PIPES: dict[str, Any] = {"pools": {"main": 4}, "train_parallel": {"main": {"pp": 4}}}


def recipe(
    fused: tuple[str, ...] = ("policy", "critic"),
    placement: Any = PIPES,
    algorithm: Any = (),
    schedule: Any = (),
) -> Resolved:
    data = {
        "policy": {"model": {"new": NEW}},
        "rollout": {"max_tokens": 8},
        "algorithm": {"name": "ppo", "steps": 3, "prompts_per_step": 4, **dict(algorithm)},
        "placement": {**placement, "fused": fused},
        "schedule": dict(schedule) or {"mode": "in_order"},
    }
    return load_recipe(data)


def with_grids(policy: Any, critic: Any) -> dict[str, Any]:
    return {"pools": {"main": 4}, "train_parallel": {"policy": policy, "critic": critic}}


@pytest.mark.parametrize("grids", [({"pp": 4}, {"pp": 4}), ({"pp": 4}, {"pp": 2}), ({"pp": 2}, {"pp": 2})])
def test_pipelines_on_the_same_ranks_can_be_fused(grids: tuple[Any, Any]) -> None:
    found = recipe(placement=with_grids(*grids))
    assert not found.recipe.placement.mesh_of("policy").is_descending
    assert found.recipe.placement.mesh_of("critic").is_descending
    assert found.recipe.placement.mesh_of("critic").mesh.coordinates(0)["pp"] == grids[1]["pp"] - 1
    require_independent(fused_roles(found.recipe), found.graphs)


@pytest.mark.parametrize(
    ("fused", "placement", "said"),
    [
        (("policy",), PIPES, "one update fills the pipeline bubbles of one other update"),
        (("policy", "policy"), PIPES, "name two trained models"),
        (("critic", "policy"), PIPES, "name the policy first"),
        (("policy", "reward"), PIPES, "reward is not trained"),
        (("policy", "crytic"), PIPES, "crytic is not a role of ppo"),
        (("policy", "cost_critic"), PIPES, "the run trains policy, critic"),
        (
            ("policy", "critic"),
            {"pools": {"main": 2, "other": 2}, "roles": {"critic": "other"}, "backend": "ray"},
            "policy is on pool main, critic on pool other",
        ),
        (("policy", "critic"), {"pools": {"main": 4}}, "without pipeline stages there is no idle time"),
        (("policy", "critic"), with_grids({"pp": 4}, {"pp": 1}), "critic with dp 4 x pp 1"),
        (("policy", "critic"), with_grids({"pp": 2, "tp": 2}, {"pp": 4}), "set the same tp for both"),
        (("policy", "critic"), with_grids({"pp": 2, "fsdp": 2}, {"pp": 4}), "policy is trained with fsdp 2"),
        (
            ("policy", "critic"),
            {**with_grids({"pp": 2}, {"pp": 3}), "pools": {"main": 6}},
            "set both pp to 3",
        ),
        (("policy", "critic"), with_grids({"pp": 3}, {"pp": 4}), "4 / (3 x 1)"),
        (("policy", "critic"), {**PIPES, "backend": "inline"}, "the run has only one process"),
    ],
)
def test_what_cannot_be_fused_is_refused(fused: tuple[str, ...], placement: Any, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        recipe(fused, placement)
    assert said in str(found.value)


def test_rows_in_parts_are_refused() -> None:
    apart = {"pools": {"main": 4, "answers": 1}, "roles": {"sampler": "answers"}}
    placement = {**apart, "train_parallel": {"main": {"pp": 4}}}
    parts = {"minibatches": 2, "prompts_per_step": 4, "shuffle": False}
    with pytest.raises(ConfigError, match=r"schedule\.stream_chunks is 2"):
        recipe(placement=placement, algorithm=parts, schedule={"mode": "streamed", "stream_chunks": 2})


def test_an_update_that_needs_the_other_one_is_refused() -> None:
    names = ("critic.update", "critic.values", "controller.gae", "policy.update")
    stages = tuple(
        Stage(index=index, role=name.split(".")[0], endpoint=name.split(".")[1], reads=(), writes=())
        for index, name in enumerate(names)
    )
    edges = tuple(Edge(source=one, destination=one + 1, fields=("values",)) for one in (1, 2))
    with pytest.raises(ConfigError) as found:
        require_independent(("policy", "critic"), [Graph(name="mine", stages=stages, edges=edges)])
    assert "critic.update -> critic.values -> controller.gae -> policy.update" in str(found.value)
    require_independent(("policy", "critic"), [Graph(name="mine", stages=stages, edges=edges[:1])])


def test_a_step_without_both_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no step calls policy.update and judge.update"):
        require_independent(("policy", "judge"), recipe().graphs)
