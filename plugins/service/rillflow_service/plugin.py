"""Plugin: bring the rollout engine ``service`` with its settings. Imports nothing heavy.

The service of other training programs adds no command; it is started with ``python -m rillflow_service``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rillflow.app.plugins import EngineSource, Plugin
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved


def needs(resolved: Resolved) -> Iterator[ConfigError]:
    """Yield contradictions between the engine and other settings."""
    recipe = resolved.recipe
    if recipe.rollout.engine == "service" and recipe.schedule.mode == "gathering":
        yield ConfigError(
            'schedule.mode is "gathering", and rollout.engine is "service"',
            why="its programs send whole rows, so a row that moves would lose its tokens",
            fix='change one of them, such as schedule.mode = "in_order"',
        )


PLUGIN = Plugin(
    sections={"rollout.service": "rillflow_service.config:ServiceConfig"},
    engines={
        "service": EngineSource(
            path="rillflow_service.engine:ServiceEngine",
            options="rillflow_service.engine:options",
            reads=("rollout.service",),
            holds_cache=False,
        )
    },
    needs=needs,
)
