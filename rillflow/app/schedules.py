"""Schedules: the orders of steps that a recipe may name, and what an order tells updates and engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rillflow.algorithms.config import SampledConfig
from rillflow.app.plugins import brought
from rillflow.config.schema import Section, tags
from rillflow.controller.schedules.registry import SCHEDULES
from rillflow.controller.schedules.schedule import Schedule
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.app.sections import Recipe


def added_schedules() -> Mapping[str, type[Schedule]]:
    """Return the schedules that plugins bring, by ``mode``.

    Raises:
        ConfigError: two have one name, or a name is not the ``mode`` of its class.
    """
    added = brought(lambda plugin: plugin.schedules, "schedule", SCHEDULES)
    for mode, schedule in added.items():
        names = tags(schedule, "mode")
        if mode not in names:
            raise ConfigError(
                f"a plugin adds the schedule {mode}",
                why=f"the mode of {schedule.__name__} is {', '.join(names) or 'not a name'}",
                fix=f'write mode: Literal["{mode}"] = "{mode}" in the class',
            )
    return added


def with_schedule(recipe: Recipe) -> Recipe:
    """Return the recipe whose updates and engine know the bound and the caches of its schedule."""
    config, schedule = recipe.algorithm, recipe.schedule
    update: dict[str, Section] = {}
    if isinstance(config, SampledConfig):
        update["algorithm"] = config.with_freshness(schedule.lag)
    update["rollout"] = recipe.rollout.with_kept_cache(schedule.keeps_cache)
    return recipe.model_copy(update=update)
