"""Ahead: the sampler runs up to k steps ahead of the trainer, in the order of the data (lag k).

Step t samples with version max(0, t - 1 - k) on any placement and after a resume. The rows of steps that are
open at a checkpoint are kept in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow.controller.schedules.in_order import stream_source
from rillflow.controller.schedules.pools import own_pool_note, pools_for
from rillflow.controller.schedules.schedule import MODE, Schedule
from rillflow.workers.config import PlacementConfig

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source


class Ahead(Schedule):
    """Steps in the order of the data, sampled k versions ahead on ranks of the sampler's own."""

    paper: ClassVar[str] = "2410.18252"
    mode: Literal["ahead"] = Field("ahead", description=MODE)
    freshness: int = Field(
        1,
        ge=0,
        description="Largest staleness of a trained token, in policy versions; a sampler runs ahead on its "
        "own ranks, which are chosen if the recipe names no pools. 0 is in order.",
    )
    stream_chunks: int = Field(1, gt=0, description="Chunks of a step's prompts; see streamed.")

    @property
    def lag(self) -> int:
        """See Schedule."""
        return self.freshness

    @property
    def chunks(self) -> int:
        """See Schedule."""
        return self.stream_chunks

    @property
    def steps_ahead(self) -> int:
        """See Schedule."""
        return self.freshness

    @property
    def said(self) -> str:
        """See Schedule."""
        return f"schedule.freshness is {self.freshness}"

    def pools(self, devices: int, functions: Sequence[str]) -> PlacementConfig:  # noqa: ARG002
        """See Schedule."""
        return pools_for(devices)

    def pool_notes(self, placement: PlacementConfig) -> Sequence[str]:
        """See Schedule."""
        return [own_pool_note(self.said, placement)]

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        return stream_source(parts, self.chunks)
