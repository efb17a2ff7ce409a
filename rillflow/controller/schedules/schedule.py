"""Schedule: the order of a phase's steps, as the one object that the rest of the system asks about it.

    recipe ─> Schedule ─┬─ contradictions, needs ─> checks of the recipe and of the engine
                        ├─ pools ────────────────> the ranks of a recipe that names none
                        ├─ notes ────────────────> warnings of ``check`` and of a run
                        └─ source ───────────────> Build: the prompts and rows of a phase's steps

A schedule is a section of settings with a name, its ``mode``. Each has a file of its own and a line in
``registry``; a plugin adds one with ``Plugin.schedules``.

Example:
    class ShortestFirst(Schedule):
        mode: Literal["shortest_first"] = "shortest_first"

        def source(self, parts: PhaseParts) -> Source:
            return Source(parts.executor, sorted_stream(parts.stream), sync=parts.sync)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from rillflow.config.schema import Section
from rillflow.errors import ConfigError
from rillflow.placement.mesh import divisors
from rillflow.rollout.config import RolloutConfig
from rillflow.workers.config import PlacementConfig

if TYPE_CHECKING:
    from rillflow.controller.schedules.phase_parts import PhaseParts
    from rillflow.controller.source import Source
    from rillflow.rollout.engine import Capability


MODE = "The order of the steps."
"""Description of the setting that names a schedule."""


class PhaseSettings(Protocol):
    """Settings of a phase that a schedule reads; those of every algorithm have them."""

    @property
    def name(self) -> str:
        """The algorithm."""

    @property
    def steps(self) -> int:
        """Steps of the phase."""

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one step."""

    @property
    def rows_per_step(self) -> int:
        """Rows that one step trains."""

    @property
    def epochs(self) -> int:
        """Passes over the rows of a step."""

    @property
    def minibatches(self) -> int:
        """Optimiser steps in one pass."""

    @property
    def shuffle(self) -> bool:
        """Whether rows are shuffled before they are split into minibatches."""

    def goes_by(self, parts: int) -> bool:
        """Return whether rows that arrive in ``parts`` are trained part by part."""


class SampledPhase(PhaseSettings, Protocol):
    """Settings of a phase that samples from the policy it trains."""

    @property
    def samples_per_prompt(self) -> int:
        """Rows of a group."""

    @property
    def draws_again(self) -> bool:
        """Whether a step may sample further prompts."""


@dataclass(frozen=True, kw_only=True)
class ScheduledRecipe:
    """The parts of a recipe that a schedule may contradict."""

    phase: PhaseSettings
    """Settings of the algorithm."""
    sampled: SampledPhase | None
    """The same settings if the algorithm samples rows from the policy; else None."""
    rollout: RolloutConfig
    """Settings of sampling."""
    writer: str | None
    """Section of what writes the rows together with the policy; None if the policy writes them alone."""
    placement: PlacementConfig
    """Pools, and the roles on them."""
    samples_in_one_call: bool
    """Whether a step samples all of its data in one call."""
    updates: int
    """Calls of ``policy.update`` in a step."""


@dataclass(frozen=True, kw_only=True)
class EngineNeed:
    """A capability that a schedule needs of the rollout engine."""

    capability: Capability
    """The capability."""
    because: str
    """The setting that needs it, and its value."""


class Schedule(Section):
    """The order of a phase's steps. A derived class is one order, and its fields are the order's settings."""

    paper: ClassVar[str] = ""
    """Paper that describes the order; empty if none does."""
    needs_samples: ClassVar[bool] = True
    """Whether only an algorithm that samples from the policy can have the order."""
    is_by_group: ClassVar[bool] = False
    """Whether groups are sampled and scored one by one, and a lost replica begins them again."""
    mode: str
    """Name of the order."""

    @property
    def lag(self) -> int:
        """Versions that a trained token may be behind: the bound of staleness."""
        return 0

    @property
    def chunks(self) -> int:
        """Chunks of a step's prompts, whose rows go on to the next stage one after the other."""
        return 1

    @property
    def publishes(self) -> int:
        """Publishes of a step."""
        return 1

    @property
    def is_beside(self) -> bool:
        """Whether the sampler works while the trainer does, and so needs ranks of its own."""
        return self.lag > 0

    @property
    def keeps_cache(self) -> bool:
        """Whether a row that continues with new weights keeps its KV cache."""
        return False

    @property
    def steps_ahead(self) -> int:
        """Steps whose rows, in the data's order, are sampled before the step begins."""
        return 0

    @property
    def said(self) -> str:
        """The settings that chose the order, as errors and notes quote them."""
        return f'schedule.mode is "{self.mode}"'

    def begun(self, phase: SampledPhase) -> tuple[int, int]:
        """Return the most prompts that a step starts, and the rows of each."""
        return phase.prompts_per_step, phase.samples_per_prompt

    def needs(self) -> Sequence[EngineNeed]:
        """Return what the order needs of the rollout engine."""
        return _chunk_needs(self.chunks)

    def contradictions(self, recipe: ScheduledRecipe) -> Iterator[ConfigError]:
        """Yield errors about settings of the recipe with which the order cannot run."""
        chunks, phase = self.chunks, recipe.phase
        if chunks > 1 and phase.goes_by(chunks) and phase.prompts_per_step % chunks:
            fewer = max(each for each in divisors(phase.prompts_per_step) if each <= chunks)
            yield ConfigError(
                f"schedule.stream_chunks is {chunks}, and algorithm.prompts_per_step is "
                f"{phase.prompts_per_step}",
                why="each chunk is trained as it arrives, and unequal chunks would change the minibatches",
                fix=f"set schedule.stream_chunks = {fewer}, or algorithm.shuffle = true",
            )
        if self.is_beside and not recipe.placement.samples_apart:
            yield ConfigError(
                f"{self.said}, and the sampler shares its ranks with the policy",
                why="shared ranks take turns: they cannot sample ahead while they train",
                fix="give the sampler its own pool: placement.pools = { main = 1, answers = 1 }, "
                'placement.roles = { sampler = "answers" }; or set schedule.mode = "in_order"',
            )

    def unread(self, placement: PlacementConfig) -> Sequence[str]:
        """Return the settings of the order that have no effect, such as chunks where roles share ranks."""
        return ["stream_chunks"] if self.chunks == 1 or len(placement.pools) == 1 else []

    def pools(self, devices: int, functions: Sequence[str]) -> PlacementConfig | None:  # noqa: ARG002
        """Return the pools of a recipe that names none; None for one pool.

        Args:
            devices: number of devices that trainer and sampler share.
            functions: roles that are functions and take no device.
        """
        return None

    def pool_notes(self, placement: PlacementConfig) -> Sequence[str]:  # noqa: ARG002
        """Return notes on the pools that the order chose, and how to choose others."""
        return ()

    def notes(self, phase: SampledPhase) -> Iterator[str]:  # noqa: ARG002
        """Yield warnings of settings with which training follows another gradient than the policy's own."""
        yield from ()

    def bound_notes(self, phase: PhaseSettings) -> Sequence[str]:
        """Return a warning if the phase has so few steps that the bound of staleness never applies."""
        oldest = phase.steps * self.publishes - 1
        if self.lag <= max(oldest, 0):
            return []
        return [
            f"warning: schedule.freshness is {self.lag}, and no token of this phase can be more than "
            f"{oldest} version{'' if oldest == 1 else 's'} old (algorithm.steps is {phase.steps}): the bound "
            "never applies, and the first weights may sample every step. 1 to 4 is usual"
        ]

    def shortened(self, phase: SampledPhase, before: int) -> str:  # noqa: ARG002
        """Return a note on a resumed phase that had ``before`` steps, if its end chose other prompts."""
        return ""

    def source(self, parts: PhaseParts) -> Source:
        """Return the source of a phase's prompts and rows.

        Args:
            parts: the ranks, the data and the position of the phase.
        """
        raise NotImplementedError(f"{type(self).__name__} has no source")


def without_one_call(phase: PhaseSettings) -> str:
    """Return the words for an algorithm whose step does not sample its data in one call."""
    return f"{phase.name} does not sample its step in one call"


BEGIN_BEFORE = "a step trains on groups that were sampled before it began, all with the same settings"
"""Reason why an order needs a step that samples its data in one call."""


def _chunk_needs(chunks: int) -> Sequence[EngineNeed]:
    if chunks == 1:
        return ()
    from rillflow.rollout.engine import Capability

    return (EngineNeed(capability=Capability.PARTS, because=f"schedule.stream_chunks is {chunks}"),)
