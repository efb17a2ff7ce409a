"""Plan: pools, sizes, grids for every unit; the planner's result and the launcher's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rillflow.planner.grid import Grid


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

    def pool(self, name: str) -> PlannedPool:
        """The pool of a name."""
        return next(pool for pool in self.pools if pool.name == name)
