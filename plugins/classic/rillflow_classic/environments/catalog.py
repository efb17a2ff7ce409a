"""Catalog: what an environment's id names, and who provides it.

"CartPole-v1", "Pong-v5" ─────────> EnvPool, or Gymnasium where EnvPool lacks it or the recipe says so
"MultiAgentCartPole-v0" ──────────> an environment of this package
"game.py:Game", "package:Class" ──> a class: gymnasium.Env, or PettingZoo's parallel form
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium

from rillflow.errors import ConfigError, RewardError, nearest
from rillflow.rewards.function import parse_function
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.envpool_adapter import envpool_ids
from rillflow_classic.environments.lanes import GymnasiumLane, Lane, ParallelLane

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
    """``gymnasium``, ``envpool`` or ``parallel``."""
    name: str
    """The provider's id."""
    make: Callable[..., Any] | None = None
    """Class or function that makes it; None for an id."""


def located(config: EnvironmentSettings, base: Path) -> EnvironmentSettings:
    """Return the settings with the file of a class as an absolute path, found below ``base``.

    Raises:
        ConfigError: the file is missing, or does not define the class.
    """
    if ".py:" not in config.id:
        return config
    try:
        path = parse_function(config.id, base, "environment")
    except RewardError as error:
        raise ConfigError(error.what, why=error.why, fix=error.fix) from None
    return config.model_copy(update={"id": f"{path.file}:{path.name}"})


def find(config: EnvironmentSettings) -> CatalogEntry:
    """Return what an id names.

    Raises:
        ConfigError: nothing has this id, or the chosen provider has not.
    """
    module, _, name = SHIPPED.get(config.id, config.id).rpartition(":")
    if module and name.isidentifier():
        make = _loaded(config, module, name)
        is_single = inspect.isclass(make) and issubclass(make, gymnasium.Env)
        auto = "gymnasium" if is_single else "parallel"
        return CatalogEntry(
            provider=auto if config.provider == "auto" else config.provider, name=name, make=make
        )
    known = {"parallel": frozenset(SHIPPED)}
    if config.provider in ("auto", "envpool"):
        known["envpool"] = envpool_ids()
        if (plain := config.id.removeprefix(ATARI)) in known["envpool"]:
            return CatalogEntry(provider="envpool", name=plain)
    if config.provider in ("auto", "gymnasium"):
        if module:
            _imported(config, module)  # "package:Id-v0": the package registers its ids
        known["gymnasium"] = gymnasium_ids()
        for each in (name, ATARI + name):
            if each in known["gymnasium"]:
                return CatalogEntry(provider="gymnasium", name=each)
    every = frozenset.union(*known.values()) if config.provider == "auto" else known[config.provider]
    spelled = {each.lower(): each for each in every}
    _, *close = nearest(config.id.lower(), spelled).split("'")
    raise ConfigError(
        f"environment.id is {config.id!r}",
        why="neither Gymnasium nor EnvPool nor ale-py has it"
        if config.provider == "auto"
        else f"environment.provider is {config.provider!r}, which has {len(every)} ids and not this one",
        fix=f"did you mean {spelled[close[0]]!r}?"
        if close
        else "name a registered id, or a class as file.py:Class; pip install 'rillflow[classic]' for EnvPool",
    )


def gymnasium_ids() -> frozenset[str]:
    """Return every id of Gymnasium, with ale-py's if it is installed."""
    if importlib.util.find_spec("ale_py") is not None:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    return frozenset(gymnasium.registry)


def _loaded(config: EnvironmentSettings, module: str, name: str) -> Callable[..., Any]:
    """Import a class or function from a file or a module."""
    names = _imported(config, module)
    if name in names and callable(names[name]):
        made: Callable[..., Any] = names[name]
        return made
    classes = [each for each, value in names.items() if inspect.isclass(value)]
    what, why = f"environment.id is {config.id!r}", f"{module} has no class {name!r}"
    raise ConfigError(what, why=why, fix=nearest(name, classes))


def _imported(config: EnvironmentSettings, module: str) -> dict[str, Any]:
    """Return the names of a file or a module."""
    what = f"environment.id is {config.id!r}"
    if config.provider == "envpool":
        why, fix = "EnvPool has environments of its own only", "leave out environment.provider"
        raise ConfigError(f"{what} and environment.provider is envpool", why=why, fix=fix)
    try:
        if module.endswith(".py") and module not in sys.modules:
            spec = importlib.util.spec_from_file_location(module, module)
            assert spec is not None and spec.loader is not None
            sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        return vars(importlib.import_module(module))
    except Exception as error:  # the user's file may raise anything
        sys.modules.pop(module, None)
        raise ConfigError(
            f"{what}, and {module} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            fix="correct the name or the file, or install the package",
        ) from error


def make_lane(config: EnvironmentSettings, entry: CatalogEntry, *, shows: bool = False) -> Lane:
    """Make one environment that is not EnvPool's.

    Raises:
        ConfigError: it cannot be made.
    """
    arguments = dict(config.arguments)
    try:
        if entry.make is None:
            made = _registered(config, entry.name, arguments, shows=shows)
            return GymnasiumLane(made, entry.name, shows=shows)
        if shows and "render_mode" in inspect.signature(entry.make).parameters:
            arguments.setdefault("render_mode", "rgb_array")
        made = entry.make(**arguments)
        if entry.provider == "parallel":
            return ParallelLane(made, entry.name, time_limit=config.time_limit, shows=shows)
        if config.time_limit is not None:
            made = gymnasium.wrappers.TimeLimit(made, config.time_limit)
        return GymnasiumLane(made, entry.name, shows=shows)
    except ConfigError:
        raise
    except Exception as error:  # the user's class may raise anything
        is_missing = isinstance(error, gymnasium.error.DependencyNotInstalled | ImportError)
        raise ConfigError(
            f"the environment {config.id!r} cannot be made: {type(error).__name__}: {error}",
            why="a package that it needs is not installed"
            if is_missing
            else f"its arguments are {arguments}",
            fix="pip install 'rillflow-classic[mujoco]' for MuJoCo, or what the line above names"
            if is_missing
            else "correct environment.arguments or the class",
        ) from error


def _registered(
    config: EnvironmentSettings, name: str, arguments: dict[str, Any], *, shows: bool
) -> gymnasium.Env[Any, Any]:
    if shows:
        arguments["render_mode"] = "rgb_array"
        if "DISPLAY" not in os.environ and find_library("EGL"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it on import; its default needs a screen
    if not name.startswith(ATARI):
        limit = config.time_limit
        return gymnasium.make(name, max_episode_steps=limit, disable_env_checker=True, **arguments)
    skip = int(arguments.pop("frame_skip", 4))
    plain = gymnasium.make(name, **{"frameskip": 1, "repeat_action_probability": 0.0, **arguments})
    if config.time_limit is not None:
        plain = gymnasium.wrappers.TimeLimit(plain, config.time_limit * skip)
    return gymnasium.wrappers.AtariPreprocessing(plain, frame_skip=skip)
