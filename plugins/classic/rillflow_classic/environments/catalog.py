"""Catalog: what an environment's id names, and who provides it.

"CartPole-v1", "Pong-v5" ─────────> EnvPool, or Gymnasium where EnvPool lacks it or the recipe says so
"MultiAgentCartPole-v0" ──────────> a multi-agent environment of this package
"game.py:Game", "package:Class" ──> a class: gymnasium.Env, or PettingZoo's parallel form
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium

from rillflow.errors import ConfigError, RewardError, nearest
from rillflow.rewards.function import parse_function
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.envpool_adapter import envpool_ids
from rillflow_classic.environments.lanes import GymnasiumLane, Lane, ParallelLane

SHIPPED: Mapping[str, str] = {
    "MultiAgentCartPole-v0": "rillflow_classic.environments.multi_agent_cartpole:MultiAgentCartPole"
}
"""Multi-agent environments of this package."""
ATARI = "ALE/"
"""Beginning of ale-py's ids; EnvPool's lack it."""


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """An environment that a provider has."""

    provider: Literal["gymnasium", "envpool", "parallel"]
    """Who provides it."""
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
    name, _, attribute = SHIPPED.get(config.id, config.id).rpartition(":")
    if name and attribute.isidentifier():
        return _class_entry(config, name, attribute)
    if config.provider in ("auto", "envpool"):
        plain = config.id.removeprefix(ATARI)
        if plain in envpool_ids():
            return CatalogEntry(provider="envpool", name=plain)
    if config.provider in ("auto", "gymnasium"):
        known = _gymnasium_ids()
        for each in (config.id, ATARI + config.id):
            if each in known:
                return CatalogEntry(provider="gymnasium", name=each)
    raise _unknown(config, envpool_ids(), _gymnasium_ids())


def has_twin(name: str) -> bool:
    """Return whether Gymnasium has EnvPool's id with equal observations; Atari's are preprocessed."""
    return name in _gymnasium_ids()


def _unknown(config: EnvironmentSettings, pool: frozenset[str], gym: frozenset[str]) -> ConfigError:
    what = f"environment.id is {config.id!r}"
    if config.provider == "envpool" and not pool:
        return ConfigError(what, why="EnvPool is not installed", fix="pip install 'rillflow[classic]'")
    lists = {"envpool": pool, "gymnasium": gym, "parallel": frozenset(SHIPPED)}
    if config.provider == "auto":
        known, who = frozenset.union(*lists.values()), "neither Gymnasium nor EnvPool nor ale-py has it"
    else:
        known, who = lists[config.provider], f"environment.provider is {config.provider}, which lacks it"
    spelled = {each.lower(): each for each in known}
    fix = nearest(config.id.lower(), spelled)
    if not fix.startswith("did"):
        return ConfigError(what, why=who, fix="name a registered id, or a class as file.py:Class")
    return ConfigError(what, why=who, fix=f"did you mean {spelled[fix.split(chr(39))[1]]!r}?")


def _gymnasium_ids() -> frozenset[str]:
    if importlib.util.find_spec("ale_py") is not None:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    return frozenset(gymnasium.registry)


def _class_entry(config: EnvironmentSettings, module: str, attribute: str) -> CatalogEntry:
    if config.provider == "envpool":
        raise ConfigError(
            f"environment.id is {config.id!r} and environment.provider is envpool",
            why="EnvPool has environments of its own only",
            fix='leave out environment.provider, or set it to "gymnasium" or "parallel"',
        )
    try:
        loaded = _loaded(module) if module.endswith(".py") else importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"environment.id is {config.id!r}, and {error.name or module} cannot be imported",
            why=str(error),
            fix="install the package, or correct the module's name",
        ) from error
    names = vars(loaded)
    if attribute not in names or not callable(names[attribute]):
        raise ConfigError(
            f"environment.id is {config.id!r}",
            why=f"{module} has no class {attribute!r}",
            fix=nearest(attribute, [name for name, value in names.items() if inspect.isclass(value)]),
        )
    make = names[attribute]
    is_single = inspect.isclass(make) and issubclass(make, gymnasium.Env)
    provider = config.provider if config.provider != "auto" else ("gymnasium" if is_single else "parallel")
    return CatalogEntry(provider=provider, name=attribute, make=make)


def _loaded(file: str) -> Any:
    """Import a file as a module, once."""
    name = f"environment_of_{Path(file).stem}_{abs(hash(file))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None or not Path(file).exists():
            raise ConfigError(f"{file} cannot be loaded", why="it is no Python file that exists")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def make_lane(config: EnvironmentSettings, entry: CatalogEntry, slot: int = 0, *, show: bool = False) -> Lane:
    """Make one environment.

    Args:
        config: its settings.
        entry: what its id names; no EnvPool.
        slot: its first slot, for errors.
        show: whether it can render frames.

    Raises:
        ConfigError: it cannot be made.
    """
    arguments = dict(config.arguments)
    try:
        if entry.make is None:
            made = _registered(config, entry.name, arguments, show=show)
            return GymnasiumLane(made, entry.name, slot, shows=show)
        if show and "render_mode" in inspect.signature(entry.make).parameters:
            arguments.setdefault("render_mode", "rgb_array")
        made = entry.make(**arguments)
    except ConfigError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"environment.id is {config.id!r}, and a package that it needs is not installed",
            why=str(error),
            fix="pip install 'rillflow-classic[mujoco]' for MuJoCo; otherwise what the line above names",
        ) from error
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(
            f"the environment {config.id!r} cannot be made: {type(error).__name__}: {error}",
            why=f"it was made with {arguments}",
            fix="correct environment.arguments or the class",
        ) from error
    if entry.provider == "parallel":
        return ParallelLane(made, entry.name, slot, time_limit=config.time_limit, shows=show)
    if config.time_limit is not None:
        made = gymnasium.wrappers.TimeLimit(made, config.time_limit)
    return GymnasiumLane(made, entry.name, slot, shows=show)


def _registered(
    config: EnvironmentSettings, name: str, arguments: dict[str, Any], *, show: bool
) -> gymnasium.Env[Any, Any]:
    if show:
        arguments["render_mode"] = "rgb_array"
        if "DISPLAY" not in os.environ and find_library("EGL"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it on import; its default needs a screen
    if not name.startswith(ATARI):
        return gymnasium.make(
            name, max_episode_steps=config.time_limit, disable_env_checker=True, **arguments
        )
    skip = int(arguments.pop("frame_skip", 4))
    plain = gymnasium.make(name, **{"frameskip": 1, "repeat_action_probability": 0.0, **arguments})
    if config.time_limit is not None:
        plain = gymnasium.wrappers.TimeLimit(plain, config.time_limit * skip)
    return gymnasium.wrappers.AtariPreprocessing(plain, frame_skip=skip)
