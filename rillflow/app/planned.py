"""Planned: apply a plan to a recipe's placement, or refuse a plan that cannot run.

Plan ─┬─ settings_of ─> placement.pools, roles, grids, settings of plugins, the schedule, as --set
      │                 writes them
      ├─ require_for ─> refuses a plan of another recipe, or a plan that no run supports yet
      └─ keep_plan ───> writes it to the run directory; returns whether the run is placed by it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rillflow.app.plugin_sections import plugin_settings
from rillflow.app.plugins import PROVIDERS
from rillflow.app.resolved import Resolved
from rillflow.config.load import parse_override, read_toml
from rillflow.config.toml_text import inline_text
from rillflow.controller.schedules.in_order import InOrder
from rillflow.errors import ConfigError, PlanError, nearest
from rillflow.placement.plan import GATHERED, SAMPLER, Plan, plan_text, read_plan
from rillflow.runs import layout
from rillflow.runs.integrity import Evidence
from rillflow.workers.config import PlacementConfig

_OVERSAMPLED = ("oversample_prompts", "oversample_samples")
_ORDERS = {"ahead": ("freshness",), "tail_batching": _OVERSAMPLED, "gathering": GATHERED}
"""Settings of a plan that choose the order of a step, by ``schedule.mode``."""
_PLACED = tuple(map("placement.{}".format, ("pools", "roles", "train_parallel", "rollout_parallel")))
_SCHEDULED = tuple(f"schedule.{key}" for keys in _ORDERS.values() for key in keys)
PROCESSOR = "cpu"
"""Prefix of the names of devices that need no accelerator."""


class Planning(Protocol):
    """Predictions of a planner: the service ``planning`` of a plugin."""

    def predict_placement(
        self, loaded: Resolved, cluster: Path, lengths: Path | None, say: Callable[[str], None]
    ) -> Plan:
        """Return a recipe's own placement on a cluster with predicted seconds, for ``run --cluster``."""
        ...


def open_plan(file: Path) -> Plan:
    """Read a plan from a file.

    Raises:
        ConfigError: the file is missing or is not TOML.
        PlanError: the content is not a plan.
    """
    return read_plan(read_toml(file, "plan"), str(file), [key.partition(".")[2] for key in _added()])


def _added() -> list[str]:
    """Return the settings that plugins add to the section ``placement``; a recipe refuses missing ones."""
    known = {**plugin_settings(), **PROVIDERS["settings"]}
    return [key for key in known if key.startswith("placement.")]


def mode_of(recipe: Path) -> str:
    """Return the ``schedule.mode`` that a recipe's file names, or the default."""
    section = dict(read_toml(recipe)).get("schedule")
    return str(section["mode"]) if isinstance(section, dict) and "mode" in section else InOrder().mode


def settings_of(plan: Plan, overrides: Sequence[str], mode: str = "in_order") -> list[str]:
    """Return ``KEY=VALUE`` texts that place a recipe as the plan does.

    Args:
        plan: the plan to run.
        overrides: further overrides, which must not place anything.
        mode: the recipe's own ``schedule.mode``; ready first stays with a plan that samples ahead.

    Raises:
        ConfigError: an override places something.
    """
    planned = (*_PLACED, *_added(), *_SCHEDULED)
    for text in overrides:
        dotted = parse_override(text).dotted
        if dotted == "placement" or dotted.startswith(planned):
            raise ConfigError(
                f"--set {text} cannot be combined with --plan",
                why=f"the plan sets {', '.join(planned)}",
                fix="change the plan's file, or remove one of the two options",
            )
    said = list[str]()
    for order, keys in _ORDERS.items():
        changed = [key for key in keys if vars(plan)[key] != vars(Plan)[key]]
        if changed and not (order == "ahead" and mode == "ready_first"):
            said.append(f'schedule.mode="{order}"')
        said += [f"schedule.{key}={inline_text(vars(plan)[key])}" for key in changed]
    return [*said, *(f"placement.{key}={inline_text(value)}" for key, value in plan.placement.items())]


def require_for(plan: Plan, loaded: Resolved) -> None:
    """Refuse a plan of another recipe, or a plan that no run supports yet.

    Raises:
        PlanError: it is for another algorithm, places a role the recipe does not call, has two machine types,
            shards experts together with other axes, or needs accelerators that are not here.
    """
    recipe = loaded.recipe
    for what, why in _not_yet(plan):
        raise PlanError(f"the plan {what}", why=why, fix="change the plan's file, or make a new plan")
    if plan.name != recipe.algorithm.name:
        raise PlanError(
            f"the plan is for {plan.name}",
            why=f"{loaded.path} runs {recipe.algorithm.name}",
            fix=f"make a plan with rillflow plan {loaded.path} --out FILE",
        )
    for name in plan.units:
        if name not in (*loaded.called, SAMPLER):
            raise PlanError(
                f"the plan places {name!r}",
                why=f"the roles of {loaded.path} are {', '.join(loaded.called)}",
                fix=nearest(name, loaded.called),
            )


def is_placed_by(plan: Plan, placement: PlacementConfig) -> bool:
    """Return whether every unit of the plan is placed as it says; the names of pools do not matter.

    Grids fill their pools, so pools with equal grids have equal sizes.
    """
    pairs = {(unit.pool, placement.pool_of(name)) for name, unit in plan.units.items()}
    models = {name: unit for name, unit in plan.units.items() if name != SAMPLER}
    names = dict(pairs)
    own = {*PlacementConfig.model_fields}
    alike = len(pairs) == len(names) == len(set(names.values()))
    return (
        alike
        and placement.samples_apart == (SAMPLER in plan.units)
        and placement.model_dump(mode="json", exclude=own, exclude_defaults=True) == plan.settings
        and all(placement.mesh_of(name).grid == unit.grid for name, unit in models.items())
        and all(unit.generate_tp in (0, placement.generate_tp) for unit in plan.units.values())
    )


def keep_plan(run: Path, plan: Plan | None, placement: PlacementConfig) -> bool:
    """Write a given plan into a run directory; return whether the plan there matches the run's placement.

    Args:
        run: the directory.
        plan: the plan given at this start; None: the directory may have one of an earlier start.
        placement: the placement of this start.

    Raises:
        PlanError: the plan of an earlier start is damaged.
    """
    file = run / layout.PLAN
    if plan is not None:
        Evidence(run).write(layout.PLAN, plan_text(plan).encode())
    elif file.is_file():
        plan = open_plan(file)
    return plan is not None and is_placed_by(plan, placement)


def _not_yet(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield each part of a plan that no run supports yet, and why."""
    if plan.freshness % 1:
        yield f"has the freshness {plan.freshness:g}", "a run bounds the age of a row in whole versions"
    if plan.streams:
        yield "trains on a step's minibatches as they arrive", "a run trains on whole steps"
    kinds = sorted({pool.machine_type for pool in plan.pools})
    if len(kinds) > 1:
        yield f"has the machine types {' and '.join(kinds)}", "all ranks of a run are on one machine type"
    for name, unit in plan.units.items():
        grid = unit.grid
        if grid.ep > 1 and (grid.pp * grid.tp * grid.cp > 1 or grid.is_sharded or grid.dp % grid.ep):
            why = "a run shards experts only over dp ranks that hold the rest of the model whole"
            yield f"sets units.{name}.ep to {grid.ep} in the grid {grid}", why
    for pool in plan.pools:
        if pool.device and not pool.device.lower().startswith(PROCESSOR) and not _has_accelerator():
            yield f"has {pool.devices} x {pool.device} in pool {pool.name}", "this machine has no accelerator"


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()
