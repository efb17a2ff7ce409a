"""Gathering: the last rows of a step run on few replicas, while the ranks of the others score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow.controller.schedules.schedule import (
    MODE,
    EngineNeed,
    Schedule,
    ScheduledRecipe,
    without_one_call,
)
from rillflow.errors import ConfigError
from rillflow.workers.config import SAMPLER

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source


class Gathered(Schedule):
    """Steps in the order of the data, whose last rows gather on few replicas."""

    paper: ClassVar[str] = "2409.13221"
    mode: Literal["gathering"] = Field("gathering", description=MODE)
    gather_rows: int = Field(
        gt=0,
        description="With fewer unfinished rows than this in a step, the rows gather on few replicas, and "
        "the ranks of the others score; about a fifth of a step's rows is a good start.",
    )
    gather_replicas: int = Field(
        0, ge=0, description="Replicas that run the gathered rows; 0: the least that have room for them."
    )
    gather_by: Literal["cache", "tokens"] = Field(
        "cache",
        description="What gathered rows bring to their new replica: their KV cache, or tokens to prefill "
        "again.",
    )

    @property
    def said(self) -> str:
        """See Schedule."""
        return f"schedule.gather_rows is {self.gather_rows}"

    def replicas(self, max_rows: int) -> int:
        """Return the number of replicas that run gathered rows: by default the least with a slot for each."""
        return self.gather_replicas or -(-max(self.gather_rows - 1, 1) // max_rows)

    def needs(self) -> Sequence[EngineNeed]:
        """See Schedule."""
        from rillflow.rollout.engine import Capability

        needs = [EngineNeed(capability=Capability.ROWS, because=self.said)]
        if self.gather_by == "cache":
            because = 'schedule.gather_by is "cache"; "tokens" needs no caches'
            needs.append(EngineNeed(capability=Capability.CACHE, because=because))
        return (*needs, *super().needs())

    def contradictions(self, recipe: ScheduledRecipe) -> Iterator[ConfigError]:
        """See Schedule."""
        for other, why in (*_fixed_rows(recipe), *self._sizes(recipe)):
            yield ConfigError(
                f"{self.said}, and {other}",
                why=why,
                fix='change one of them, or set schedule.mode = "in_order"',
            )
        yield from super().contradictions(recipe)

    def _sizes(self, recipe: ScheduledRecipe) -> Iterator[tuple[str, str]]:
        """Yield numbers of rows and replicas that do not fit, each with the reason."""
        placement, max_rows, rows = recipe.placement, recipe.rollout.max_rows, recipe.phase.rows_per_step
        most, ranks = self.replicas(max_rows), placement.pools.get(placement.pool_of(SAMPLER), 1)
        replicas = ranks // max(1, placement.generate_tp)
        if self.gather_rows > rows:
            why = "no more rows than these can be unfinished; about a fifth of them is a good start"
            yield f"a step has {rows} rows", why
        if most >= replicas:
            counted = f"{replicas} replica{'s' * (replicas > 1)}, of which {most} would run the rows"
            how = f"schedule.gather_replicas = {self.gather_replicas}, rollout.max_rows = {max_rows}"
            why = "no replica would be given up, so no rank would score earlier"
            yield f"the sampler has {counted} ({how})", why

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        from rillflow.controller.gathering import CALLS, Gathering, GatherRule
        from rillflow.controller.streamed_stages import SharedRanks, before_updates

        executor, phase = parts.executor, parts.phase
        pool = executor.groups[SAMPLER].places[0].pool
        shared = SharedRanks(pool=pool, copies=parts.copies(), busy=set())
        streamed = parts.streamed(
            before_updates(parts.calls, executor),
            changing=(),
            most=-(-phase.prompts_per_step // CALLS),
            shared=shared,
        )
        if not any(place.pool == shared.pool for each in streamed for place in each.recovery.places):
            parts.say(
                f"warning: {self.said}, and no stage can score on "
                "the sampler's ranks before the step's last row ends: gathering only delays rows"
            )
        return Gathering(
            executor,
            parts.stream,
            how=parts.sampling(),
            rule=GatherRule(
                rows=self.gather_rows,
                replicas=self.replicas(parts.rollout.max_rows),
                with_caches=self.gather_by == "cache",
            ),
            step_groups=phase.prompts_per_step,
            most_rows=parts.rollout.max_rows,
            streamed=streamed,
            shared=shared,
            sync=parts.sync,
        )


def _fixed_rows(recipe: ScheduledRecipe) -> Iterator[tuple[str, str]]:
    """Yield makers of rows that cannot move between replicas, each with the reason."""
    if recipe.writer is not None:
        yield f"{recipe.writer} writes the rows", "such a row cannot go on in another process"
    if not recipe.samples_in_one_call:
        yield (
            without_one_call(recipe.phase),
            "the rows of a step begin before its own code runs, all with the same settings",
        )
