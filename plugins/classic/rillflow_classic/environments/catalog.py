"""Catalog: what an environment's id names, and who provides it.

"CartPole-v1", "Pong-v5" ─────────> EnvPool, or Gymnasium where EnvPool lacks the id or an argument, or the
                                    recipe says so
"MultiAgentCartPole-v0" ──────────> a class of this package
"MinAtar/Breakout-v1" ────────────> a game of MinAtar
"game.py:Game", "package:Class" ──> a class: gymnasium.Env, or PettingZoo's parallel form
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Collection
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium

from rillflow.errors import ConfigError, install_plugin, nearest
from rillflow.runs.error_lines import own_line
from rillflow_classic import own_code
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.copies import Copies, names_copy, with_copy
from rillflow_classic.environments.envpool_adapter import envpool_arguments, envpool_ids
from rillflow_classic.environments.lanes import Lane
from rillflow_classic.environments.minatar_adapter import GAMES, minatar_game

SHIPPED = {
    "MultiAgentCartPole-v0": "rillflow_classic.environments.multi_agent_cartpole:MultiAgentCartPole",
    "PointNavigation-v0": "rillflow_classic.environments.point_navigation:PointNavigation",
}
"""Environments of this package."""
ATARI = "ALE/"
"""Beginning of ale-py's ids; EnvPool's lack it."""


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """An environment that a provider has."""

    provider: str
    """``gymnasium``, ``envpool``, or ``class``."""
    name: str
    """The provider's id, or the name of the class."""
    make: Callable[..., Any] | None = None
    """Class or function that makes it; None for an id."""


def located(config: EnvironmentSettings, base: Path) -> EnvironmentSettings:
    """Return the settings with the file of a class as an absolute path, found below ``base``.

    Raises:
        ConfigError: the file is missing, or does not define the class.
    """
    name = own_code.located(config.id, base, "environment")
    return config if name == config.id else config.model_copy(update={"id": name})


def find(config: EnvironmentSettings) -> CatalogEntry:
    """Return what an id names.

    Raises:
        ConfigError: nothing has this id, or the chosen provider has not.
    """
    module, _, name = SHIPPED.get(config.id, config.id).rpartition(":")
    names = _names(config, module) if module else {}  # "package:Id-v0": the package registers its ids
    if module and name.isidentifier() and config.provider != "envpool":
        if not callable(make := names.get(name)):
            classes = [each for each, value in names.items() if inspect.isclass(value)]
            what, why = f"environment.id is {config.id!r}", f"{module} has no class {name!r}"
            raise ConfigError(what, why=why, fix=nearest(name, classes))
        return CatalogEntry(provider="class", name=name, make=make)
    known = {}
    if config.provider != "envpool":
        known = dict.fromkeys((*SHIPPED, *GAMES, *gymnasium_ids()), "gymnasium")
    if config.provider != "gymnasium" and not module:
        known |= dict.fromkeys(envpool_ids(), "envpool")
    plain = name.removeprefix(ATARI)
    for each in (plain, name, ATARI + plain):
        if each in known:
            provider = "gymnasium" if _has_gymnasium_arguments(config, each) else known[each]
            return CatalogEntry(provider=provider, name=each, make=minatar_game(each))
    raise _unknown(config, known, module)


def _has_gymnasium_arguments(config: EnvironmentSettings, name: str) -> bool:
    """Return whether an id that both providers have is given arguments that EnvPool lacks, as is_slippery."""
    if config.provider != "auto" or not config.arguments:
        return False
    is_in_both = name in envpool_ids() and name in gymnasium_ids()
    return is_in_both and not config.arguments.keys() <= envpool_arguments(name)


def _unknown(config: EnvironmentSettings, known: Collection[str], module: str) -> ConfigError:
    """Return the error for an id that is none of the known ones."""
    spelled = {each.lower(): each for each in known}
    close = difflib.get_close_matches(config.id.lower(), spelled, n=1)
    owner = {"auto": "Gymnasium and EnvPool", "gymnasium": "Gymnasium", "envpool": "EnvPool"}[config.provider]
    why, fix = f"it is none of the {len(known)} ids of {owner}", "write a registered id or file.py:Class"
    if config.provider == "envpool" and module:
        why, fix = "environment.provider is 'envpool', and EnvPool runs no classes", "leave out the provider"
    elif close:
        fix = f"did you mean {spelled[close[0]]!r}?"
    elif not envpool_ids() and config.provider != "gymnasium":
        why, fix = f"{why}; EnvPool is not installed", f"{fix}; on Linux, pip install envpool adds its ids"
    return ConfigError(f"environment.id is {config.id!r}", why=why, fix=fix)


def gymnasium_ids() -> frozenset[str]:
    """Return every id of Gymnasium, with ale-py's if it is installed."""
    if importlib.util.find_spec("ale_py") is not None:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    return frozenset(gymnasium.registry)


def _names(config: EnvironmentSettings, module: str) -> dict[str, Any]:
    """Return the names of a file or a module.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return own_code.imported(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        what, why = f"environment.id is {config.id!r}, and {module} cannot be imported", type(error).__name__
        fix = "correct the name or the file, or install the package"
        raise ConfigError(what, why=f"{why}: {error}", fix=fix) from error


def make_lanes(
    config: EnvironmentSettings, entry: CatalogEntry, copies: Copies, *, shows: bool = False
) -> list[Lane]:
    """Make environments that are not EnvPool's; if one cannot be made, close the others.

    Raises:
        ConfigError: one cannot be made.
    """
    lanes = list[Lane]()
    try:
        for copy in range(copies.first, copies.first + copies.count):
            lanes.append(make_lane(config, entry, copy, shows=shows, most_steps=copies.most_steps))
    except BaseException:
        for lane in lanes:
            lane.close()
        raise
    return lanes


def make_lane(
    config: EnvironmentSettings,
    entry: CatalogEntry,
    copy: int = 0,
    *,
    shows: bool = False,
    most_steps: int = 0,
) -> Lane:
    """Make one environment that is not EnvPool's; if ``shows``, it renders frames where it can.

    Args:
        config: settings of the environment.
        entry: what the id names.
        copy: its number in the run.
        shows: whether it renders frames where it can.
        most_steps: see ``Copies``.

    Raises:
        ConfigError: it cannot be made.
    """
    arguments = with_copy(config.arguments, copy)
    if shows and (entry.make is None or "render_mode" in inspect.signature(entry.make).parameters):
        arguments["render_mode"] = "rgb_array"
    try:
        made = (
            entry.make(**arguments) if entry.make else _registered(entry.name, config.time_limit, arguments)
        )
    except (Exception, SystemExit) as error:  # the user's class may raise anything
        line, fix = own_line(error), "correct environment.arguments or the class"
        if entry.make is None:
            mujoco = install_plugin("classic", "mujoco")
            fix = f"correct environment.arguments, or install the missing package (MuJoCo: {mujoco})"
        elif copy and not names_copy(config.arguments):
            fix += f"; if copies share a port or a file, this one, number {copy}, gets its number by "
            fix += '"{copy}" in an argument, as in environment.arguments = {port = "{copy+5005}"}'
        raise ConfigError(
            f"the environment {config.id!r} cannot be made: {type(error).__name__}: {error}",
            why=f"environment.arguments are {arguments}" + (f"; raised at {line}" if line else ""),
            fix=fix,
        ) from error
    try:
        limit = Copies(1, copy, most_steps).limit(config.time_limit)
        return Lane(made, entry.name, limit, warns=copy == 0)
    except AttributeError as error:
        raise ConfigError(
            f"{config.id!r} is no environment: {error}",
            why="an environment derives from gymnasium.Env and sets observation_space and action_space, or "
            "has possible_agents and all methods of PettingZoo's ParallelEnv",
            fix="add what is missing; or derive the class from gymnasium.Env, or from pettingzoo.ParallelEnv "
            "for several agents",
        ) from error


def _registered(name: str, limit: int | None, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    if "render_mode" in arguments and "DISPLAY" not in os.environ and find_library("EGL"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it on import; its default needs a screen
    if not name.startswith(ATARI):
        return gymnasium.make(name, max_episode_steps=limit, disable_env_checker=True, **arguments)
    skip = int(arguments.pop("frame_skip", 4))
    arguments = {"frameskip": 1, "repeat_action_probability": 0.0, **arguments}
    plain = gymnasium.make(name, max_episode_steps=limit and limit * skip, **arguments)
    return gymnasium.wrappers.AtariPreprocessing(plain, frame_skip=skip)
