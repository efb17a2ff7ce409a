"""Plugin: run two updates as one fused stage, as ``placement.fused`` says. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from rillflow.app.plugins import Plugin

if TYPE_CHECKING:
    from rillflow.app.any_recipe import AnyRecipe
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.resolved import Resolved
    from rillflow.controller.step_executor import StepCalls
    from rillflow.errors import ConfigError


def needs(resolved: Resolved) -> Iterable[ConfigError]:
    """Return contradictions between ``placement.fused`` and other settings."""
    from rillflow_parts.fusion.needs import fused_needs

    return fused_needs(resolved)


def look(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Check that the step of a recipe can fuse its updates."""
    from rillflow.app.facts import RecipeFacts
    from rillflow_parts.fusion.needs import look_at_fused

    if isinstance(facts, RecipeFacts):
        look_at_fused(facts, report)


def calls(resolved: Resolved, trained: Collection[str], say: Callable[[str], None]) -> StepCalls | None:
    """Return what joins the two updates of a phase; None if it does not train both roles."""
    from rillflow_parts.fusion.config import fused_roles

    fused = fused_roles(resolved.recipe)
    if not fused or not {*fused} <= {*trained}:
        return None
    from rillflow_parts.fusion.fused_calls import FusedCalls

    return FusedCalls(fused, trained, say)


PLUGIN = Plugin(
    settings={"placement.fused": "rillflow_parts.fusion.config:FusedPlacement"},
    needs=needs,
    look=look,
    calls=calls,
)
