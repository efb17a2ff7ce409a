"""The recipes of the flow tests, for whole runs of parts."""

from __future__ import annotations

from tests.flows.conftest import recipe, shared_recipe, tiny

__all__ = ["recipe", "shared_recipe", "tiny"]
