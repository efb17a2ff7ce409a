"""Source: what ``rollout.environment.source`` names, as a class in a file and its arguments.

    game.py:Guess ────────────────────────────> FunctionPath(game.py, Guess), arguments
    verifiers:NAME ─> verifiers_adapter.py:VerifiersEnvironment, name = NAME
    openenv:URL ────> openenv_adapter.py:OpenEnvironment, url = URL

Imports neither torch nor the packages of the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rillflow.errors import ConfigError
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.rollout.config import EnvironmentConfig

VERIFIERS, OPENENV = "verifiers:", "openenv:"
"""Beginnings of the sources of other libraries."""
ENVIRONMENT_REWARD, METRICS, TURNS = "environment_reward", "environment_metrics", "turns"
"""Columns of a row that an environment wrote: the sum of its rewards, its last metrics, its turns."""
_FOLDER = Path(__file__).resolve().parent
REWARD = FunctionPath(file=_FOLDER / "reward.py", name=ENVIRONMENT_REWARD)
"""Reward function of rows that an environment wrote."""
_ADAPTERS = {
    VERIFIERS: ("verifiers_adapter.py", "VerifiersEnvironment", "name", "verifiers", "verifiers"),
    OPENENV: ("openenv_adapter.py", "OpenEnvironment", "url", "openenv", "openenv-core"),
}


@dataclass(frozen=True, kw_only=True)
class EnvironmentSource:
    """An environment's class, and what it is made with.

    Example:
        EnvironmentSource(path=FunctionPath(file=Path("/home/me/game.py"), name="Guess"), arguments={})
    """

    path: FunctionPath
    """File and name of the class."""
    arguments: Mapping[str, Any]
    """Arguments of the class."""
    written: str
    """The source as the recipe names it."""

    def __str__(self) -> str:
        return self.written

    @property
    def is_own(self) -> bool:
        """Whether the class is the user's, not an adapter to another library."""
        return not self.written.startswith(tuple(_ADAPTERS))


def parse_environment(config: EnvironmentConfig, base: Path) -> EnvironmentSource:
    """Locate an environment without loading it.

    Raises:
        RewardError: the file is missing or does not bind the class.
        ConfigError: the library of the source is not installed, or nothing follows the colon.
    """
    for beginning, (file, name, argument, module, package) in _ADAPTERS.items():
        if not config.source.startswith(beginning):
            continue
        rest = config.source.removeprefix(beginning)
        if not rest:
            raise ConfigError(
                f"rollout.environment.source is {config.source!r}",
                why="nothing follows the colon",
                fix=f"write the {argument}, such as {_example(beginning)}",
            )
        if find_spec(module) is None:
            raise ConfigError(
                f"rollout.environment.source is {config.source!r}, and {package} is not installed",
                why="its own library runs the environment",
                fix=f"pip install {package}",
            )
        path = FunctionPath(file=_FOLDER / file, name=name)
        arguments = {argument: rest, **config.arguments}
        return EnvironmentSource(path=path, arguments=arguments, written=config.source)
    path = parse_function(config.source, base, "environment")
    return EnvironmentSource(path=path, arguments=config.arguments, written=config.source)


def _example(beginning: str) -> str:
    return '"verifiers:wordle"' if beginning == VERIFIERS else '"openenv:http://127.0.0.1:8000"'
