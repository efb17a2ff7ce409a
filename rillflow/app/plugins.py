"""Plugins: find what is installed beside the core, and what each plugin brings.

    entry points of group "rillflow.plugins" ─ discovered ─┬─> installed: Plugin by name
                                                           └─> broken: the error of each that cannot be loaded
    installed ─ brought(SEAM) ─> one thing by name: a command, a section, an engine, a scorer, ...
                      └─ no such name ─> absent: the plugin that ships it, with its install line or its error

A plugin is a distribution of its own, or a part: a package that ships with the core and that the core never
imports. The core's own commands never need a plugin that is broken.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rillflow.errors import ConfigError, RillflowError, install_package, install_plugin, nearest
from rillflow.runs.error_lines import PLUGIN_GROUP, innermost_line

if TYPE_CHECKING:
    from rillflow.app.any_recipe import AnyRecipe
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.plugin_recipe import PluginRecipe
    from rillflow.app.resolved import Resolved
    from rillflow.config.load import Override
    from rillflow.config.schema import Data
    from rillflow.controller.schedules.schedule import Schedule
    from rillflow.controller.step_executor import StepCalls
    from rillflow.rewards.config import RewardConfig
    from rillflow.rewards.function import FunctionPath
    from rillflow.runs.observers import ObservedRun, Observer
    from rillflow.sharding.codec import EdgeCodecs

T = TypeVar("T")
SHIPPED: Mapping[str, Mapping[str, str]] = {
    "planner": {
        "plan": "choose devices and parallel sizes for every model, and predict the seconds of a step",
        "simulate": "simulate a plan event by event: step time, idle time and its causes, age of rows",
        "calibrate": "fit a cluster's factors to a run, so that predictions match its measured seconds",
    },
    "merging": {"merge": "merge several models into one, by averages, task vectors or optimal transport"},
    "service": {},
    "training_service": {},
    "links": {
        "links": "measure the links between the ranks of a recipe, for links.link_seconds",
        "merge-sides": "merge what several runs learn on machines of their own into one model",
        "join": "sample rows of a run on another network, with weights as exact differences",
        "bridge": "carry a run's rows and weights through a folder or object store, where no port opens",
    },
    "classic": {
        "play": "play episodes with the policy of a classic run, and film one",
        "export": "write the policy of a classic run as a file for torch.export or ONNX",
    },
}
"""The plugins of this project by name, and the help of their commands."""
PARTS: Mapping[str, Mapping[str, str]] = {
    "adapters": {"merge-adapter": "merge an adapter into the weights of its base and write a whole model"},
    "answers": {
        "ask": "answer prompts with the trained model of a run",
        "evaluate": "score a model's answers to held-out prompts, or compare them with another model's",
    },
    "doctor": {"doctor": "check this machine for problems that would stop or slow down a run"},
    "endpoint": {"serve": "serve a model, or a run's newest checkpoint, over OpenAI's protocol"},
    "fusion": {},
    "memory": {},
    "nodes": {},
    "replay": {
        "verify": "compare everything in a run directory with the digests that the run wrote",
        "replay": "re-run recorded steps of a run, or a skipped update, and name the first different value",
    },
    "report": {
        "report": "write the report of a run again",
        "timeline": "show how long a run's ranks waited and for which stage; write the steps as a trace",
    },
    "scorers": {},
    "sweeps": {"sweep": "run a recipe over seeds and a small grid of settings, and rank the cases"},
    "watch": {"watch": "serve a local page of runs: curves, rollouts, settings"},
    "trackers": {"track": "send a run to Weights & Biases, TensorBoard, MLflow or a tracker of your own"},
    "vllm": {},
    "environments": {},
}
"""The parts that are installed with the package (``rillflow_parts``), and the help of their commands."""
PROVIDERS: Mapping[str, Mapping[str, str]] = {
    "recipes": {"classic": "classic"},
    "sections": {
        "run.trackers": "trackers",
        "links": "links",
        "rollout.service": "service",
        "rollout.agent": "endpoint",
        "rollout.environment": "environments",
    },
    "settings": {"placement.fused": "fusion"},
    "engines": {"vllm": "vllm", "service": "service"},
    "scorers": dict.fromkeys(("math-verify", "code-tests", "http:", "https:"), "scorers"),
    "services": {
        "planning": "planner",
        "training": "training_service",
        "answers": "answers",
        "nodes": "nodes",
        "peaks": "memory",
        "replay": "replay",
        "reports": "report",
        "reward.judge": "scorers",
    },
}
"""Shipped plugin or part of each name, by seam: where a missing name comes from."""
KIND = "kind"
"""Key of a recipe that a plugin runs."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the command line."""

    help: str
    """One line of ``rillflow --help``."""
    run: Callable[[argparse.Namespace], int]
    """Function of the command; returns the exit code."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Function that adds the command's arguments to its parser."""
    last: str = ""
    """Optional last argument, which the parser leaves over if options precede it."""
    ignores_unknown: bool = False
    """Whether the parser ignores unknown arguments instead of refusing them."""
    outlives_output: bool = False
    """Whether the command goes on when its output cannot be written, because it does more than print."""


LoadPluginRecipe = Callable[["Path", "Data", "Sequence[Override]"], "PluginRecipe"]
"""Checks a recipe: its file, the file's data, and the settings to change."""


@dataclass(frozen=True, kw_only=True)
class EngineSource:
    """A rollout engine that a plugin brings."""

    path: str
    """``package.module:Class`` with the methods of ``rollout/engine.py``; a rank imports it."""
    options: str | None = None
    """``package.module:function``, called on the rank with its ``RoleSetting``; returns further arguments of
    the class by name."""
    reads: tuple[str, ...] = ()
    """Settings, or sections, that have no effect with another engine."""
    holds_cache: bool = True
    """Whether it keeps keys and values in the memory of the rank."""
    look: Callable[[RecipeFacts], Iterable[str]] | None = None
    """Checks a recipe that names the engine: returns notes, raises a ConfigError."""


@dataclass(frozen=True, kw_only=True)
class RowColumn:
    """A column that a plugin adds to every row that the sampler returns."""

    path: str
    """``package.module:function``, called on the sampler's rank with its ``RoleSetting`` and a batch of ended
    rows; returns a value of JSON for each row."""
    example: object
    """Value with which ``check`` tries reward functions."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Everything that a distribution adds. Names are unique over all plugins and the core."""

    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands by name."""
    recipes: Mapping[str, LoadPluginRecipe] = field(default_factory=dict)
    """Loads recipes of other kinds, by the ``kind`` that their first line names."""
    schedules: Mapping[str, type[Schedule]] = field(default_factory=dict)
    """Orders of a phase's steps, by the ``mode`` that ``[schedule]`` names."""
    uses: Mapping[str, str] = field(default_factory=dict)
    """What can be done with a run of these kinds, for commands that are for language models. Its ``RUN``
    stands for the run directory."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Settings by the dotted key of their section, such as ``run.trackers``: ``package.module:Class`` of a
    ``Section``. One whose keys all have defaults is always there; another is None until a recipe has it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Single settings of the core's sections, by dotted key, such as ``placement.spare``:
    ``package.module:Class`` of a class that derives from the section's and adds them, with defaults."""
    may_change: Sequence[str] = ()
    """Keys, or groups of keys, of these sections and settings that a resumed run may change."""
    look: Callable[[RecipeFacts | AnyRecipe, Report], None] | None = None
    """Check before a run: reads files and machines, adds lines, notes and problems to the report. A recipe of
    another kind comes without facts."""
    needs: Callable[[Resolved], Iterable[ConfigError]] | None = None
    """Yields contradictions between settings; reads nothing else."""
    observers: Callable[[ObservedRun], Sequence[Observer]] | None = None
    """Returns what watches a run; empty for none."""
    calls: Callable[[Resolved, Collection[str], Callable[[str], None]], StepCalls | None] | None = None
    """Returns what submits the calls of a phase's steps, to run several calls as one; None: nothing special.
    Gets the recipe, the roles that the phase trains, and a function that shows a note to the user."""
    engines: Mapping[str, EngineSource] = field(default_factory=dict)
    """Rollout engines by their names in ``rollout.engine``."""
    scorers: Mapping[str, Callable[[str, RewardConfig], FunctionPath]] = field(default_factory=dict)
    """Reward functions by their names in ``reward.function`` and ``reward.functions``, or by a scheme such as
    ``grpc:``. Each gets the recipe's text and the section ``reward``, and runs nothing."""
    writers: Mapping[str, str] = field(default_factory=dict)
    """What writes rows in turns with the policy: ``package.module:Class`` of a ``RowWriter``, by the key of
    the section that turns it on; the section is absent until a recipe has it."""
    columns: Mapping[str, RowColumn] = field(default_factory=dict)
    """Further columns of every row that the policy samples, by name."""
    codecs: Callable[[Resolved], EdgeCodecs] | None = None
    """Returns the codecs of a recipe's edges (``sharding/codec.py``), which ranks receive."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """What the part ``environments`` takes, an ``EnvironmentAdapter`` to a library of environments, by the
    scheme of a source, such as ``verifiers:``."""
    services: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Capabilities that a command or an option asks for by name; each makes an object of the protocol that
    the asking module defines, and may import heavy modules."""


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The plugins of this environment."""

    plugins: Mapping[str, Plugin]
    """Those that were loaded, by the name of their entry point."""
    broken: Mapping[str, ConfigError]
    """Errors of the others."""


@cache
def discovered() -> Discovery:
    """Load every plugin of this environment, the parts first; one that fails does not stop the others."""
    plugins, broken = dict[str, Plugin](), dict[str, ConfigError]()
    for point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: point.name not in PARTS):
        try:
            plugin = _loaded(point)
        except ConfigError as error:
            broken[point.name] = error
            continue
        if plugin is not None and point.name in plugins:
            broken[point.name] = ConfigError(
                f"two plugins have the name {point.name}; one is {point.value}",
                why="what a plugin brings is found by the plugin's name",
                fix=_reinstall(point),
            )
        elif plugin is not None:
            plugins[point.name] = plugin
    return Discovery(plugins=plugins, broken=broken)


def installed() -> Mapping[str, Plugin]:
    """Return every plugin that can be loaded, by the name of its entry point."""
    return discovered().plugins


def _loaded(point: EntryPoint) -> Plugin | None:
    """Load a plugin; None if its package is gone, such as the deleted folder of an editable install.

    Raises:
        ConfigError: its module raises, or names no Plugin.
    """
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{point.module}.".startswith(f"{error.name}."):
            return None
        is_import = isinstance(error, ImportError | AttributeError | RillflowError)
        raise ConfigError(
            f"the plugin {point.name} ({point.value}) cannot be loaded",
            why=str(error) if is_import else f"{type(error).__name__}: {error} ({innermost_line(error)})",
            fix=_reinstall(point),
        ) from error
    if not isinstance(plugin, Plugin):
        raise ConfigError(
            f"the plugin {point.name} ({point.value}) is not a Plugin",
            why=f"its type is {type(plugin).__name__}",
            fix="name a rillflow.app.plugins.Plugin in its entry point",
        )
    return plugin


def brought(
    seam: Callable[[Plugin], Mapping[str, T]], what: str, taken: Collection[str] = ()
) -> dict[str, T]:
    """Return what all plugins bring through one seam, by name.

    Args:
        seam: returns the seam's field of a plugin.
        what: the thing in errors, such as ``command``.
        taken: names of the core.

    Raises:
        ConfigError: a name is the core's, or two plugins bring it.
    """
    every: dict[str, T] = {}
    owners = dict.fromkeys(taken, "")
    for plugin, each in installed().items():
        for name, value in seam(each).items():
            if name in owners:
                owner = owners[name]
                raise ConfigError(
                    f"the plugin {plugin} adds the {what} {name}",
                    why=f"{f'the plugin {owner}' if owner else 'the core'} already has this name",
                    fix=f"pip uninstall {f'one of them: {owner}, ' if owner else ''}{plugin}",
                )
            every[name], owners[name] = value, plugin
    return every


def imported(path: str, what: str) -> Any:
    """Return what ``package.module:name`` of a plugin names.

    Args:
        path: the module and the name in it.
        what: what it is, in errors.

    Raises:
        ConfigError: its module raises, or has no such name.
    """
    module, _, name = path.partition(":")
    try:
        return vars(import_module(module))[name]
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error} ({innermost_line(error)})"
        raise ConfigError(
            f"{what} ({path}) cannot be imported", why=why, fix="update or uninstall the plugin"
        ) from error


def absent(seam: str, name: str, needed_by: str) -> ConfigError | None:
    """Return why a name of a seam is not there; None if no shipped or broken plugin may bring it.

    Args:
        seam: a key of ``PROVIDERS``.
        name: the name.
        needed_by: the option, setting or command that needs it.
    """
    plugin = PROVIDERS.get(seam, {}).get(name)
    broken = discovered().broken
    if plugin is not None:
        return broken[plugin] if plugin in broken else missing(needed_by, plugin)
    return next(iter(broken.values()), None)


def service(name: str, needed_by: str) -> Any:
    """Return an object of a capability that a plugin brings, such as ``planning``.

    Args:
        name: name of the capability.
        needed_by: the option or command that needs it, for the error.

    Raises:
        ConfigError: no installed plugin has it.
    """
    make = brought(lambda plugin: plugin.services, "service").get(name)
    if make is None:
        raise absent("services", name, needed_by) or ConfigError(
            f"{needed_by} needs {name}", why="no installed plugin brings it", fix="install a plugin that does"
        )
    return make()


def recipe_loader(kind: object, recipe: Path) -> LoadPluginRecipe:
    """Return the function that loads recipes of a kind.

    Args:
        kind: the recipe's ``kind``.
        recipe: the recipe's file, for errors.

    Raises:
        ConfigError: no plugin has this kind, or its plugin is not installed.
    """
    known = brought(lambda plugin: plugin.recipes, "kind of recipes")
    if isinstance(kind, str) and kind in known:
        return known[kind]
    shipped = PROVIDERS["recipes"]
    error = absent("recipes", str(kind), f"{recipe}, a recipe of the kind {kind!r},")
    if error is not None:
        raise error
    kinds = sorted({*known, *shipped})
    raise ConfigError(
        f"{recipe}: kind is {kind!r}",
        why=f"the kinds are {', '.join(kinds)}; a recipe of a language model has no kind",
        fix=nearest(str(kind), kinds),
    )


def other_kind(what: object, kind: object, is_run: bool = True) -> ConfigError:
    """Return the error of a command for language models that was given another kind of recipe or run.

    Args:
        what: the recipe's file, or the run directory.
        kind: its kind.
        is_run: whether it is a run directory.
    """
    uses = {name: text for each in installed().values() for name, text in each.uses.items()}
    fix = "rillflow run, check, graph, sweep and the commands that read a run directory accept every kind"
    shipped = PROVIDERS["recipes"]
    if is_run and isinstance(kind, str) and kind in uses:
        fix = uses[kind].replace("RUN", str(what))
    elif is_run and isinstance(kind, str) and kind in shipped:
        fix = f"install its plugin: {_install(shipped[kind])}"
    return ConfigError(
        f"{what} trains no language model",
        why=f"its kind is {kind!r}, and this command is for language models",
        fix=fix,
    )


def missing(what: str, plugin: str) -> ConfigError:
    """Return the error for a command, option or setting of a plugin that is not installed."""
    return ConfigError(
        f"{what} needs the {_sort(plugin)} {plugin}", why="it is not installed", fix=_install(plugin)
    )


def _sort(name: str) -> str:
    return "part" if name in PARTS else "plugin"


def _install(name: str) -> str:
    """Return the command that installs a plugin, or Rillflow with its parts."""
    return install_package() if name in PARTS else install_plugin(name)


def _reinstall(point: EntryPoint) -> str:
    """Return what repairs an installed plugin: of this project, or a distribution of somebody else."""
    if point.name in {*SHIPPED, *PARTS}:
        return f"install it again: {_install(point.name)}"
    name = point.dist.name if point.dist is not None else point.name
    return f"install it again from where it came, or pip uninstall {name}"


def commands(taken: Collection[str] = ()) -> Mapping[str, Command]:
    """Return the commands of all plugins; one of a shipped plugin that is not there raises its error.

    Args:
        taken: names of commands that no plugin may add.

    Raises:
        ConfigError: two commands have one name.
    """
    known, broken = brought(lambda plugin: plugin.commands, "command", taken), discovered().broken
    refused = {
        name: _missing_command(name, told, plugin, broken.get(plugin))
        for plugin, names in {**PARTS, **SHIPPED}.items()
        for name, told in names.items()
        if name not in known
    }
    return known | refused


def part_command(name: str) -> Command | None:
    """Return a command of a part, without loading any other part or plugin; None for other commands."""
    part = next((part for part, names in PARTS.items() if name in names), None)
    if part is None:
        return None
    points = entry_points(group=PLUGIN_GROUP, name=part)
    error: ConfigError | None = None
    try:
        plugin = next(
            (_loaded(point) for point in points if point.module.startswith("rillflow_parts.")), None
        )
    except ConfigError as broken:
        plugin, error = None, broken
    return plugin.commands[name] if plugin else _missing_command(name, PARTS[part][name], part, error)


def require_no_broken(command: str) -> None:
    """Raise the error of a plugin that cannot be loaded, if a command that nobody brings may be its own."""
    for error in discovered().broken.values():
        raise ConfigError(
            f"rillflow has no command {command!r}, and {error.what}", why=error.why, fix=error.fix
        )


def _missing_command(name: str, told: str, plugin: str, broken: ConfigError | None) -> Command:
    """Return the command of a plugin or part that is not there; it raises the error that says so."""

    def refuse(arguments: argparse.Namespace) -> int:
        del arguments
        raise broken or missing(f"rillflow {name}", plugin)

    note = f"({_sort(plugin)} {plugin}: {'not installed' if broken is None else 'broken'})"
    return Command(help=f"{told} {note}", run=refuse, add_arguments=lambda _: None, ignores_unknown=True)
