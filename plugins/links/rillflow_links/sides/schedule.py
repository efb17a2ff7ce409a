"""Schedule: ``schedule.mode = "sides"``, steps in order that meet other sides every ``inner_steps`` steps.

begin ─ start: the newest version ─> step 1 ... H ─ publish ─ exchange ─> step H + 1 ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow.controller.schedules.schedule import MODE, Schedule, ScheduledRecipe
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source


class Sides(Schedule):
    """Steps in order on this machine, and global weights that sides on other machines learn too."""

    paper: ClassVar[str] = "2311.08105"
    needs_samples: ClassVar[bool] = False
    mode: Literal["sides"] = Field("sides", description=MODE)
    store: str = Field(min_length=1, description="Folder or URL where sides and the merger meet.")
    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$", description="Name of this side; every side has its own."
    )
    inner_steps: int = Field(20, ge=1, description="Steps between two contributions.")
    codec: Literal["dense", "cast", "int8", "top_k", "dct", "sparse_loco"] = Field(
        "dense", description="Codec of contributions, as links.gradients."
    )
    share: float = Field(
        0.01, gt=0, le=1, description="Share of the values that top_k, dct and sparse_loco send."
    )
    grace_s: float = Field(
        60.0, ge=0, description="Longest wait for the next version after a contribution; then it trains on."
    )
    start_s: float = Field(600.0, gt=0, description="Longest wait for the merger's first version.")

    def contradictions(self, recipe: ScheduledRecipe) -> Iterator[ConfigError]:
        """See Schedule."""
        for pool, sizes in recipe.placement.train_parallel.items():
            for axis, size in sizes.items():
                if axis != "dp" and size > 1:
                    yield ConfigError(
                        f"{self.said}, and placement.train_parallel.{pool}.{axis} is {size}",
                        why="each rank of a side holds the whole model, which it exchanges",
                        fix=f"leave out {axis}; dp works with every size",
                    )
        yield from super().contradictions(recipe)

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        from rillflow_links.sides.source import SideSource

        return SideSource.of(self, parts)
