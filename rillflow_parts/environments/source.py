"""Source: what ``rollout.environment.source`` names, as a class in a file and its arguments.

    game.py:Guess ────────────────────────────> FunctionPath(game.py, Guess), arguments
    SCHEME:REST ─ EnvironmentAdapter of a plugin ─> FunctionPath(its file, its class), its argument = REST

Imports neither torch nor the packages of the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rillflow.app.row_writers import WriterCode
from rillflow.errors import ConfigError
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow_parts.environments.adapter import EnvironmentAdapter
from rillflow_parts.environments.config import EnvironmentConfig

ENVIRONMENT_REWARD, METRICS, TURNS = "environment_reward", "environment_metrics", "turns"
"""Columns of a row that an environment wrote: the sum of its rewards, its last metrics, its turns."""
_FOLDER = Path(__file__).resolve().parent
REWARD = FunctionPath(file=_FOLDER / "child" / "reward.py", name=ENVIRONMENT_REWARD)
"""Reward function of rows that an environment wrote."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSource(WriterCode):
    """An environment's class, and what it is made with.

    Example:
        EnvironmentSource(function=FunctionPath(file=Path("/home/me/game.py"), name="Guess"),
                          named="game.py:Guess", arguments={})
    """

    arguments: Mapping[str, Any]
    """Arguments of the class."""
    has_rows: bool = False
    """Whether it has a data set of its own, which a function ``rows`` beside the class lists."""


def parse_environment(
    config: EnvironmentConfig, base: Path, adapter: EnvironmentAdapter | None = None
) -> EnvironmentSource:
    """Locate an environment without loading it.

    Args:
        config: the section ``rollout.environment``.
        base: the recipe's folder.
        adapter: adapter of the source's scheme; None for a class of the user's.

    Raises:
        RewardError: the file is missing or does not bind the class.
        ConfigError: the library of the source is not installed, or nothing follows the colon.
    """
    if adapter is None:
        own = parse_function(config.source, base, "environment")
        return EnvironmentSource(function=own, named=config.source, arguments=config.arguments)
    rest = config.source.partition(":")[2]
    if not rest:
        raise ConfigError(
            f"rollout.environment.source is {config.source!r}",
            why="nothing follows the colon",
            fix=f'write the {adapter.argument}, such as "{adapter.example}"',
        )
    if find_spec(adapter.module) is None:
        raise ConfigError(
            f"rollout.environment.source is {config.source!r}, and {adapter.package} is not installed",
            why="its own library runs the environment",
            fix=f"pip install {adapter.package}",
        )
    module = rest.rpartition("/")[2].replace("-", "_")
    return EnvironmentSource(
        function=FunctionPath(file=adapter.file, name=adapter.name),
        named=config.source,
        is_own=False,
        modules=[module] if adapter.names_module else [],
        arguments={adapter.argument: rest, **config.arguments},
        has_rows=adapter.has_rows,
    )
