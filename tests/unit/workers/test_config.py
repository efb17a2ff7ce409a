"""The place of a run: settings that a recipe does not state."""

from __future__ import annotations

import inspect

import pytest

from rillflow.workers.config import MeshSizes, PlacementConfig
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend


@pytest.mark.parametrize(
    ("backend", "pools", "inline"),
    [
        ("auto", {"main": 1}, True),
        ("auto", {"main": 2}, False),
        ("auto", {"main": 1, "judge": 1}, False),
        ("inline", {"main": 2}, True),
        ("ray", {"main": 1}, False),
    ],
)
def test_one_rank_runs_in_this_process_unless_it_is_said(backend: str, pools: dict, inline: bool) -> None:
    assert PlacementConfig(backend=backend, pools=pools).is_inline == inline


def test_one_rank_joins_a_cluster_that_is_named() -> None:
    assert not PlacementConfig(address="10.0.0.9:6379").is_inline
    assert PlacementConfig(address="10.0.0.9:6379", backend="inline").is_inline


def test_dp_is_what_pp_and_tp_leave_of_a_pool() -> None:
    placement = PlacementConfig(pools={"main": 12}, train_parallel={"main": {"pp": 2, "tp": 3}})
    assert placement.mesh_of("policy") == MeshSizes(dp=2, pp=2, tp=3)
    assert PlacementConfig(pools={"main": 12}).mesh_of("policy") == MeshSizes(dp=12)


def test_a_mesh_without_sizes_is_one_rank_with_the_whole_model() -> None:
    assert MeshSizes().ranks == 1 and MeshSizes().is_plain


@pytest.mark.parametrize(("sizes", "is_sharded"), [({}, False), ({"fsdp": 2}, True), ({"ep": 2}, True)])
def test_ranks_hold_different_shards_with_fsdp_or_experts_apart(
    sizes: dict[str, int], is_sharded: bool
) -> None:
    assert MeshSizes(dp=2, **sizes).is_sharded == is_sharded


def test_a_backend_has_the_defaults_of_the_settings() -> None:
    defaults = PlacementConfig()
    for backend in (ProcessBackend, ray_backend):
        parameters = inspect.signature(backend).parameters
        told = {name: parameters[name].default for name in ("start_s", "heartbeat_s") if name in parameters}
        assert told and told == {name: getattr(defaults, name) for name in told}


def test_every_setting_of_placement_is_described() -> None:
    silent = [name for name, each in PlacementConfig.model_fields.items() if not each.description]
    assert silent == []


def test_the_stages_of_a_descending_model_begin_on_the_last_rank() -> None:
    sizes = MeshSizes(dp=2, pp=2, tp=2)
    assert MeshSizes(dp=2, pp=2, tp=2, is_descending=True).mesh == sizes.mesh.turned("pp") != sizes.mesh
    assert MeshSizes(dp=4, is_descending=True).mesh == MeshSizes(dp=4).mesh


def test_every_rank_generates_with_a_whole_policy_unless_tp_is_said() -> None:
    assert PlacementConfig().generate_tp == 1
    assert PlacementConfig(rollout_parallel={"tp": 4}).generate_tp == 4
