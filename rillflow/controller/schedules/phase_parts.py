"""Phase parts: the ranks, data and saved position of a phase, from which a schedule makes its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rillflow.controller.checkpoint import Checkpoint
from rillflow.controller.decisions import DecisionLog, RecordedDecisions
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.schedules.schedule import PhaseSettings
from rillflow.controller.source import DataStream, GroupSampling
from rillflow.controller.streamed_stages import SharedRanks, StageWorker, streamed_stages
from rillflow.controller.weight_sync import WeightSync
from rillflow.records.batch import Batch
from rillflow.rollout.config import RolloutConfig
from rillflow.workers.backend import Place
from rillflow.workers.restarts import ReplacementStep

Calls: TypeAlias = Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]]
"""Arguments and options of a step's calls, by stage."""


@dataclass(frozen=True, kw_only=True)
class DecisionHistory:
    """Decisions that the run, or the run that it repeats, has made."""

    path: Path
    """The run directory."""
    log: DecisionLog
    """Its file of decisions."""
    repeat: RecordedDecisions | None
    """Decisions that a replay repeats; None for a run."""
    blocked: str
    """Why a resume may not repeat decisions; empty if it may."""


@dataclass(frozen=True, kw_only=True)
class PhaseParts:
    """A phase without its source."""

    phase: PhaseSettings
    """Settings of the algorithm."""
    rollout: RolloutConfig
    """Settings of sampling."""
    calls: Calls
    """The calls of a step."""
    executor: GroupExecutor
    """The groups of ranks."""
    stream: DataStream
    """Prompts of the phase, from the saved position on."""
    position: Mapping[str, Any]
    """What the source saved in addition to the position of the stream."""
    sync: WeightSync | None
    """Transfer of versions to a sampler on its own ranks; None if it shares the policy's ranks."""
    kept: Checkpoint | None
    """The checkpoint that the phase goes on from; None at its start."""
    history: DecisionHistory
    """Decisions that were made."""
    changing: Sequence[str]
    """Roles that the phase trains or moves."""
    restarts: int
    """Replacements of ranks in a row."""
    restart: Callable[[str], Callable[[Sequence[Place]], Iterator[ReplacementStep]] | None]
    """Returns, for a pool, what replaces its ranks; None if they cannot be replaced."""
    copies: Callable[[], Mapping[str, int]]
    """Returns the ranks of one copy of each role's model; without roles that need all ranks."""
    sampling: Callable[[], GroupSampling]
    """Returns the settings of groups that are sampled before a step requests them."""
    rows: Callable[[Sequence[Sequence[int]]], Batch | None]
    """Returns the rows of groups (epoch, prompt) that the phase has drawn; None if there are none."""
    say: Callable[[str], None]
    """Shows the user a line."""

    def streamed(
        self, calls: Calls, *, changing: Sequence[str], most: int, shared: SharedRanks | None = None
    ) -> Sequence[StageWorker]:
        """Return workers of the stages that run group by group; see ``streamed_stages``."""
        return streamed_stages(
            calls,
            self.executor,
            changing=changing,
            most=most,
            step_rows=self.phase.rows_per_step,
            restarts=self.restarts,
            restart=self.restart,
            shared=shared,
        )
