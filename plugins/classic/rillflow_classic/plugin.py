"""Plugin: run recipes with ``kind = "classic"``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import Plugin

if TYPE_CHECKING:
    from rillflow.app.plugin_recipe import PluginRecipe
    from rillflow.config.load import Override
    from rillflow.config.schema import Data


def load(path: Path, data: Data, overrides: Sequence[Override]) -> PluginRecipe:
    """Check a recipe; see ``LoadPluginRecipe``."""
    from rillflow_classic.recipe import LoadedClassicRecipe

    return LoadedClassicRecipe.of(path, data, overrides)


PLUGIN = Plugin(recipes={"classic": load})
