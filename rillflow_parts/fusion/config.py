"""Settings of fusion: the key ``placement.fused``."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from rillflow.app.sections import Recipe
from rillflow.workers.config import MeshSizes, PlacementConfig


class FusedPlacement(PlacementConfig):
    """The section ``placement`` with two updates that run as one fused stage."""

    fused: tuple[str, ...] = Field(
        (),
        description="Two trained models whose updates fill each other's pipeline bubbles on the same ranks, "
        'such as ["policy", "critic"]; the second model\'s stages are in reverse order.',
    )

    def mesh_of(self, role: str) -> MeshSizes:
        """Return the mesh of a role; the stages of the second fused one are in reverse order."""
        return replace(super().mesh_of(role), is_descending=role in self.fused[1:])


def fused_roles(recipe: Recipe) -> tuple[str, ...]:
    """Return the roles whose updates a recipe fuses; empty for none."""
    placement = recipe.placement
    return placement.fused if isinstance(placement, FusedPlacement) else ()
