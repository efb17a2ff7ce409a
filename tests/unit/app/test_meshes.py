"""Meshes of a recipe: invalid ones are refused with their sizes; the bytes of each rank are reported."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.app.memory import estimate, memory_lines
from rillflow.app.meshes import require_near
from rillflow.app.model_files import sizes_of_new
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.roles import pools_of
from rillflow.errors import ClusterError, ConfigError
from rillflow.placement.mesh import Mesh
from rillflow.workers.config import MeshSizes, PlacementConfig

NEW = {"hidden": 64, "heads": 8, "kv_heads": 4, "layers": 4, "context": 64}


def recipe(**placement: Any) -> Resolved:
    return recipe_on("auto", **placement)


def placed(**placement: Any) -> PlacementConfig:
    return recipe(**placement).recipe.placement


def recipe_on(device: str, **placement: Any) -> Resolved:
    data = {
        "run": {"device": device},
        "policy": {"model": {"new": NEW}},
        "rollout": {"max_tokens": 8},
        "algorithm": {"name": "ppo", "steps": 3, "prompts_per_step": 4, "loss": {"kl": 0.01}},
        "placement": placement,
    }
    return load_recipe(data)


def test_dp_is_what_is_left() -> None:
    placement = placed(pools={"main": 8}, train_parallel={"main": {"pp": 2, "tp": 2}})
    assert placement.mesh_of("policy") == MeshSizes(dp=2, pp=2, tp=2)
    assert placed(pools={"main": 8}).mesh_of("critic") == MeshSizes(dp=8)


def test_fsdp_cuts_parameters_too() -> None:
    mesh = placed(pools={"main": 4}, train_parallel={"main": {"fsdp": 2, "tp": 2}}).mesh_of("policy")
    assert mesh == MeshSizes(dp=2, tp=2, fsdp=2) and not mesh.is_plain
    assert str(mesh) == "fsdp 2 x pp 1 x tp 2"


def test_fsdp_inside_dp_cuts_one_copy_over_some_ranks() -> None:
    placement = placed(pools={"main": 8}, train_parallel={"main": {"dp": 2, "fsdp": 2, "tp": 2}})
    mesh = placement.mesh_of("policy")
    assert mesh == MeshSizes(dp=4, fsdp=2, tp=2) and mesh.ranks == 8
    assert str(mesh) == "dp 2 x fsdp 2 x pp 1 x tp 2"
    left_out = placed(pools={"main": 8}, train_parallel={"main": {"fsdp": 2, "tp": 2}})
    assert left_out.mesh_of("policy") == mesh


def test_ep_shares_out_experts_over_ranks_of_dp() -> None:
    placement = placed(pools={"main": 8}, train_parallel={"main": {"dp": 2, "ep": 4}})
    mesh = placement.mesh_of("policy")
    assert mesh == MeshSizes(dp=8, ep=4) and mesh.is_sharded and not mesh.is_plain
    assert str(mesh) == "dp 2 x ep 4 x pp 1 x tp 1"


def test_every_pool_has_a_mesh_of_its_own() -> None:
    placement = placed(
        pools={"main": 4, "side": 2},
        roles={"critic": "side"},
        train_parallel={"main": {"tp": 2}, "side": {"pp": 2}},
    )
    assert placement.mesh_of("policy") == MeshSizes(dp=2, tp=2)
    assert placement.mesh_of("critic") == MeshSizes(pp=2)


def test_a_role_may_have_a_mesh_of_its_own_in_its_pool() -> None:
    placement = placed(pools={"main": 4}, train_parallel={"main": {"tp": 2}, "critic": {"fsdp": 4}})
    assert placement.mesh_of("policy") == placement.mesh_of("reference") == MeshSizes(dp=2, tp=2)
    assert placement.mesh_of("critic") == MeshSizes(dp=4, fsdp=4)


def test_a_pool_called_as_a_role_is_the_pool() -> None:
    placement = placed(
        pools={"critic": 4, "main": 2}, roles={"critic": "main"}, train_parallel={"critic": {"tp": 2}}
    )
    assert placement.mesh_of("policy") == MeshSizes(dp=2, tp=2)
    assert placement.mesh_of("critic") == MeshSizes(dp=2)


@pytest.mark.parametrize(
    ("placement", "what", "why"),
    [
        (
            {"pools": {"main": 8}, "train_parallel": {"main": {"tp": 3}}},
            "dp 2 x pp 1 x tp 3 = 6 ranks",
            "8 / (1 x 3)",
        ),
        (
            {"pools": {"main": 4}, "train_parallel": {"main": {"dp": 3}}},
            "dp 3 x pp 1 x tp 1 = 3 ranks",
            "4 / (1 x 1)",
        ),
        (
            {"pools": {"main": 4}, "train_parallel": {"critic": {"dp": 3}}},
            "placement.train_parallel.critic is dp 3",
            "4 / (1 x 1)",
        ),
        ({"train_parallel": {"reward": {"dp": 1}}}, "names 'reward'", "the models policy, reference, critic"),
        ({"train_parallel": {"mian": {"tp": 1}}}, "names 'mian'", "the pools are main"),
        ({"train_parallel": {"main": {"cp": 2}}}, "has an unknown axis 'cp'", "dp, fsdp, ep, pp, tp"),
        (
            {"pools": {"main": 4}, "train_parallel": {"main": {"ep": 2, "tp": 2}}},
            "is ep 2 x pp 1 x tp 2, with both ep and tp above 1",
            "ranks that hold every other weight whole",
        ),
        ({"sequence_parallel": True}, "no model is trained with tp above 1", "over the ranks of tp"),
        (
            {"rollout_parallel": {"pp": 2}},
            "placement.rollout_parallel has an unknown axis 'pp'",
            "the axes are tp",
        ),
        (
            {"train_parallel": {"main": {"tp": 0}}},
            "placement.train_parallel.main.tp is 0",
            "an axis is at least 1",
        ),
        (
            {"pools": {"main": 2}, "train_parallel": {"main": {"dp": 2, "fsdp": 2}}},
            "dp 2 x fsdp 2 x pp 1 x tp 1 = 4 ranks",
            "2 / (1 x 1) is 2",
        ),
        (
            {"pools": {"main": 4}, "train_parallel": {"main": {"tp": 4}}, "rollout_parallel": {"tp": 3}},
            "rollout_parallel.tp is 3",
            "4 / 3 leaves 1",
        ),
        (
            {"pools": {"main": 8}, "train_parallel": {"main": {"tp": 8}}},
            "has 4 key/value heads",
            "4 / 8 leaves 4",
        ),
        (
            {"pools": {"main": 8}, "train_parallel": {"main": {"pp": 8}}},
            "has 4 layers",
            "at least one layer",
        ),
        (
            {"pools": {"main": 2}, "train_parallel": {"main": {"tp": 2}}, "backend": "inline"},
            "the run has only one process",
            "every rank is a separate process",
        ),
    ],
)
def test_what_cannot_be_is_refused(placement: dict[str, Any], what: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(**placement)
    assert what in caught.value.what and why in caught.value.why


def test_bytes_of_a_rank_by_phase() -> None:
    asked = recipe(pools={"main": 8}, train_parallel={"main": {"pp": 2, "tp": 2}}, rollout_parallel={"tp": 2})
    sizes = sizes_of_new(asked.recipe.policy.model.new)  # type: ignore[arg-type]
    whole, rank = estimate(recipe(pools={"main": 8}), sizes, longest=64), estimate(asked, sizes, longest=64)
    weights = whole.kept["weights"]
    assert rank.kept["weights"] == rank.phases["trains"]["gradients"] == weights // 4
    assert rank.phases["answers"]["weights that cross"] == weights // 2 - weights // 4
    assert whole.phases["answers"]["weights that cross"] == 0
    training, generation = memory_lines(asked, sizes, longest=64)
    assert "policy on dp 2 x pp 2 x tp 2: weights" in training
    assert generation == "generation, tp 2: 4 replicas of 64 rows"
    (line,) = memory_lines(recipe(pools={"main": 8}), sizes, longest=64)
    assert line.startswith("memory: weights")


def test_a_tensor_parallel_group_across_nodes_is_named_with_what_each_node_has() -> None:
    on_two = dict(enumerate(["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2"]))
    require_near("policy", "main", Mesh.of(dp=2, tp=2), {})
    require_near("policy", "main", Mesh.of(dp=4), on_two)
    even = dict(enumerate(["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]))
    require_near("policy", "main", Mesh.of(dp=2, tp=2), even)
    with pytest.raises(ClusterError) as caught:
        require_near("policy", "main", Mesh.of(dp=2, tp=2), on_two)
    said = "the tp of policy crosses nodes: ranks 2, 3 of pool 'main' are on 10.0.0.1, 10.0.0.2"
    assert caught.value.what == said
    assert "the pool has 3 on 10.0.0.1, 1 on 10.0.0.2" in caught.value.why
    assert "placement.tp_across_nodes" in caught.value.fix


def test_a_pool_takes_devices_where_a_model_is_and_not_for_python_that_scores() -> None:
    apart = recipe(
        pools={"main": 2, "answers": 1, "critics": 1, "scorers": 4},
        roles={"sampler": "answers", "critic": "critics", "reward": "scorers"},
    )
    taken = {pool.name: pool.takes_device for pool in pools_of(apart)}
    assert taken == {"main": True, "answers": True, "critics": True, "scorers": False}
    assert [pool.takes_device for pool in pools_of(recipe(pools={"main": 2}))] == [True]


def test_a_device_by_its_number_is_for_one_process() -> None:
    with pytest.raises(ConfigError, match=r"run\.device is cuda:1, and the pools have 2 ranks on Ray"):
        recipe_on("cuda:1", pools={"main": 2})
    assert recipe_on("cuda", pools={"main": 2}).recipe.run.device == "cuda"
    assert recipe_on("cuda:1", pools={"main": 1}).recipe.run.device == "cuda:1"


@pytest.mark.parametrize(
    ("change", "worlds"),
    [
        ({}, {"main": 0, "answers": 1, "critics": 0, "scorers": 1}),
        ({"rollout_parallel": {"tp": 2}}, {"main": 0, "answers": 2, "critics": 0, "scorers": 1}),
        ({"roles": {"sampler": "answers", "critic": "critics", "reward": "answers", "reference": "scorers"}},
         {"main": 0, "answers": 1, "critics": 0, "scorers": 0}),
        ({"roles": {"sampler": "main", "critic": "answers", "reward": "scorers", "reference": "critics"}},
         {"main": 0, "answers": 0, "critics": 0, "scorers": 1}),
    ],
)  # fmt: skip
def test_replicas_that_need_no_collectives_are_worlds_of_their_own(
    change: dict[str, Any], worlds: dict[str, int]
) -> None:
    """Each tp group of a sampler and each scoring rank is a world; other roles make their pool one world."""
    roles = {"sampler": "answers", "critic": "critics", "reward": "scorers"}
    pools = {"main": 2, "answers": 4, "critics": 1, "scorers": 4}
    made = pools_of(recipe(**{"backend": "ray", "pools": pools, "roles": roles, **change}))
    assert {pool.name: pool.world for pool in made} == worlds


@pytest.mark.parametrize("mode", ["ahead", "ready_first"])
@pytest.mark.parametrize(
    ("scorer", "parallel", "worlds"),
    [
        ({"model": "some/model"}, {}, {"ahead": 1, "ready_first": 1}),
        ({"model": "some/model"}, {"tp": 2}, {"ahead": 2, "ready_first": 2}),
        ({"judge": {"model": "some/model"}}, {}, {"ahead": 0, "ready_first": 1}),
        ({"judge": {"model": "some/model"}}, {"tp": 2}, {"ahead": 0, "ready_first": 2}),
        ({"judge": {"model": "some/model"}}, {"fsdp": 2}, {"ahead": 0, "ready_first": 2}),
    ],
)
def test_a_replica_of_a_model_that_scores_is_a_world(
    mode: str, scorer: dict[str, Any], parallel: dict[str, int], worlds: dict[str, int]
) -> None:
    """In order, the ranks of a judge share its work, so they are one world."""
    pools = {"main": 1, "answers": 1, "scorers": 4}
    data = recipe(
        backend="ray", pools=pools, roles={"sampler": "answers", "reward": "scorers"}
    ).recipe.model_dump()
    data["reward"] |= scorer
    data["schedule"] = {"mode": mode, "freshness": 1}
    data["placement"]["train_parallel"] = {"scorers": parallel} if parallel else {}
    assert pools_of(load_recipe(data))[2].world == worlds[mode]
