"""Environment sources: find the environment that ``rollout.environment.source`` names.

rollout.environment ─ environment_source ─> a class of the user's, or the adapter of a plugin to a library
"""

from __future__ import annotations

from pathlib import Path

from rillflow.app.plugins import PROVIDERS, absent, brought
from rillflow.rollout.config import EnvironmentConfig
from rillflow.serving.environments.source import EnvironmentSource, parse_environment


def environment_source(config: EnvironmentConfig, base: Path) -> EnvironmentSource:
    """Locate an environment without loading it; see ``parse_environment``.

    Raises:
        ConfigError: also if the part that brings the adapter is not installed.
    """
    scheme = f"{config.source.partition(':')[0]}:"
    adapter = brought(lambda plugin: plugin.environments, "scheme of environments").get(scheme)
    if adapter is None and scheme in PROVIDERS["environments"]:
        error = absent("environments", scheme, f"rollout.environment.source = {config.source!r}")
        assert error is not None, "its part is known"
        raise error
    return parse_environment(config, base, adapter)
