"""Schedule needs: what a recipe's order of steps contradicts, and the pools that it has by default.

    Resolved ─ schedule_needs ─> contradictions of the schedule (``controller.schedules``)
             └ default_pools, pool_notes, bound_notes

Trainer and sampler share this machine's CUDA devices evenly. Without a device, in one process and on a
cluster that is joined, each has one rank. A resumed run keeps the pools that it began with (``resume``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from rillflow.algorithms.config import SampledConfig
from rillflow.app.contradictions import Contradiction
from rillflow.app.resolved import Resolved
from rillflow.app.role_table import RoleSpec, Start
from rillflow.app.sections import Recipe
from rillflow.controller.schedules.schedule import ScheduledRecipe
from rillflow.workers.config import PlacementConfig

_SCORERS = ("reward", "cost")


def schedule_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield contradictions of settings with which the order of the steps cannot run."""
    recipe = resolved.recipe
    config, schedule = recipe.algorithm, recipe.schedule
    sampled = config if isinstance(config, SampledConfig) else None
    if sampled is None and schedule.needs_samples:
        yield Contradiction(
            f'schedule.mode is "{schedule.mode}", and {config.name} samples no rows',
            why="it is an order of rows that the policy samples",
            fix='set schedule.mode = "in_order"',
        )
        return
    beside = ScheduledRecipe(
        phase=config,
        sampled=sampled,
        rollout=recipe.rollout,
        writer=resolved.writer,
        placement=recipe.placement,
        samples_in_one_call=resolved.main.answers is not None,
        updates=len(resolved.main.heard.calls.get("policy.update", [])),
    )
    yield from map(Contradiction.of, schedule.contradictions(beside))


def default_pools(recipe: Recipe, roles: Mapping[str, RoleSpec]) -> PlacementConfig:
    """Return the pools of a recipe that names none, by its schedule."""
    functions = [role for role in _SCORERS if role in roles and roles[role].start is Start.FUNCTIONS]
    return recipe.schedule.pools(devices_for(recipe), functions) or recipe.placement


def devices_for(recipe: Recipe) -> int:
    """Return the number of CUDA devices for Ray ranks on this machine; 0 if ranks take none of them."""
    from rillflow.app.machine import cuda_devices

    placement = recipe.placement
    joined = placement.address or os.environ.get("RAY_ADDRESS") or "local"
    joined = "local" if placement.backend == "process" else joined
    takes = placement.backend != "inline" and joined == "local" and recipe.run.device in ("auto", "cuda")
    return (cuda_devices() or 0) if takes else 0


def pool_notes(resolved: Resolved) -> list[str]:
    """Return a note on each choice of pools that the recipe leaves open, and how to override it."""
    if not (resolved.is_open("placement.pools") and resolved.is_open("placement.roles")):
        return []
    return [*resolved.recipe.schedule.pool_notes(resolved.recipe.placement)]


def bound_notes(resolved: Resolved) -> list[str]:
    """Return a warning if the phase has so few steps that the bound never applies."""
    return [*resolved.recipe.schedule.bound_notes(resolved.recipe.algorithm)]
