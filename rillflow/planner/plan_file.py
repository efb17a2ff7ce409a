"""Plan file: a plan as TOML that a person can read, change and launch.

Plan ─ plan_text ─> plan.toml ─ read_plan ─> the same Plan, or what contradicts in it
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rillflow.config.toml_text import toml_text
from rillflow.errors import PlanError, nearest
from rillflow.planner.grid import Grid
from rillflow.planner.plan import Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import SAMPLER

LATE: tuple[Literal["wait", "drop"], ...] = ("wait", "drop")
"""What may become of rows beyond the freshness bound."""
WEIGHTS: tuple[Literal["exposed", "hidden", "staggered"], ...] = ("exposed", "hidden", "staggered")
"""How weights may travel to a sampler apart."""
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
    root = _Table(where=name, data=data)
    root.only(
        "name",
        "freshness",
        "late",
        "streams",
        "publish_every",
        "weights",
        *_SHARES,
        "pools",
        "units",
        "predicted",
    )
    predicted = (
        root.table("predicted") if "predicted" in data else _Table(where=f"{name}: predicted", data={})
    )
    predicted.only("step_s", "stages_s")
    stages = predicted.table("stages_s") if "stages_s" in predicted.data else None
    plan = Plan(
        name=root.text("name"),
        pools=tuple(_pool(table) for table in root.table("pools").tables()),
        units={table.key: _unit(table) for table in root.table("units").tables()},
        freshness=root.whole("freshness", 0, 0),
        late=root.one_of("late", LATE),
        streams=root.one_of("streams", (False, True)),
        publish_every=root.whole("publish_every", 0, 0),
        weights=root.one_of("weights", WEIGHTS),
        oversample_prompts=root.number("oversample_prompts", 1.0, least=1.0),
        oversample_samples=root.number("oversample_samples", 1.0, least=1.0),
        predicted_step_s=predicted.number("step_s", 0.0),
        predicted_stages_s={} if stages is None else {key: stages.number(key) for key in stages.data},
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


_Known = TypeVar("_Known")
_SHARES = ("oversample_prompts", "oversample_samples")
_AXES = ("dp", "fsdp", "pp", "tp", "cp", "ep", "generate_tp")


@dataclass(frozen=True, kw_only=True)
class _Table:
    """A table of the file with its place, read key by key."""

    where: str
    data: Mapping[str, Any]
    key: str = ""

    def only(self, *known: str) -> None:
        for key in self.data:
            if key not in known:
                raise PlanError(
                    f"{self.where}: {key!r} is no key of a plan",
                    why=f"here it has {', '.join(known)}",
                    fix=nearest(key, known),
                )

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text in quotes")
        return value

    def whole(self, key: str, least: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        if value < least:
            raise self._wrong(key, value, f"{least} or more")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        if value < least:
            raise self._wrong(key, value, f"{least:g} or more")
        return float(value)

    def one_of(self, key: str, known: tuple[_Known, ...]) -> _Known:
        value = self._value(key, known[0])
        for one in known:
            if value is one or (isinstance(value, str) and value == one):
                return one
        texts = [str(one).lower() for one in known]
        error = self._wrong(key, value, " or ".join(texts))
        raise PlanError(error.what, why=error.why, fix=nearest(str(value), texts))

    def table(self, key: str) -> _Table:
        value = self._value(key, None)
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, f"a table, [{key}]")
        return _Table(where=f"{self.where}: {key}", data=value, key=key)

    def tables(self) -> list[_Table]:
        return [self.table(key) for key in self.data]

    def _value(self, key: str, default: object) -> object:
        if key in self.data:
            return self.data[key]
        if default is None:
            raise PlanError(f"{self.where} has no {key!r}", why="a plan cannot do without it")
        return default

    def _wrong(self, key: str, value: object, kind: str) -> PlanError:
        return PlanError(f"{self.where}: {key} is {value!r}", why=f"it must be {kind}")


def _unit_table(unit: PlannedUnit) -> dict[str, Any]:
    grid = unit.grid
    table: dict[str, Any] = {"pool": unit.pool, "fsdp" if grid.is_sharded else "dp": grid.dp}
    table |= {"pp": grid.pp, "tp": grid.tp}
    table |= {axis: size for axis, size in (("cp", grid.cp), ("ep", grid.ep)) if size > 1}
    if unit.generate_tp:
        table["generate_tp"] = unit.generate_tp
    return table


def _pool(table: _Table) -> PlannedPool:
    table.only("fleet", "devices", "device")
    return PlannedPool(
        name=table.key,
        fleet=table.text("fleet"),
        devices=table.whole("devices", 1),
        device=table.text("device", ""),
    )


def _unit(table: _Table) -> PlannedUnit:
    table.only("pool", *_AXES)
    if "dp" in table.data and "fsdp" in table.data:
        raise PlanError(
            f"{table.where} has dp and fsdp",
            why="devices with other rows each hold all parameters (dp) or their share of them (fsdp)",
            fix="remove one of the two",
        )
    is_sharded = "fsdp" in table.data
    grid = Grid(
        dp=table.whole("fsdp" if is_sharded else "dp", 1, 1),
        pp=table.whole("pp", 1, 1),
        tp=table.whole("tp", 1, 1),
        cp=table.whole("cp", 1, 1),
        ep=table.whole("ep", 1, 1),
        is_sharded=is_sharded,
    )
    return PlannedUnit(pool=table.text("pool"), grid=grid, generate_tp=table.whole("generate_tp", 0, 0))
