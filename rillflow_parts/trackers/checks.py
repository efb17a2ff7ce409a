"""Tracker checks: find before the start what a tracker needs and this machine lacks.

A missing package or class stops the run. A missing key is a note, because the run directory has everything
and ``rillflow track`` sends it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.any_recipe import AnyRecipe
from rillflow.app.facts import RecipeFacts
from rillflow.app.plugin_sections import section_of
from rillflow.config.schema import Section
from rillflow.errors import ConfigError, install_package
from rillflow.rewards.function import parse_function
from rillflow_parts.trackers.config import CLASS, TrackersConfig
from rillflow_parts.trackers.wandb import FIX_KEY, NO_KEY, has_key

if TYPE_CHECKING:
    from rillflow.app.check_report import Report


def trackers_of(recipe: Section) -> TrackersConfig:
    """Return the trackers that a recipe names."""
    return section_of(recipe, "run.trackers", TrackersConfig) or TrackersConfig()


def look_at_trackers(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Check the trackers of a recipe; no code of theirs runs.

    Raises:
        RillflowError: a package, a file or a class is missing.
    """
    named = trackers_of(facts.recipe).named
    for name, settings in named.items():
        require_tracker(name, settings, facts.base)
        if name == "wandb" and settings["mode"] == "online" and not has_key():
            report.notes.append(f"{NO_KEY}, so nothing is sent: {FIX_KEY}")
    if named:
        report.say("trackers", [", ".join(named)])


def require_tracker(name: str, settings: Mapping[str, object], base: Path) -> None:
    """Refuse a tracker whose package or class is missing.

    Args:
        name: its name in the recipe.
        settings: its settings.
        base: folder that the file of a class is relative to.
    """
    if CLASS in settings:
        parse_function(str(settings[CLASS]), base, f"class of the tracker {name!r}")
    elif find_spec(name) is None:
        raise ConfigError(
            f"{name} is not installed",
            why=f"[run.trackers.{name}] needs it",
            fix=install_package(name),
        )
