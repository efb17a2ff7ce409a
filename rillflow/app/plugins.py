"""Plugins: separate distributions that add commands and predictions to Rillflow.

    entry points of group "rillflow.plugins" ─> Plugin ─┬─ commands of the command line
                                                        ├─ recipes of other kinds: run, check, graph
                                                        ├─ Planning: predictions for a run and its report
                                                        └─ TrainingServer: the service of serve --train

The package never imports a plugin by name. The command of a shipped plugin that is not installed raises an
error with the line that installs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rillflow.errors import ConfigError, nearest
from rillflow.runs.error_lines import PLUGIN_GROUP

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm
    from rillflow.app.plugin_recipe import PluginRecipe
    from rillflow.app.recipe import LoadedRecipe
    from rillflow.config.load import Override
    from rillflow.config.schema import Data
    from rillflow.placement.plan import Plan
    from rillflow.runs.report.measured import Predict

SHIPPED: Mapping[str, Mapping[str, str]] = {
    "planner": {
        "plan": "choose devices and parallel sizes for every model, and predict the seconds of a step",
        "simulate": "simulate a plan event by event: step time, idle time and its causes, age of rows",
        "calibrate": "fit a cluster's factors to a run, so that predictions match its measured seconds",
    },
    "merging": {"merge": "merge several models into one, by averages, task vectors or optimal transport"},
    "service": {},
    "training_service": {},
    "classic": {},
}
"""The plugins of this project by name, and the help of their commands."""
KINDS = {"classic": "classic"}
"""Kinds of recipes that these plugins run, and the plugin of each."""
EXTRAS = ("classic",)
"""Plugins that are also extras of the package itself."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the command line."""

    help: str
    """One line of ``rillflow --help``."""
    run: Callable[[argparse.Namespace], int]
    """Function of the command; returns the exit code."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Function that adds the command's arguments to its parser."""
    ignores_unknown: bool = False
    """Whether the parser ignores unknown arguments instead of refusing them."""
    outlives_output: bool = False
    """Whether the command goes on when its output cannot be written, because it does more than print."""


class Planning(Protocol):
    """Predictions of a planner."""

    def predict_placement(
        self, loaded: LoadedRecipe, cluster: Path, lengths: Path | None, say: Callable[[str], None]
    ) -> Plan:
        """Return a recipe's own placement on a cluster with predicted seconds, for ``run --cluster``."""
        ...

    def predict_steps(self, algorithms: Sequence[Algorithm]) -> Predict:
        """Return the function that simulates steps of a run, for its report and timeline."""
        ...


LoadPluginRecipe = Callable[["Path", "Data", "Sequence[Override]"], "PluginRecipe"]
"""Checks a recipe: its file, the file's data, and the settings to change."""


class TrainingServer(Protocol):
    """A service whose clients train."""

    def serve(
        self,
        source: Path,
        *,
        port: int,
        token_file: Path | None,
        max_rows: int,
        checkpoints: Path | None,
        announce: Callable[[str], None],
    ) -> None:
        """Serve a model to training clients until a signal ends it, for ``serve --train``.

        Args:
            source: a model's directory.
            port: port on the loopback device; 0 for a free one.
            token_file: file of the token that requests carry; made if it is missing.
            max_rows: rows that are sampled at once.
            checkpoints: directory of the clients' checkpoints; None for the service's own choice.
            announce: receives lines about the address and the token.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Commands, predictions and services that a distribution adds."""

    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands by name."""
    planning: Callable[[], Planning] | None = None
    """Returns the planner; it may import heavy modules."""
    training: Callable[[], TrainingServer] | None = None
    """Returns the service whose clients train."""
    recipes: Mapping[str, LoadPluginRecipe] = field(default_factory=dict)
    """Loads recipes of other kinds, by the ``kind`` that their first line names."""


@cache
def installed() -> Mapping[str, Plugin]:
    """Return every installed plugin by the name of its entry point.

    Raises:
        ConfigError: a plugin is installed and cannot be loaded.
    """
    found = {point.name: _loaded(point) for point in entry_points(group=PLUGIN_GROUP)}
    return {name: plugin for name, plugin in found.items() if plugin is not None}


def _loaded(point: EntryPoint) -> Plugin | None:
    """Load a plugin; None if its module is gone, such as the deleted folder of an editable install."""
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == point.module.partition(".")[0]:
            return None
        raise ConfigError(
            f"the plugin {point.name} ({point.value}) cannot be loaded",
            why=str(error),
            fix=f"install it again: {install_line(point.name)}",
        ) from error
    if not isinstance(found, Plugin):
        raise ConfigError(
            f"the plugin {point.name} ({point.value}) is not a Plugin",
            why=f"its type is {type(found).__name__}",
            fix="name a rillflow.app.plugins.Plugin in its entry point",
        )
    return found


def planning(needed_by: str) -> Planning:
    """Return the installed planner.

    Args:
        needed_by: the option or command that needs it, for the error.

    Raises:
        ConfigError: no planner is installed.
    """
    found = _installed_planning()
    if found is None:
        raise missing(needed_by, "planner")
    return found


def training(needed_by: str) -> TrainingServer:
    """Return the installed training service.

    Args:
        needed_by: the option that needs it, for the error.

    Raises:
        ConfigError: no training service is installed.
    """
    made = next((each.training for each in installed().values() if each.training), None)
    if made is None:
        raise missing(needed_by, "training_service")
    return made()


def recipe_loader(kind: object, recipe: Path) -> LoadPluginRecipe:
    """Return the function that loads recipes of a kind.

    Args:
        kind: the recipe's ``kind``.
        recipe: the recipe's file, for errors.

    Raises:
        ConfigError: no plugin has this kind, or its plugin is not installed.
    """
    known = {name: load for each in installed().values() for name, load in each.recipes.items()}
    if isinstance(kind, str) and kind in known:
        return known[kind]
    if isinstance(kind, str) and kind in KINDS:
        raise missing(f"{recipe}, a recipe of the kind {kind!r},", KINDS[kind])
    kinds = sorted({*known, *KINDS})
    raise ConfigError(
        f"{recipe}: kind is {kind!r}",
        why=f"the kinds are {', '.join(kinds)}; a recipe of a language model has no kind",
        fix=nearest(str(kind), kinds),
    )


def predict_steps(algorithms: Sequence[Algorithm] = ()) -> Predict | None:
    """Return the installed planner's simulation of a run's steps; None if no planner is installed.

    Args:
        algorithms: custom algorithms that the run's recipe may name.
    """
    planner = _installed_planning()
    return None if planner is None else planner.predict_steps(algorithms)


def _installed_planning() -> Planning | None:
    made = next((each.planning for each in installed().values() if each.planning), None)
    return None if made is None else made()


def missing(what: str, plugin: str) -> ConfigError:
    """Return the error for a command or option of a plugin that is not installed."""
    return ConfigError(
        f"{what} needs the plugin {plugin}", why="it is not installed", fix=install_line(plugin)
    )


def install_line(plugin: str) -> str:
    """Return the command that installs a plugin."""
    named = f"'rillflow[{plugin}]'" if plugin in EXTRAS else f"rillflow-{plugin}"
    return f"pip install {named}   (in a clone: pip install ./plugins/{plugin})"


def commands(taken: Collection[str] = ()) -> Mapping[str, Command]:
    """Return the commands of all plugins; one of a shipped plugin that is not installed raises its error.

    Args:
        taken: names of commands that no plugin may add.

    Raises:
        ConfigError: two commands have one name, or a plugin cannot be loaded.
    """
    found: dict[str, Command] = {}
    for plugin, each in installed().items():
        for name, command in each.commands.items():
            if name in found or name in taken:
                raise ConfigError(
                    f"the plugin {plugin} adds the command {name}",
                    why="another command already has this name",
                    fix=f"pip uninstall one of them: {', '.join(installed())}",
                )
            found[name] = command
    missing_commands = {
        name: Command(
            help=f"{told} (plugin {plugin}: not installed)",
            run=_refusal(name, plugin),
            add_arguments=lambda _: None,
            ignores_unknown=True,
        )
        for plugin, names in SHIPPED.items()
        for name, told in names.items()
        if name not in found
    }
    return found | missing_commands


def _refusal(name: str, plugin: str) -> Callable[[argparse.Namespace], int]:
    def refuse(arguments: argparse.Namespace) -> int:
        del arguments
        raise missing(f"rillflow {name}", plugin)

    return refuse
