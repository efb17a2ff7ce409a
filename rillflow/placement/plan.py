"""Plan: pools, sizes, and grids for every unit; the planner's result and the launcher's input.

Plan ─ plan_text ─> plan.toml, for a person to read and edit ─ read_plan ─> Plan, or an error
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from rillflow.config.toml_text import toml_text
from rillflow.errors import PlanError, nearest
from rillflow.placement.grid import Grid
from rillflow.placement.tables import TABLE, TEXT, Count, Reader, named, number, read, values, whole

COMMENT = "Placement of the models and predicted seconds; rillflow run RECIPE --plan FILE launches it."
SAMPLER = "sampler"
"""Name of the unit that generates on devices other than the policy's training devices."""
GATHERED = ("gather_rows", "gather_replicas", "gather_by")
"""Keys of a plan that are settings of ``[rollout]``: when the last rows of a step are gathered."""


@dataclass(frozen=True, kw_only=True)
class PlannedPool:
    """Devices that the units share in turn."""

    name: str
    """Name, unique within the plan."""
    machine_type: str
    """Name of the machines in the cluster file."""
    devices: Count
    """Number of devices."""
    device: str = ""
    """Type of the devices; empty if not given."""


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Placement of a unit."""

    pool: str
    """Name of the pool."""
    grid: Grid
    """How the pool's devices share the unit in training and scoring."""
    generate_tp: int = 0
    """Devices that share a copy during generation; 0 if the unit does not generate."""


def _bound(data: object, where: str) -> float:
    bound: float = number(0.0)(data, where)
    return int(bound) if bound.is_integer() else bound


def _pools(data: object, where: str) -> tuple[PlannedPool, ...]:
    return tuple(named(PlannedPool, data, where).values())


def _units(data: object, where: str) -> Mapping[str, PlannedUnit]:
    return {name: _unit(one, f"{where}.{name}") for name, one in TABLE(data, where).items()}


def _stages(data: object, where: str) -> Mapping[str, float]:
    return {name: number(0.0)(one, f"{where}.{name}") for name, one in TABLE(data, where).items()}


def _unit(data: object, where: str) -> PlannedUnit:
    said = values(data, _UNIT, where, needed={"pool"})
    if "dp" in said and "fsdp" in said:
        raise PlanError(
            f"{where} has dp and fsdp",
            why="a data-parallel device holds either all parameters (dp) or a shard of them (fsdp)",
            fix="remove one of the two",
        )
    pool, generate_tp, is_sharded = said.pop("pool"), said.pop("generate_tp", 0), "fsdp" in said
    grid = Grid(dp=said.pop("fsdp", said.pop("dp", 1)), **said, is_sharded=is_sharded)
    return PlannedUnit(pool=pool, grid=grid, generate_tp=generate_tp)


_UNIT: Mapping[str, Reader] = {
    "pool": TEXT,
    **dict.fromkeys(("dp", "fsdp", "pp", "tp", "cp", "ep"), whole(1)),
    "generate_tp": whole(0),
}
_PREDICTED: Mapping[str, Reader] = {"step_s": number(0.0), "stages_s": _stages}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of every unit, and how steps overlap.

    Example:
        Plan(name="ppo", pools=(PlannedPool(name="main", machine_type="h100", devices=8),), units=units)
    """

    name: str
    """Name of the algorithm."""
    pools: Annotated[tuple[PlannedPool, ...], _pools]
    """Pools, largest first."""
    units: Annotated[Mapping[str, PlannedUnit], _units]
    """Units by name: every role with a model, and ``sampler`` if it is separate."""
    freshness: Annotated[float, _bound] = 0
    """Largest age of a trained token in policy versions; 0 is on-policy. Where admission counts rows: the
    steps, or the fraction of a step, whose rows may have begun in advance.
    """
    streams: int = 0
    """Minibatches that training takes as soon as their rows are ready; 0 waits for the whole step."""
    oversample_prompts: Annotated[float, number(1.0)] = 1.0
    """Prompts begun per trained prompt; the longest ones move to later rounds."""
    oversample_samples: Annotated[float, number(1.0)] = 1.0
    """Rows begun per trained row."""
    gather_rows: int = 0
    """Unfinished rows of a step at which they are gathered on fewer replicas; 0 for never."""
    gather_replicas: int = 0
    """Replicas that then run them; 0 for the fewest that hold them."""
    gather_by: Literal["cache", "tokens"] = "cache"
    """Whether a gathered row's KV cache is sent, or computed again from its tokens."""
    predicted_step_s: float = 0.0
    """Predicted seconds of a step."""
    predicted_stages_s: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of the stages of a step by name; empty without a prediction."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that plugins add to the recipe's section ``placement``, by key, as a file has them."""

    @property
    def placement(self) -> Mapping[str, Any]:
        """Recipe section with the same placement.

        If all models of a pool share one grid, the pool's name holds the grid; otherwise every model has its
        own. A pool with the name of a unit gets a prefix, because it would hide the unit's own grid.
        """
        names = {one.name: f"pool_{one.name}" if one.name in self.units else one.name for one in self.pools}
        train: dict[str, dict[str, int]] = {}
        for pool in names:
            units = {
                name: one.grid for name, one in self.units.items() if one.pool == pool and name != SAMPLER
            }
            grids = {name: _recipe_axes(grid) for name, grid in units.items()}
            first = next(iter(grids.values()), {})
            train |= (
                {names[pool]: first} if grids and all(first == axes for axes in grids.values()) else grids
            )
        return {
            "pools": {names[pool.name]: pool.devices for pool in self.pools},
            "roles": {name: names[unit.pool] for name, unit in self.units.items()},
            "train_parallel": train,
            "rollout_parallel": {"tp": max([1, *(unit.generate_tp for unit in self.units.values())])},
            **self.settings,
        }

    def pool(self, name: str) -> PlannedPool:
        """Return the pool with this name."""
        return next(pool for pool in self.pools if pool.name == name)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted and measured seconds of a stage or a step."""

    stage: str
    """Name of the stage."""
    predicted_s: float
    """Predicted seconds per step; 0 without a prediction."""
    measured_s: float
    """Measured seconds of a usual step; 0 if not measured."""
    phase: str = ""
    """Phase of the run, when several are compared."""

    @property
    def error(self) -> float:
        """Relative error, predicted / measured - 1; 0 if not measured."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0


def plan_text(plan: Plan) -> str:
    """Return the plan as TOML; a grid's data axis is called ``fsdp`` if parameters are sharded over it.

    Raises:
        PlanError: the plan contradicts itself, so it could not be read back.
    """
    require_possible(plan)
    tables = {
        "name": plan.name,
        "freshness": plan.freshness,
        **{key: vars(plan)[key] for key in _SELDOM if vars(plan)[key] != vars(Plan)[key]},
        **plan.settings,
        "pools": {
            pool.name: {
                "machine_type": pool.machine_type,
                "devices": pool.devices,
                "device": pool.device or None,
            }
            for pool in plan.pools
        },
        "units": {
            name: {"pool": unit.pool, **unit.grid.axes, "generate_tp": unit.generate_tp or None}
            for name, unit in plan.units.items()
        },
        "predicted": {
            "step_s": float(plan.predicted_step_s),
            "stages_s": {name: float(value) for name, value in plan.predicted_stages_s.items()},
        },
    }
    return toml_text(tables, comment=COMMENT)


def read_plan(data: Mapping[str, Any], name: str, settings: Collection[str] = ()) -> Plan:
    """Read a plan from its tables.

    Args:
        data: the tables of a plan file.
        name: name of the file in errors.
        settings: keys that may be in ``Plan.settings``; a recipe with the plan checks their values.

    Raises:
        PlanError: a key is missing, unknown or of another type, or two keys contradict each other.
    """
    told = values(data.get("predicted", {}), _PREDICTED, f"{name}: predicted")
    expected = {"predicted_step_s": told.get("step_s", 0.0), "predicted_stages_s": told.get("stages_s", {})}
    expected["settings"] = {key: value for key, value in data.items() if key in settings}
    tables = {key: value for key, value in data.items() if key not in ("predicted", *settings)}
    plan: Plan = read(Plan, tables, name, **expected)
    require_possible(plan, name)
    return plan


def require_possible(plan: Plan, where: str = "") -> None:
    """Raise an error for a plan that contradicts itself, for any problem; ``where`` names its file.

    Raises:
        PlanError: the first contradiction.
    """
    for what, why in _contradictions(plan):
        raise PlanError(f"{where}: {what}" if where else what, why=why)


def _contradictions(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield contradictions within a plan, with reasons; each assumes that the previous ones do not occur."""
    names = [pool.name for pool in plan.pools]
    for name in names:
        if names.count(name) > 1:
            yield f"{names.count(name)} pools are called {name!r}", "pool names must be unique"
    for name, unit in plan.units.items():
        if unit.pool not in names:
            known = f"the pools are {', '.join(names) or 'none'}"
            yield f"units.{name}.pool is {unit.pool!r}", f"{known}; {nearest(unit.pool, names)}"
        yield from _unfilled(f"units.{name}", unit, plan.pool(unit.pool))
    for idle in sorted(set(names) - {unit.pool for unit in plan.units.values()}):
        yield f"the pool {idle} has no unit", "its devices would be idle"
    oversampled = [(f"oversample_{what}", 1, 100) for what in ("prompts", "samples")]
    for name, least, most in (("freshness", 0, 1_000_000), *oversampled):
        if not least <= vars(plan)[name] <= most:
            yield f"{name} is {vars(plan)[name]:g}", f"it must lie between {least} and {most:,}"
    if (plan.freshness or plan.streams) and SAMPLER not in plan.units:
        why = "without separate devices for generation, it alternates with training and is always on-policy"
        yield f"freshness is {plan.freshness:g} and no unit is called {SAMPLER}", why
    if (plan.gather_replicas or plan.gather_by != Plan.gather_by) and not plan.gather_rows:
        what = f"gather_replicas is {plan.gather_replicas} and gather_by {plan.gather_by!r}"
        yield what, "without gather_rows, no rows are gathered"


def _recipe_axes(grid: Grid) -> dict[str, int]:
    """Return a grid's sizes as a recipe states them: dp times ep ranks have different rows."""
    axes = replace(grid, ep=1).axes
    apart = {} if grid.ep == 1 else {"dp": int(grid.dp // grid.ep), "ep": int(grid.ep)}
    return axes | apart


def _unfilled(where: str, unit: PlannedUnit, pool: PlannedPool) -> Iterator[tuple[str, str]]:
    """Yield how a grid does not fill its pool or cannot be split evenly."""
    grid, no_number = unit.grid, "is not a whole number"
    if grid.devices != pool.devices:
        sizes = " x ".join(str(size) for axis, size in grid.axes.items() if axis != "ep")
        why = f"the grid must use every device of the pool once; {sizes} = {grid.devices}"
        yield f"{where} is {grid} and the pool {pool.name} has {pool.devices} devices", why
    stage = grid.devices // grid.pp
    if stage % grid.ep:
        why = f"ep must divide the devices that hold the experts; {stage} / {grid.ep} {no_number}"
        yield f"{where}.ep is {grid.ep} with dp {grid.dp} x tp {grid.tp}", why
    if unit.generate_tp and pool.devices % unit.generate_tp:
        why = f"every copy has the same number of devices; {pool.devices} / {unit.generate_tp} {no_number}"
        yield f"{where}.generate_tp is {unit.generate_tp} and its pool has {pool.devices} devices", why


_SELDOM = ("streams", "oversample_prompts", "oversample_samples", *GATHERED)
