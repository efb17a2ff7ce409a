"""Plugin: compute the peaks of ``rillflow check --memory``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rillflow.app.plugins import Plugin

if TYPE_CHECKING:
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.memory import Peak


def peaks() -> Callable[[RecipeFacts], list[Peak]]:
    """Return the function that computes a recipe's peaks; loads torch."""
    from rillflow_parts.memory.peaks import peaks_of

    return peaks_of


PLUGIN = Plugin(services={"peaks": peaks})
