"""PipelineRunner: run a model's micro-batches through its pipeline stages, and record the passes.

Parallel.run ─ PipelineRunner.run ─┬─ forward only ───────────────────────────────> run_pipeline
                                   └─ with backward ─ PipelinePass ─ run_passes ─> RanPasses ─ PipelineRun
                                         ``PipelinePass.run_alone``, unless a plugin has set another one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rillflow.sharding.codec import CutCodec
from rillflow.sharding.mesh import RankGroups, require_processes
from rillflow.sharding.packed_rows import Reading
from rillflow.sharding.pass_times import PassClock
from rillflow.sharding.pipeline import NumberedShare, run_pipeline
from rillflow.workers.arguments import RECORDED_RANKS, PipelineRun, TimedPass
from rillflow.workers.collectives import ProcessRanks

KEPT_RUNS = 4
"""Runs of a call whose passes are recorded: its first optimiser steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RanPasses:
    """Micro-batches that have run forward and backward on one rank."""

    readings: Sequence[Reading]
    """The micro-batches as they were run, padded."""
    passes: tuple[TimedPass, ...]
    """The passes of this rank in order."""
    gain: float | None = None
    """See ``PipelineRun``."""
    bubble: float | None = None
    """See ``PipelineRun``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelinePass:
    """One model's micro-batches with backward passes; see the arguments of ``run_pipeline``."""

    ranks: ProcessRanks
    """The stages, one per rank; the first stage is on the first rank, of a descending model on the last."""
    module: Any
    """The decoder, or this stage's part of it."""
    part: nn.Module
    """Runs this stage: ``part(state, inputs, wanted, read)``."""
    readings: Sequence[Reading]
    """The micro-batches of this replica, the same on every stage."""
    finish: NumberedShare
    """Called on the last stage, in the order of micro-batches."""
    after: Callable[[], None]
    """Called after every backward pass."""
    is_descending: bool = False
    """Whether the first stage is on the last rank."""
    codec: CutCodec | None = None
    """Compresses what the stages send."""

    @property
    def longest(self) -> int:
        """Packed tokens of the longest micro-batch; 0 without micro-batches."""
        return max((reading.size for reading in self.readings), default=0)

    def run_alone(self) -> RanPasses:
        """Run them by ``run_pipeline``."""
        clock = PassClock(self.module.device)
        with torch.enable_grad():
            readings = run_pipeline(
                self.ranks,
                self.module,
                self.part,
                self.readings,
                self.finish,
                self.after,
                is_descending=self.is_descending,
                clock=clock,
                codec=self.codec,
            )
        return RanPasses(readings=readings, passes=clock.passes())


class PipelineRunner:
    """Runs the micro-batches of a model whose stages are on several ranks.

    Args:
        groups: the rank's groups.
        module: the decoder, or this stage's part of it.
        part: runs this stage.
    """

    def __init__(self, groups: RankGroups, module: Any, part: nn.Module) -> None:
        self.groups, self._module, self._part = groups, module, part
        self.run_passes: Callable[[PipelinePass], RanPasses] = PipelinePass.run_alone
        """Runs micro-batches with backward passes; a plugin may set another function on every rank."""
        self.codec: CutCodec | None = None
        """Compresses what the stages send, in training and in scoring."""
        self._runs: list[PipelineRun] = []

    def run(
        self, readings: Sequence[Reading], finish: NumberedShare, after: Callable[[], None] | None
    ) -> Sequence[Reading]:
        """Run all micro-batches forward, and backward if ``after`` is given; see ``run_pipeline``."""
        ranks, is_descending = require_processes(self.groups.pp), self.groups.is_descending
        if after is None:
            return run_pipeline(
                ranks,
                self._module,
                self._part,
                readings,
                finish,
                is_descending=is_descending,
                codec=self.codec,
            )
        ran = self.run_passes(
            PipelinePass(
                ranks=ranks,
                module=self._module,
                part=self._part,
                readings=readings,
                finish=finish,
                after=after,
                is_descending=is_descending,
                codec=self.codec,
            )
        )
        if len(self._runs) < KEPT_RUNS and self.groups.everyone.rank < RECORDED_RANKS:
            self._runs.append(
                PipelineRun(stage=self.groups.stage, passes=ran.passes, gain=ran.gain, bubble=ran.bubble)
            )
        return ran.readings

    def taken_runs(self) -> list[PipelineRun]:
        """Return the first runs with backward passes since the last call."""
        taken, self._runs = self._runs, []
        return taken
