"""Plan: pools, sizes, grids for every unit; the planner's result and the launcher's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rillflow.planner.grid import Grid

SAMPLER = "sampler"
"""The unit that generates where that is done apart from the policy's training."""


@dataclass(frozen=True, kw_only=True)
class PlannedPool:
    """Devices that their units share in turn."""

    name: str
    """Unique within the plan."""
    fleet: str
    """The machines it lies on."""
    devices: int
    """Its size."""
    device: str = ""
    """What its devices are; empty where nobody says."""


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Where a unit lies, and how."""

    pool: str
    """The pool's name."""
    grid: Grid
    """How the pool's devices share it in training and scoring."""
    generate_tp: int = 0
    """Devices that share a copy while they generate; 0 where it does not."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A placement of every unit, and how steps follow one another.

    Example:
        Plan(name="ppo", pools=(PlannedPool(name="main", fleet="h100", devices=8),), units=units)
    """

    name: str
    """The algorithm's."""
    pools: tuple[PlannedPool, ...]
    """Largest first."""
    units: Mapping[str, PlannedUnit]
    """By name: the roles that are models, and ``sampler`` where that is apart."""
    freshness: int = 0
    """How many policy versions old a trained token may be; 0 is in step."""
    late: Literal["wait", "drop"] = "wait"
    """What becomes of rows beyond it: admission waits so that there are none, or their groups are dropped."""
    streams: bool = False
    """Whether training takes each minibatch as soon as its rows are there; else a step's rows at once."""
    publish_every: int = 0
    """Minibatches after which weights are published; 0: those of a step. A version is what was published."""
    weights: Literal["exposed", "hidden", "staggered"] = "exposed"
    """While weights travel, both sides stand still; both go on; or only replicas do, one after another."""
    oversample_prompts: float = 1.0
    """Prompts begun for each that is trained on; the longest are left for later rounds."""
    oversample_samples: float = 1.0
    """Rows begun for each that is trained on."""
    predicted_step_s: float = 0.0
    """What the planner expects of a step."""
    predicted_stages_s: Mapping[str, float] = field(default_factory=dict)
    """What it expects of the stages of a step by name; empty where nobody said."""

    @property
    def placement(self) -> Mapping[str, Mapping[str, Any]]:
        """The section of a recipe that places it so, but for experts apart, which none can say.

        A pool whose models share it in one grid has it under its own name; else every model has its own. A
        pool called as a unit would hide that unit's own grid, so it is called otherwise.
        """
        names = {one.name: f"pool_{one.name}" if one.name in self.units else one.name for one in self.pools}
        train: dict[str, dict[str, int]] = {}
        for pool in names:
            units = {name: unit.grid for name, unit in self.units.items() if unit.pool == pool}
            grids = {name: replace(grid, ep=1).axes for name, grid in units.items()}
            first = next(iter(grids.values()))
            train |= grids if any(axes != first for axes in grids.values()) else {names[pool]: first}
        return {
            "pools": {names[pool.name]: pool.devices for pool in self.pools},
            "roles": {name: names[unit.pool] for name, unit in self.units.items()},
            "train": train,
            "generate": {"tp": max([1, *(unit.generate_tp for unit in self.units.values())])},
        }

    def pool(self, name: str) -> PlannedPool:
        """The pool of a name."""
        return next(pool for pool in self.pools if pool.name == name)
