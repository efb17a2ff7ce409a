"""A plan applied to a recipe places every role as stated; unsupported plans are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.algorithms.config import OnlineConfig
from rillflow.app import planned
from rillflow.app.planned import is_placed_by, keep_plan, open_plan, require_for, settings_of
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.config.load import parse_override
from rillflow.errors import ConfigError, PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit, plan_text
from rillflow.runs import layout
from rillflow.workers.config import MeshSizes, PlacementConfig

RECIPE = """
[policy]
model.new = { hidden = 64, layers = 4, heads = 8, kv_heads = 8, context = 64 }
[rollout]
max_tokens = 8
[algorithm]
name = "ppo"
steps = 3
loss.kl = 0.1
"""
ROLES = ("policy", "critic", "reference")
GRIDS = [
    Grid(dp=4),
    Grid(dp=4, is_sharded=True),
    Grid(dp=2, tp=2),
    Grid(tp=4),
    Grid(pp=2, tp=2),
    Grid(dp=1, pp=4),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "run.toml"
    file.write_text(RECIPE)
    return file


def plan_of(pools: tuple[str, ...], grids: tuple[Grid, ...], **changes: object) -> Plan:
    units = {
        role: PlannedUnit(pool=pool, grid=grid, generate_tp=grid.tp if role == "policy" else 0)
        for role, pool, grid in zip(ROLES, pools, grids, strict=True)
    }
    placed = tuple(PlannedPool(name=name, machine_type="cores", devices=4) for name in dict.fromkeys(pools))
    return replace(Plan(name="ppo", pools=placed, units=units), **changes)


def loaded(recipe: Path, plan: Plan, *more: str) -> Resolved:
    return load_recipe(recipe, [*settings_of(plan, more), *more])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pools=st.tuples(*[st.sampled_from(["main", "critic", "b c"])] * 3),
    grids=st.tuples(*[st.sampled_from(GRIDS)] * 3),
)
def test_every_role_lies_as_the_plan_says(
    recipe: Path, pools: tuple[str, ...], grids: tuple[Grid, ...]
) -> None:
    plan = plan_of(pools, grids)
    placement = loaded(recipe, plan).recipe.placement
    for role, unit in plan.units.items():
        mesh, grid = placement.mesh_of(role), unit.grid
        assert (mesh.dp, mesh.pp, mesh.tp, mesh.fsdp > 1) == (grid.dp, grid.pp, grid.tp, grid.is_sharded)
        for other, its in plan.units.items():
            together = placement.pool_of(role) == placement.pool_of(other)
            assert together == (its.pool == unit.pool)
    assert len(placement.pools) == len(plan.pools)
    assert sum(placement.pools.values()) == 4 * len(plan.pools)
    assert placement.generate_tp == plan.units["policy"].grid.tp


POOLS = st.tuples(*[st.sampled_from(["main", "critic", "b c"])] * 3)
MESHES = st.tuples(*[st.sampled_from(GRIDS)] * 3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pools=POOLS, grids=MESHES, other_pools=POOLS, other_grids=MESHES)
def test_a_placement_is_that_of_a_plan_where_both_put_every_role_alike(
    recipe: Path,
    pools: tuple[str, ...],
    grids: tuple[Grid, ...],
    other_pools: tuple[str, ...],
    other_grids: tuple[Grid, ...],
) -> None:
    plan, other = plan_of(pools, grids), plan_of(other_pools, other_grids)
    placement = loaded(recipe, other).recipe.placement
    alike = shared(pools) == shared(other_pools) and grids == other_grids
    assert is_placed_by(other, placement)
    assert is_placed_by(plan, placement) == alike


def shared(pools: tuple[str, ...]) -> list[int]:
    """Return the grouping of roles into pools, whatever the pools' names."""
    return [pools.index(pool) for pool in pools]


def test_pools_of_other_sizes_and_another_copy_for_generation_are_another_placement() -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3)
    assert is_placed_by(plan, PlacementConfig(pools={"a": 4, "functions": 2}))
    assert not is_placed_by(plan, PlacementConfig(pools={"a": 2}))
    assert not is_placed_by(plan, PlacementConfig(pools={"a": 4}, rollout_parallel={"tp": 2}))
    assert not is_placed_by(with_experts(plan), PlacementConfig(pools={"a": 4}))


def test_a_plan_is_kept_and_left_as_the_placement_says(tmp_path: Path) -> None:
    plan, file = plan_of(("main",) * 3, (Grid(dp=4),) * 3), tmp_path / layout.PLAN
    same, another = PlacementConfig(pools={"a": 4}), PlacementConfig(pools={"a": 1})
    assert not keep_plan(tmp_path, None, same), "there is none"
    assert keep_plan(tmp_path, plan, same) and open_plan(file) == plan
    assert keep_plan(tmp_path, None, same)
    assert not keep_plan(tmp_path, None, another)
    assert open_plan(file) == plan, "nothing is deleted"
    file.write_text("name = 3")
    with pytest.raises(PlanError, match=r"plan\.toml"):
        keep_plan(tmp_path, None, same)


def test_other_settings_stay(recipe: Path) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3)
    found = loaded(recipe, plan, "policy.lr=1e-4", "placement.deadline_s=60").recipe
    assert (found.policy.lr, found.placement.deadline_s) == (1e-4, 60)
    assert found.placement.train_parallel == {"main": {"dp": 4, "pp": 1, "tp": 1}}


@pytest.mark.parametrize(
    "text", ["placement.pools.main=2", "placement.roles={}", "placement.train_parallel.main.tp=2"]
)
def test_a_setting_that_places_is_refused_beside_a_plan(recipe: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with --plan"):
        loaded(recipe, plan_of(("main",) * 3, (Grid(dp=4),) * 3), text)


def test_a_sampler_of_its_own_is_launched_as_it_was_planned(recipe: Path) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3)
    apart = replace(
        plan,
        pools=(*plan.pools, replace(plan.pools[0], name="answers", devices=2)),
        units={
            **{name: replace(unit, generate_tp=0) for name, unit in plan.units.items()},
            "sampler": PlannedUnit(pool="answers", grid=Grid(dp=2), generate_tp=2),
        },
    )
    found = loaded(recipe, apart)
    require_for(apart, found)
    placement = found.recipe.placement
    assert placement.samples_apart and placement.pool_of("sampler") == "answers"
    assert (placement.pools, placement.generate_tp) == ({"main": 4, "answers": 2}, 2)
    assert placement.train_parallel == {"main": {"dp": 4, "pp": 1, "tp": 1}}
    assert is_placed_by(apart, placement) and not is_placed_by(plan, placement)
    assert not is_placed_by(apart, loaded(recipe, plan).recipe.placement)
    ahead = loaded(recipe, replace(apart, freshness=2))
    require_for(replace(apart, freshness=2), ahead)
    assert ahead.recipe.schedule.lag == 2


def with_experts(plan: Plan) -> Plan:
    return replace(
        plan, units={**plan.units, "policy": PlannedUnit(pool="main", grid=Grid(dp=2, tp=2, ep=2))}
    )


def test_experts_are_shared_out_over_ranks_of_dp(recipe: Path) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4, ep=2),) * 3)
    placement = loaded(recipe, plan).recipe.placement
    require_for(plan, loaded(recipe, plan))
    assert placement.train_parallel == {"main": {"dp": 2, "ep": 2, "pp": 1, "tp": 1}}
    assert placement.mesh_of("policy") == MeshSizes(dp=4, ep=2) and is_placed_by(plan, placement)


def test_gathered_rows_and_settings_of_plugins_become_settings() -> None:
    plan = plan_of(("main",) * 3, (Grid(pp=4),) * 3, settings={"spare": ["policy", "critic"]})
    plan = replace(plan, gather_rows=40, gather_replicas=2, gather_by="tokens")
    said = settings_of(plan, [])
    assert said[:2] == ['schedule.mode="gathering"', "schedule.gather_rows=40"]
    assert said[2:4] == ["schedule.gather_replicas=2", 'schedule.gather_by="tokens"']
    assert said[-1] == 'placement.spare=["policy", "critic"]'
    assert parse_override(said[-1]).value == ["policy", "critic"]
    for text in ("placement.fused=[]", "schedule.gather_rows=0"):
        with pytest.raises(ConfigError, match="cannot be combined with --plan"):
            settings_of(plan, [text])
    plain = plan_of(("main",) * 3, (Grid(pp=4),) * 3)
    assert not any("spare" in text or "gather" in text for text in settings_of(plain, []))


def test_a_plan_begins_more_than_it_trains(recipe: Path) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3, oversample_prompts=1.25, oversample_samples=1.5)
    made = loaded(recipe, plan).recipe
    assert isinstance(made.algorithm, OnlineConfig) and made.schedule.begun(made.algorithm) == (80, 12)
    require_for(plan, loaded(recipe, plan))
    with pytest.raises(ConfigError, match=r"oversample_prompts=2 cannot be combined with --plan"):
        settings_of(plan, ["schedule.oversample_prompts=2"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: replace(plan, streams=1), "a step's minibatches as they arrive"),
        (lambda plan: replace(plan, freshness=0.5), "has the freshness 0.5"),
        (with_experts, "policy.ep to 2"),
        (lambda plan: replace(plan, name="grpo"), "is for grpo"),
        (lambda plan: replace(plan, units={**plan.units, "judge": plan.units["critic"]}), "places 'judge'"),
    ],
)
def test_what_no_run_can_do_is_refused(recipe: Path, change: object, said: str) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3)
    require_for(plan, loaded(recipe, plan))
    with pytest.raises(PlanError, match=said) as caught:
        require_for(change(plan), loaded(recipe, plan))  # type: ignore[operator]
    assert caught.value.why


def test_devices_that_are_not_here_are_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3)
    far = replace(plan, pools=(replace(plan.pools[0], device="H100"),))
    near = replace(plan, pools=(replace(plan.pools[0], device="cpu"),))
    monkeypatch.setattr(planned, "_has_accelerator", lambda: False)
    require_for(near, loaded(recipe, near))
    with pytest.raises(PlanError, match="4 x H100"):
        require_for(far, loaded(recipe, plan))
    monkeypatch.setattr(planned, "_has_accelerator", lambda: True)
    require_for(far, loaded(recipe, plan))


def test_two_machine_types_are_refused(recipe: Path) -> None:
    plan = plan_of(("main", "side", "side"), (Grid(dp=4),) * 3)
    apart = replace(plan, pools=(plan.pools[0], replace(plan.pools[1], machine_type="others")))
    with pytest.raises(PlanError, match="cores and others"):
        require_for(apart, loaded(recipe, plan))


def test_a_plan_is_opened_from_its_file(tmp_path: Path) -> None:
    plan = plan_of(("main",) * 3, (Grid(dp=4),) * 3)
    file = tmp_path / "plan.toml"
    with pytest.raises(ConfigError, match="does not exist"):
        open_plan(file)
    file.write_text(plan_text(plan))
    assert open_plan(file) == plan
    for wrong, told in ((b"\xff", "is not UTF-8"), (b"name = ppo", "line 1, column 8")):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError, match=told):
            open_plan(file)
