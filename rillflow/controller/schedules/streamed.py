"""Streamed: a step's prompts in chunks; the rows of a chunk go on to the next stage when all have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow.controller.schedules.in_order import stream_source
from rillflow.controller.schedules.schedule import MODE, Schedule

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source


class Streamed(Schedule):
    """Steps in the order of the data, whose stages begin before all rows have ended."""

    needs_samples: ClassVar[bool] = False
    mode: Literal["streamed"] = Field("streamed", description=MODE)
    stream_chunks: int = Field(
        2,
        gt=0,
        description="Chunks of a step's prompts; the rows of a chunk go on to the next stage when all of "
        "them have ended.",
    )

    @property
    def chunks(self) -> int:
        """See Schedule."""
        return self.stream_chunks

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        return stream_source(parts, self.chunks)
