"""Plugin: run recipes with ``kind = "classic"``, and use their policies. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import SHIPPED, Command, Plugin
from rillflow_classic import commands

if TYPE_CHECKING:
    from rillflow.app.plugin_recipe import PluginRecipe
    from rillflow.config.load import Override
    from rillflow.config.schema import Data


def load(path: Path, data: Data, overrides: Sequence[Override]) -> PluginRecipe:
    """Check a recipe; see ``LoadPluginRecipe``."""
    from rillflow_classic.recipe import LoadedClassicRecipe

    return LoadedClassicRecipe.of(path, data, overrides)


HELP = SHIPPED["classic"]
PLUGIN = Plugin(
    commands={
        "play": Command(help=HELP["play"], run=commands.play, add_arguments=commands.play_arguments),
        "export": Command(help=HELP["export"], run=commands.export, add_arguments=commands.export_arguments),
    },
    recipes={"classic": load},
    uses={
        "classic": "rillflow play RUN plays episodes and prints their returns, rillflow export RUN writes "
        "the policy to a file; in Python, rillflow_classic.load('RUN').act(observation) acts with it"
    },
)
