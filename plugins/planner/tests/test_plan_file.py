"""Plan files: what is written is read back as it was, and what contradicts is refused by name."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.config.toml_text import inline_text, toml_text
from rillflow.errors import ConfigError, PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit, plan_text, read_plan
from rillflow_parts.fusion.alignment import require_fusable

NAMES = st.text(min_size=1, max_size=8)
SECONDS = st.floats(0, 1e9, allow_nan=False)
TEXT = """
name = "ppo"
[pools.main]
machine_type = "h100"
devices = 8
[units.policy]
pool = "main"
dp = 2
tp = 4
"""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans without a contradiction: every unit fills its pool, every pool has a unit."""
    pools, units = [], {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        grid = Grid(
            dp=draw(st.integers(1, 9)),
            pp=draw(st.integers(1, 4)),
            tp=draw(st.sampled_from([1, 2, 8])),
            is_sharded=draw(st.booleans()),
        )
        pools.append(
            PlannedPool(
                name=name, machine_type=draw(NAMES), devices=grid.devices, device=draw(st.text(max_size=4))
            )
        )
        units[f"{draw(NAMES)} of {name}"] = PlannedUnit(
            pool=name, grid=grid, generate_tp=draw(st.sampled_from([0, 1, grid.tp]))
        )
    freshness = draw(st.sampled_from([0, 1, 4, 0.1, 2.5]))
    if freshness:
        units["sampler"] = PlannedUnit(pool=pools[0].name, grid=Grid(dp=pools[0].devices), generate_tp=1)
    return Plan(
        name=draw(st.text(max_size=8)),
        pools=tuple(pools),
        units=units,
        freshness=freshness,
        streams=draw(st.integers(0, 4)) if freshness else 0,
        oversample_prompts=draw(st.floats(1, 4)),
        oversample_samples=draw(st.floats(1, 4)),
        settings=_fused(units, draw(st.booleans())),
        gather_rows=(rows := draw(st.integers(0, 9))),
        gather_replicas=draw(st.integers(0, 9)) if rows else 0,
        gather_by=draw(st.sampled_from(["cache", "tokens"])) if rows else "cache",
        predicted_step_s=draw(SECONDS),
        predicted_stages_s=draw(st.dictionaries(NAMES, SECONDS, max_size=3)),
    )


def _fused(units: dict[str, PlannedUnit], is_wanted: bool) -> dict[str, list[str]]:
    """Return a pair of fused roles; a second role is added beside the first unit with a pipeline."""
    for name, unit in units.items():
        if is_wanted and name != "sampler" and unit.grid.pp > 1 and not unit.grid.is_sharded:
            units[f"{name}, critic"] = unit
            return {"fused": [f"{name}, critic", name]}
    return {}


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_plan_is_read_back_as_it_was_written(plan: Plan) -> None:
    again = read_plan(tomllib.loads(plan_text(plan)), "plan.toml", ["fused"])
    require_fusable(again)
    assert again == plan
    assert list(again.units) == list(plan.units)
    assert plan_text(again) == plan_text(plan)


VALUES = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    st.dictionaries(st.text(), VALUES | st.text() | st.lists(VALUES | st.text(), max_size=3), max_size=3),
    lambda inner: st.dictionaries(st.text(), inner | st.lists(inner, max_size=2), max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(TREES, st.text(st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_tables_are_read_back_as_they_were_written(tables: dict[str, object], comment: str) -> None:
    assert tomllib.loads(toml_text(tables, comment)) == tables
    assert tomllib.loads(f"table = {inline_text(tables)}") == {"table": tables}


def test_what_toml_cannot_hold_is_refused_by_its_place() -> None:
    with pytest.raises(ConfigError, match=r"a\.b is inf"):
        toml_text({"a": {"b": float("inf")}})
    assert toml_text({"a": None, "b": {"c": None}}) == "[b]\n"


def test_what_is_left_out_has_its_default() -> None:
    plan = read_plan(tomllib.loads(TEXT), "plan.toml")
    assert plan.units["policy"] == PlannedUnit(pool="main", grid=Grid(dp=2, tp=4))
    assert (plan.freshness, plan.streams, plan.oversample_prompts, plan.predicted_stages_s) == (
        0,
        0,
        1.0,
        {},
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("devices = 8", "device = 8", "device is 8|no 'devices'"),
        ("devices = 8", "devices = 8\ndevcies = 9", "did you mean 'devices'"),
        ("devices = 8", "devices = 0", "from 1 to"),
        ("devices = 8", "devices = true", "a whole number"),
        ("devices = 8", "devices = 6", "2 x 1 x 4 = 8"),
        ('pool = "main"', 'pool = "mian"', "did you mean 'main'"),
        ('pool = "main"', "", "no 'pool'"),
        ("dp = 2", "dp = 2\nfsdp = 2", "has dp and fsdp"),
        ("dp = 2", "dp = 2\nep = 3", "8 / 3 is not a whole number"),
        ("dp = 2", "dp = 2\ngenerate_tp = 3", "8 / 3 is not a whole number"),
        ('name = "ppo"', 'name = "ppo"\nfreshness = 1', "no unit is called sampler"),
        ('name = "ppo"', 'name = "ppo"\noversample_prompts = 0.5', "1 or more"),
        ('name = "ppo"', 'name = "ppo"\noversample_prompts = nan', "a finite number"),
        ('name = "ppo"', 'name = "ppo"\nfreshnes = 1', "did you mean 'freshness'"),
        ('name = "ppo"', 'name = "ppo"\npredicted = 3', "a table"),
        ('name = "ppo"', 'name = "ppo"\ngather_replicas = 2', "without gather_rows"),
        ('name = "ppo"', 'name = "ppo"\ngather_by = "tokns"', "did you mean 'tokens'"),
        ('name = "ppo"', 'name = "ppo"\ngather_rows = -1', "a whole number"),
        (
            "[units.policy]",
            '[pools.idle]\nmachine_type = "h100"\ndevices = 8\n[units.policy]',
            "idle has no unit",
        ),
    ],
)
def test_what_cannot_be_is_refused(old: str, new: str, said: str) -> None:
    assert old in TEXT
    with pytest.raises(PlanError, match=said) as caught:
        read_plan(tomllib.loads(TEXT.replace(old, new)), "plan.toml")
    assert "plan.toml" in caught.value.what
    assert caught.value.why


def test_a_plan_that_could_not_be_read_is_not_written() -> None:
    pool = PlannedPool(name="main", machine_type="h100", devices=8)
    unit = PlannedUnit(pool="main", grid=Grid(dp=8))
    with pytest.raises(PlanError, match="2 pools are called 'main'"):
        plan_text(Plan(name="a", pools=(pool, pool), units={"policy": unit}))
