"""Plugin: the service adds no command; it is started with ``python -m rillflow_service``."""

from __future__ import annotations

from rillflow.app.plugins import Plugin

PLUGIN = Plugin()
