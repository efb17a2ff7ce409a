"""Plugin: compare the nodes of a run before it loads anything. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import Plugin

if TYPE_CHECKING:
    from rillflow.app.facts import RecipeFacts
    from rillflow.workers.backend import Backend


def nodes() -> Callable[[RecipeFacts, Path, Backend], list[str]]:
    """Return the function that compares the nodes of a run, and returns notes."""
    from rillflow_parts.nodes.checks import check_nodes

    return check_nodes


PLUGIN = Plugin(services={"nodes": nodes})
