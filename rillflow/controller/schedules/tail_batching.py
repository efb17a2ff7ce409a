"""Tail batching: a step starts more rows than it trains, and leaves the longest for a later step.

Every trained token is on-policy, and every prompt is trained once (``controller.tail_batching``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow.controller.schedules.schedule import (
    BEGIN_BEFORE,
    MODE,
    EngineNeed,
    SampledPhase,
    Schedule,
    ScheduledRecipe,
    without_one_call,
)
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source


class TailBatches(Schedule):
    """Steps that start more rows than they train, and leave the longest for later."""

    paper: ClassVar[str] = "2509.21009"
    mode: Literal["tail_batching"] = Field("tail_batching", description=MODE)
    oversample_prompts: float = Field(
        1.0,
        ge=1,
        le=100,
        description="Prompts started for each prompt trained; the ones with the longest rows are left for "
        "a later step.",
    )
    oversample_samples: float = Field(
        1.0,
        ge=1,
        le=100,
        description="Rows started for each row trained of a prompt; the rows that end first are trained.",
    )

    def begun(self, phase: SampledPhase) -> tuple[int, int]:
        """See Schedule."""
        prompts = self.oversample_prompts * phase.prompts_per_step
        samples = self.oversample_samples * phase.samples_per_prompt
        return ceil(prompts - 1e-9), ceil(samples - 1e-9)

    def started(self, phase: SampledPhase) -> str:
        """Return the rows that a step starts, as errors quote them."""
        prompts, samples = self.begun(phase)
        said = "schedule.oversample_prompts and oversample_samples start"
        return f"{said} {prompts} prompts x {samples} samples"

    def needs(self) -> Sequence[EngineNeed]:
        """See Schedule."""
        from rillflow.rollout.engine import Capability

        need = EngineNeed(capability=Capability.ROWS, because="a step starts more rows than it trains")
        return (need, *super().needs())

    def contradictions(self, recipe: ScheduledRecipe) -> Iterator[ConfigError]:
        """See Schedule."""
        if recipe.sampled is not None and not recipe.samples_in_one_call:
            yield ConfigError(
                f"{self.started(recipe.sampled)}, and {without_one_call(recipe.phase)}",
                why=BEGIN_BEFORE,
                fix='set schedule.mode = "in_order"',
            )
        if max(self.oversample_prompts, self.oversample_samples) == 1:
            yield ConfigError(
                "schedule.oversample_prompts and schedule.oversample_samples are 1",
                why="a step that starts only the rows that it trains leaves none for later",
                fix='set schedule.oversample_prompts = 1.25, or schedule.mode = "in_order"',
            )
        yield from super().contradictions(recipe)

    def notes(self, phase: SampledPhase) -> Iterator[str]:
        """See Schedule."""
        samples = self.begun(phase)[1]
        if samples > phase.samples_per_prompt:
            yield (
                f"schedule.oversample_samples is {self.oversample_samples:g}: a step trains the "
                f"{phase.samples_per_prompt} of {samples} rows of a prompt that end first, so short "
                "answers are favoured and the longest are never trained. schedule.oversample_prompts trains "
                "every prompt"
            )
        yield from super().notes(phase)

    def shortened(self, phase: SampledPhase, before: int) -> str:
        """See Schedule."""
        if self.begun(phase)[0] <= phase.prompts_per_step:
            return ""
        return (
            f"; with schedule.oversample_prompts = {self.oversample_prompts:g}, the last of the "
            f"{before} steps left no prompt for later. A run of {phase.steps} steps from the start trains "
            "other prompts there, so its results differ"
        )

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        from rillflow.controller.tail_batching import ASIDE, TailBatching

        how = parts.sampling()
        return TailBatching(
            parts.executor,
            parts.stream,
            how=how,
            prompts=self.oversample_prompts,
            begun_samples=ceil(how.samples * self.oversample_samples - 1e-9),
            aside=parts.rows(parts.position.get(ASIDE) or []),
            sync=parts.sync,
        )
