"""Ready first: groups are sampled without a pause, and a step trains those that are ready first.

At freshness k, rows run on through publishes, and no token is older than k versions when it is trained. At 0,
a step begins its groups and trains them, or its chunks, in the order in which they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rillflow.config.problems import shown
from rillflow.controller.schedules.pools import SCORES, own_pool_note, pools_for, scores_note
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
from rillflow.workers.config import SAMPLER, PlacementConfig

if TYPE_CHECKING:
    from rillflow.controller.decisions import Decisions
    from rillflow.controller.saved_flight import KeptFlight
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source

NAMED = 'schedule.mode is "ready_first"'
"""The setting that chooses this order."""
_OF_STALE_ROWS = {
    "on_stale": "no row becomes stale",
    "syncs_per_step": "weights are published once, at the end of a step",
    "keep_cache": "every row ends with the weights that it began with",
}
"""Settings of rows that meet new weights, and why nothing reads them at freshness 0."""


class ReadyFirst(Schedule):
    """Steps of the groups that are ready first, within a bound of staleness."""

    paper: ClassVar[str] = "2505.24298"
    is_by_group: ClassVar[bool] = True
    mode: Literal["ready_first"] = Field("ready_first", description=MODE)
    freshness: int = Field(0, ge=0, description="Largest staleness of a trained token, in policy versions.")
    on_stale: Literal["wait", "drop"] = Field(
        "wait",
        description="Rows about to become too stale: wait for them, or drop and sample them again.",
    )
    syncs_per_step: int = Field(
        1, gt=0, description="Weight publishes per step, evenly spread over its minibatches."
    )
    keep_cache: bool = Field(
        False,
        description="Keep the KV cache when a row continues with new weights: faster but inexact. "
        "Otherwise the row is prefilled again.",
    )
    stream_chunks: int = Field(1, gt=0, description="At freshness 0, chunks of a step's prompts.")

    @property
    def lag(self) -> int:
        """See Schedule."""
        return self.freshness

    @property
    def chunks(self) -> int:
        """See Schedule."""
        return self.stream_chunks

    @property
    def publishes(self) -> int:
        """See Schedule."""
        return self.syncs_per_step

    @property
    def is_beside(self) -> bool:
        """See Schedule."""
        return True

    @property
    def keeps_cache(self) -> bool:
        """See Schedule."""
        return self.keep_cache

    @property
    def said(self) -> str:
        """See Schedule."""
        return f"schedule.freshness is {self.freshness}" if self.freshness else NAMED

    def needs(self) -> Sequence[EngineNeed]:
        """See Schedule."""
        from rillflow.rollout.engine import Capability

        return (EngineNeed(capability=Capability.ROWS, because=NAMED), *super().needs())

    def contradictions(self, recipe: ScheduledRecipe) -> Iterator[ConfigError]:
        """See Schedule."""
        if self.chunks > 1 and self.freshness:
            yield ConfigError(
                f"schedule.stream_chunks is {self.chunks}, schedule.freshness is {self.freshness}, "
                f"and {NAMED}",
                why="with freshness above 0 the rows of a step are ready when it begins, so there is no "
                "chunk to wait for",
                fix="set schedule.stream_chunks = 1, or schedule.freshness = 0",
            )
        if not recipe.samples_in_one_call:
            yield ConfigError(
                f"{NAMED}, and {without_one_call(recipe.phase)}",
                why=BEGIN_BEFORE,
                fix='set schedule.mode = "in_order" or "ahead"',
            )
        yield from self._unread()
        yield from self._undivided(recipe)
        yield from super().contradictions(recipe)

    def _unread(self) -> Iterator[ConfigError]:
        """Yield errors about settings of rows that meet new weights, where no row does."""
        fields = type(self).model_fields
        for name, why in _OF_STALE_ROWS.items():
            value = vars(self)[name]
            if not self.freshness and value != fields[name].default:
                yield ConfigError(
                    f"schedule.{name} is {shown(value)}, and schedule.freshness is 0",
                    why=why,
                    fix=f"set schedule.freshness = 1, or remove schedule.{name}",
                )

    def unread(self, placement: PlacementConfig) -> Sequence[str]:
        """See Schedule."""
        stale = () if self.freshness else _OF_STALE_ROWS
        return [*stale, *super().unread(placement)]

    def _undivided(self, recipe: ScheduledRecipe) -> Iterator[ConfigError]:
        """Yield an error about publishes that do not divide an update."""
        count, phase = self.syncs_per_step, recipe.phase
        reasons = {
            "algorithm.shuffle = false, so that the parts are trained one after the other": phase.shuffle,
            "algorithm.epochs = 1": phase.epochs > 1,
            f"algorithm.minibatches to a multiple of syncs_per_step, not {phase.minibatches}": (
                phase.minibatches % count
            ),
            f"algorithm.prompts_per_step to a multiple of syncs_per_step, not {phase.prompts_per_step}": (
                phase.prompts_per_step % count
            ),
            f"schedule.freshness to at least {count - 1}: the step's last rows are that many versions old": (
                self.freshness < count - 1
            ),
            "algorithm.max_rounds = 1, so that a step draws its prompts once": (
                recipe.sampled is not None and recipe.sampled.draws_again
            ),
            "algorithm.name to an algorithm that calls policy.update once": recipe.updates != 1,
        }
        lacking = [reason for reason, is_lacking in reasons.items() if count > 1 and is_lacking]
        if lacking:
            yield ConfigError(
                f"schedule.syncs_per_step is {count}",
                why="weights are published between equal parts of a step's minibatches",
                fix=f"set {'; '.join(lacking)}",
            )

    def pools(self, devices: int, functions: Sequence[str]) -> PlacementConfig:
        """See Schedule; functions get a third pool, so that scores do not wait for updates."""
        return pools_for(devices, scorers=functions)

    def pool_notes(self, placement: PlacementConfig) -> Sequence[str]:
        """See Schedule."""
        scores = [scores_note(NAMED, placement)] if SCORES in placement.pools else []
        return [own_pool_note(self.said, placement), *scores]

    def notes(self, phase: SampledPhase) -> Iterator[str]:
        """See Schedule."""
        if self.freshness and self.on_stale == "drop":
            yield (
                'schedule.on_stale is "drop": a group that became too old is sampled again, which happens '
                'most often to long rows and slow rewards, so short answers are favoured. "wait" trains '
                "every group"
            )
        if self.keep_cache:
            yield (
                "schedule.keep_cache is true: a row that continues with new weights keeps the keys and "
                "values of the old ones, so its log probabilities are those of no weights, and no "
                "correction covers the error. Remove it; the keys and values are then computed again"
            )
        yield from super().notes(phase)

    def source(self, parts: PhaseParts) -> Source:
        """See Schedule."""
        from rillflow.controller.admission import CapacityBound, StalenessBound
        from rillflow.controller.async_rollout import LEFT, AsyncRollout
        from rillflow.controller.flight import GroupInFlight
        from rillflow.controller.saved_flight import FLIGHT
        from rillflow.records.batch import load_batch

        prompts, kept = parts.phase.prompts_per_step, parts.kept
        decisions, in_flight = _flight(parts, parts.position.get(FLIGHT), needs_rows=self.freshness > 0)
        assert parts.sync is not None  # was checked
        bound: type[StalenessBound[GroupInFlight]] = (
            CapacityBound if self.on_stale == "drop" else StalenessBound
        )
        is_saved = kept is not None and kept.prompts.is_file()
        return AsyncRollout(
            parts.executor,
            parts.stream,
            parts.sync,
            rule=bound(freshness=self.freshness, prompts=prompts, published=Fraction(1, self.syncs_per_step)),
            how=parts.sampling(),
            step_groups=prompts,
            parts=self.syncs_per_step,
            chunks=self.chunks,
            most_rows=parts.rollout.max_rows,
            streamed=parts.streamed(
                parts.calls, changing=parts.changing, most=(self.freshness + 1) * prompts
            ),
            decisions=decisions,
            again=load_batch(kept.prompts)
            if kept is not None and is_saved
            else parts.rows(parts.position.get(LEFT) or []),
            kept=in_flight,
        )


def _flight(
    parts: PhaseParts, state: Mapping[str, Any] | None, *, needs_rows: bool
) -> tuple[Decisions, KeptFlight | None]:
    """Return the decisions that a phase repeats, and the groups in flight of its checkpoint."""
    from rillflow.controller.decisions import Decisions, decisions_of, left_at
    from rillflow.controller.saved_flight import KeptFlight, kept_flight

    kept, history = parts.kept, parts.history
    position = state["position"] if state is not None else 0
    if history.repeat is not None:
        decisions = Decisions(None, history.repeat.after(position), position)
        if kept is None or state is None:
            return decisions, None
        at = left_at(history.repeat.after(0), position)
        return decisions, KeptFlight.of(kept, state, decisions, at)
    if kept is not None and state is None:  # an older version wrote the checkpoint
        history.log.cut_decisions(0)
    events = decisions_of(history.path)
    if kept is None or state is None:
        decisions = Decisions(history.log, events)
        if history.blocked:
            decisions.leave(history.blocked)
        return decisions, None
    flight = kept_flight(
        kept,
        state,
        log=history.log,
        events=events,
        replicas=len(parts.executor.groups[SAMPLER].mesh.groups("tp")),
        needs_rows=needs_rows,
        blocked=history.blocked,
    )
    return flight.decisions, flight
