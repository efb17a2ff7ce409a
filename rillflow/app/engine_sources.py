"""Engine sources: where the engine that ``rollout.engine`` names is found.

rollout.engine ─ engine_source ─> native, one of a plugin, or package.module:Class ─> made on a rank
"""

from __future__ import annotations

from collections.abc import Mapping

from rillflow.app.plugins import EngineSource, absent, brought
from rillflow.errors import ConfigError, nearest
from rillflow.rollout.config import NATIVE

OWN: Mapping[str, EngineSource] = {
    NATIVE: EngineSource(path="rillflow.rollout.native.engine:NativeEngine"),
}
"""Engines of the core."""


def engine_sources() -> Mapping[str, EngineSource]:
    """Return the known engines by their names in ``rollout.engine``.

    Raises:
        ConfigError: two of them have one name.
    """
    return {**OWN, **brought(lambda plugin: plugin.engines, "engine", OWN)}


def engine_source(name: str) -> EngineSource:
    """Return the engine that ``rollout.engine`` names: a known one, or ``package.module:Class``.

    Raises:
        ConfigError: no plugin that is installed brings it.
    """
    known = engine_sources()
    if name in known:
        return known[name]
    if ":" in name:
        return EngineSource(path=name)
    raise absent("engines", name, f'rollout.engine = "{name}"') or ConfigError(
        f"rollout.engine is {name!r}, which is no engine",
        why="no installed plugin brings an engine of this name",
        fix=f'{nearest(name, known)}; or name "package.module:Class" of a package that Python finds here',
    )


def unread_by_engine(name: str) -> dict[str, bool]:
    """Return the settings of engines, each with whether it has no effect with the engine of this name."""
    sources = engine_sources()
    return {key: each != name for each, source in sources.items() for key in source.reads}
