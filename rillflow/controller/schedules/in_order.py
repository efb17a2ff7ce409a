"""In order: a step's rows are sampled when it asks for them, with the newest weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow.controller.schedules.schedule import MODE, Schedule

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source


class InOrder(Schedule):
    """Steps one after the other, in the order of the data."""

    needs_samples: ClassVar[bool] = False
    mode: Literal["in_order"] = Field("in_order", description=MODE)

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        return stream_source(parts)


def stream_source(parts: PhaseParts, chunks: int = 1) -> Source:
    """Return the source of prompts in the order of the stream; after a resume, with rows that were kept."""
    from rillflow.controller.source import Source

    def no_rows(step: int) -> Sequence[Path]:  # noqa: ARG001
        return ()

    kept = parts.kept.sampled if parts.kept is not None else no_rows
    return Source(parts.executor, parts.stream, sync=parts.sync, chunks=chunks, kept=kept)
