"""Plan file: a plan as TOML that a person can read, change and launch.

Plan ─ plan_text ─> plan.toml ─ read_plan ─> the same Plan, or what contradicts in it
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.config.toml_text import toml_text
from rillflow.errors import PlanError, nearest
from rillflow.planner.grid import Grid
from rillflow.planner.plan import Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import SAMPLER
from rillflow.planner.quantities import TABLE, TEXT, YES, Reader, number, one_of, values, whole

COMMENT = "Where models lie and what a step should take; rillflow run RECIPE --plan FILE launches it."


def plan_text(plan: Plan) -> str:
    """The plan as TOML; a grid's data axis is called ``fsdp`` where parameters are cut over it.

    Raises:
        PlanError: it contradicts itself, so that it could not be read back.
    """
    require_possible(plan)
    pools = {
        pool.name: {"fleet": pool.fleet, "devices": pool.devices, "device": pool.device or None}
        for pool in plan.pools
    }
    tables = {
        "name": plan.name,
        "freshness": plan.freshness,
        "late": plan.late,
        "streams": plan.streams or None,
        "publish_every": plan.publish_every or None,
        "weights": None if plan.weights == "exposed" else plan.weights,
        "oversample_prompts": float(plan.oversample_prompts),
        "oversample_samples": float(plan.oversample_samples),
        "pools": pools,
        "units": {name: _unit_table(unit) for name, unit in plan.units.items()},
        "predicted": {
            "step_s": float(plan.predicted_step_s),
            "stages_s": {name: float(value) for name, value in plan.predicted_stages_s.items()},
        },
    }
    return toml_text(tables, comment=COMMENT)


def read_plan(text: str, name: str) -> Plan:
    """The plan a text holds.

    Args:
        text: TOML.
        name: what the text is called in an error.

    Raises:
        PlanError: it is no TOML, a key is missing, unknown or of another type, or two contradict.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(
            f"{name} is not a plan", why=str(error), fix="rillflow plan --out writes one"
        ) from None
    said = values(data, _PLAN, name, needed={"name", "pools", "units"})
    predicted = values(said.pop("predicted", {}), _PREDICTED, f"{name}: predicted")
    pools, units = said.pop("pools"), said.pop("units")
    plan = Plan(
        **said,
        pools=tuple(_pool(key, one, f"{name}: pools.{key}") for key, one in pools.items()),
        units={key: _unit(one, f"{name}: units.{key}") for key, one in units.items()},
        predicted_step_s=predicted.get("step_s", 0.0),
        predicted_stages_s={
            key: _SECONDS(spent, f"{name}: predicted.stages_s.{key}")
            for key, spent in predicted.get("stages_s", {}).items()
        },
    )
    problem = next(contradictions(plan), None)
    if problem is not None:
        raise PlanError(f"{name}: {problem.what}", why=problem.why, fix=problem.fix)
    return plan


def require_possible(plan: Plan) -> None:
    """Refuse a plan that contradicts itself.

    Raises:
        PlanError: the first contradiction.
    """
    for problem in contradictions(plan):
        raise problem


def contradictions(plan: Plan) -> Iterator[PlanError]:
    """What cannot be in a plan, whatever it is a plan of."""
    counted = Counter(pool.name for pool in plan.pools)
    for name, count in counted.items():
        if count > 1:
            yield PlanError(f"{count} pools are called {name!r}", why="a pool is known by its name")
    for name, unit in plan.units.items():
        if unit.pool not in counted:
            yield PlanError(
                f"units.{name}.pool is {unit.pool!r}",
                why=f"the pools are {', '.join(counted) or 'none'}",
                fix=nearest(unit.pool, counted),
            )
            continue
        yield from _misfits(name, unit, plan.pool(unit.pool))
    for pool in plan.pools:
        if all(unit.pool != pool.name for unit in plan.units.values()):
            yield PlanError(f"the pool {pool.name} has no unit", why="its devices would do nothing")
    for name, value, least in (
        ("freshness", plan.freshness, 0),
        ("oversample_prompts", plan.oversample_prompts, 1),
        ("oversample_samples", plan.oversample_samples, 1),
    ):
        if not value >= least:
            yield PlanError(f"{name} is {value:g}", why=f"it is {least} or more")
    ahead = plan.freshness > 0 or plan.streams or plan.publish_every > 0
    if ahead and SAMPLER not in plan.units:
        yield PlanError(
            f"freshness is {plan.freshness} and no unit is called {SAMPLER}",
            why="where generation takes turns with training it never runs ahead of the weights",
            fix="set freshness = 0",
        )


def _misfits(name: str, unit: PlannedUnit, pool: PlannedPool) -> Iterator[PlanError]:
    grid = unit.grid
    if grid.devices != pool.devices:
        product = (
            " x ".join(map(str, (grid.dp, grid.pp, grid.tp, *([grid.cp] if grid.cp > 1 else []))))
            + f" = {grid.devices}"
        )
        yield PlanError(
            f"units.{name} is {grid} and the pool {pool.name} has {pool.devices} devices",
            why=f"every device has one place in the grid; {product}",
            fix="change an axis or the pool's size",
        )
    if (grid.devices // grid.pp) % grid.ep:
        yield PlanError(
            f"units.{name}.ep is {grid.ep} with dp {grid.dp} x tp {grid.tp}",
            why=f"experts lie on those devices; {grid.devices // grid.pp} / {grid.ep} is no whole number",
        )
    if unit.generate_tp and pool.devices % unit.generate_tp:
        yield PlanError(
            f"units.{name}.generate_tp is {unit.generate_tp} and its pool has {pool.devices} devices",
            why=f"copies are alike; {pool.devices} / {unit.generate_tp} is no whole number",
        )


def _unit_table(unit: PlannedUnit) -> dict[str, Any]:
    grid = unit.grid
    table: dict[str, Any] = {"pool": unit.pool, "fsdp" if grid.is_sharded else "dp": grid.dp}
    table |= {"pp": grid.pp, "tp": grid.tp}
    table |= {axis: size for axis, size in (("cp", grid.cp), ("ep", grid.ep)) if size > 1}
    if unit.generate_tp:
        table["generate_tp"] = unit.generate_tp
    return table


def _pool(name: str, data: object, where: str) -> PlannedPool:
    return PlannedPool(name=name, **values(data, _POOL, where, needed={"fleet", "devices"}))


def _unit(data: object, where: str) -> PlannedUnit:
    said = values(data, _UNIT, where, needed={"pool"})
    if "dp" in said and "fsdp" in said:
        raise PlanError(
            f"{where} has dp and fsdp",
            why="devices with other rows each hold all parameters (dp) or their share of them (fsdp)",
            fix="remove one of the two",
        )
    pool, generate_tp = said.pop("pool"), said.pop("generate_tp", 0)
    is_sharded = "fsdp" in said
    grid = Grid(dp=said.pop("fsdp", said.pop("dp", 1)), **said, is_sharded=is_sharded)
    return PlannedUnit(pool=pool, grid=grid, generate_tp=generate_tp)


_SECONDS = number(0.0)
_PREDICTED: Mapping[str, Reader] = {"step_s": _SECONDS, "stages_s": TABLE}
_POOL: Mapping[str, Reader] = {"fleet": TEXT, "devices": whole(1), "device": TEXT}
_UNIT: Mapping[str, Reader] = {
    "pool": TEXT,
    **dict.fromkeys(("dp", "fsdp", "pp", "tp", "cp", "ep"), whole(1)),
    "generate_tp": whole(0),
}
_PLAN: Mapping[str, Reader] = {
    "name": TEXT,
    "freshness": whole(0),
    "late": one_of("wait", "drop"),
    "streams": YES,
    "publish_every": whole(0),
    "weights": one_of("exposed", "hidden", "staggered"),
    **dict.fromkeys(("oversample_prompts", "oversample_samples"), number(1.0)),
    **dict.fromkeys(("pools", "units", "predicted"), TABLE),
}
