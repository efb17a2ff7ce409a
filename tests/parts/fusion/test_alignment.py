"""A plan with two fused updates is written, read and run; an impossible pair is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.planned import is_placed_by, open_plan, settings_of
from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError, PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit, plan_text, read_plan
from rillflow_parts.fusion.alignment import FUSED, fused_of, require_fusable

PAIR = ("policy", "critic")
MODEL = {"hidden": 64, "heads": 8, "kv_heads": 4, "layers": 4, "context": 64}
POOLS = {"all": {"machine_type": "h100", "devices": 64}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fused": ["policy"]}, "two different roles"),
        ({"fused": ["policy", "policy"]}, "two different roles"),
        ({"fused": ["policy", "critc"]}, "did you mean 'critic'"),
        ({"critic": {"pool": "more", "dp": 64}}, "on pool all and critic on more"),
        ({"critic": {"pool": "all", "dp": 8, "pp": 4, "tp": 2}}, "both need one tp"),
        (
            {"policy": {"pool": "all", "pp": 16, "tp": 4}, "critic": {"pool": "all", "pp": 32, "tp": 2}},
            "both need one tp",
        ),
        (
            {"policy": {"pool": "all", "dp": 64}, "critic": {"pool": "all", "fsdp": 64}},
            "no idle time to fill",
        ),
        ({"critic": {"pool": "all", "fsdp": 4, "pp": 4, "tp": 4}}, "waits for other replicas"),
    ],
)
def test_a_plan_file_with_an_impossible_fused_stage_is_refused(changes: dict[str, Any], said: str) -> None:
    units = {
        "policy": {"pool": "all", "dp": 2, "pp": 8, "tp": 4},
        "critic": {"pool": "all", "dp": 2, "pp": 8, "tp": 4},
    }
    units |= {name: changes[name] for name in PAIR if name in changes}
    pools = POOLS | ({"more": POOLS["all"]} if units["critic"]["pool"] == "more" else {})
    data = {"name": "ppo", "fused": changes.get("fused", list(PAIR)), "pools": pools, "units": units}
    with pytest.raises(PlanError, match=said) as caught:
        require_fusable(read_plan(data, "plan.toml", [FUSED]), "plan.toml")
    assert "plan.toml" in caught.value.what and caught.value.why


@pytest.mark.parametrize("fused", ["policy", ["policy", 3], {"policy": "critic"}])
def test_a_plan_whose_pair_is_no_list_of_texts_is_refused(fused: Any) -> None:
    plan = read_plan({"name": "ppo", "fused": fused, "pools": {}, "units": {}}, "plan.toml", [FUSED])
    with pytest.raises(PlanError, match=r"a list of two roles|text in quotes"):
        fused_of(plan)


def test_a_plan_with_fused_updates_places_a_recipe(tmp_path: Path) -> None:
    units = {name: PlannedUnit(pool="main", grid=Grid(pp=4)) for name in PAIR}
    pool = PlannedPool(name="main", machine_type="cores", devices=4)
    plan = Plan(name="ppo", pools=(pool,), units=units, settings={FUSED: [*PAIR]})
    file = tmp_path / "plan.toml"
    file.write_text(plan_text(plan))
    assert open_plan(file) == plan and fused_of(open_plan(file)) == PAIR
    said = settings_of(plan, [])
    assert said[-1] == 'placement.fused=["policy", "critic"]'
    recipe = {
        "policy": {"model": {"new": MODEL}},
        "algorithm": {"name": "ppo", "steps": 3},
        "rollout": {"max_tokens": 8},
    }
    placement = load_recipe(recipe, said).recipe.placement
    assert is_placed_by(plan, placement) and placement.mesh_of("critic").is_descending
    assert not is_placed_by(replace(plan, settings={}), placement)
    with pytest.raises(ConfigError, match="cannot be combined with --plan"):
        settings_of(plan, ["placement.fused=[]"])
