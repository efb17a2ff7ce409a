"""Fusion: run a model's pipeline alone, or together with the other model's on the same ranks.

    Parallel.run ─ PipelineRunner.run ─┬─ no partner ─────────────────────────────────> run_pipeline
                                       └─ BatonSide.meet ─ both ─ sizes and times of all ranks
                                                              ├─ small gain ──────────> run_pipeline, in turn
                                                              └─ FusedSchedules ──────> run_fused

All ranks exchange sizes and times before they choose, so all choose the same schedule. The times are those of
the passes before. Before the first ones a stage counts by its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.placement.fused.problem import FusedSchedule, Pipeline
from rillflow.placement.fused.step import StepPlan, step_plan
from rillflow.sharding.fused_pipeline import PipelinePass, run_fused
from rillflow.sharding.mesh import RankGroups, require_processes
from rillflow.sharding.packed_rows import Reading
from rillflow.sharding.pass_times import PassClock, median_s
from rillflow.sharding.pipeline import NumberedShare, run_pipeline
from rillflow.workers.baton import BatonSide
from rillflow.workers.values import RECORDED_RANKS, PipelineRun, TimedPass

KEPT_RUNS = 4
"""Runs of a call whose passes are recorded: its first optimiser steps."""
_MORE = 0.25
"""Activations that a rank may hold beyond those of the larger pipeline alone; at least of a micro-batch."""
_KEPT_SCHEDULES = 16
_ALIKE = 0.25
"""Relative change of a stage's share of the time up to which a schedule is used again."""


class PipelineRunner:
    """Runs the micro-batches of a model whose stages are on several ranks.

    Args:
        groups: the rank's groups.
        module: the decoder, or this stage's part of it.
        part: runs this stage.
    """

    def __init__(self, groups: RankGroups, module: Any, part: nn.Module) -> None:
        self.groups, self._module, self._part = groups, module, part
        self.side: BatonSide | None = None
        """BatonSide of a call that shares its passes with another model's; None alone."""
        self.seconds = 0.0, 0.0
        """Seconds of the last passes for one packed token, forward and backward; 0 if there were none."""
        self.schedules = FusedSchedules()
        self._runs: list[PipelineRun] = []

    def run(
        self, readings: Sequence[Reading], finish: NumberedShare, after: Callable[[], None] | None
    ) -> Sequence[Reading]:
        """Run all micro-batches forward, and backward if ``after`` is given; see ``run_pipeline``."""
        ranks, is_descending = require_processes(self.groups.pp), self.groups.is_descending
        if after is None:
            return run_pipeline(
                ranks, self._module, self._part, readings, finish, is_descending=is_descending
            )
        given = PipelinePass(
            ranks=ranks,
            module=self._module,
            part=self._part,
            readings=readings,
            finish=finish,
            after=after,
        )
        shared: SharedRun | None = None
        if self.side is not None:
            shared = self.side.meet(WaitingPipeline(runner=self, given=given), run_together)
        if shared is None or shared.readings is None:
            clock = PassClock(self._module.device)
            found: Sequence[Reading] = given.run_alone(is_descending=is_descending, clock=clock)
            passes, gain, bubble = clock.passes(), None if shared is None else shared.gain, None
        else:
            found, passes, gain, bubble = shared.readings, shared.passes, shared.gain, shared.bubble
        if found:
            size = found[0].size
            self.seconds = (
                median_s(passes, is_backward=False) / size,
                median_s(passes, is_backward=True) / size,
            )
        if len(self._runs) < KEPT_RUNS and self.groups.everyone.rank < RECORDED_RANKS:
            run = PipelineRun(stage=self.groups.stage, passes=passes, gain=gain, bubble=bubble)
            self._runs.append(run)
        return found

    def taken_runs(self) -> list[PipelineRun]:
        """Return the first runs with backward passes since the last call."""
        taken, self._runs = self._runs, []
        return taken

    def facts(self, given: PipelinePass) -> list[float]:
        """Return what other ranks need to know of a waiting pipeline: a row of ``_Known``."""
        config = self._module.config.get_text_config()
        layers = config.num_hidden_layers / self.groups.pp.size
        kept = config.hidden_size * layers * self._module.dtype.itemsize
        parameters = sum(weight.numel() for weight in self._module.parameters())
        return [len(given.readings), given.longest, *self.seconds, parameters, kept]


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitingPipeline:
    """A model's micro-batches that wait for the other model's."""

    runner: PipelineRunner
    """The model's runner."""
    given: PipelinePass
    """The micro-batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedRun:
    """A model's part of a run together with another model."""

    gain: float
    """Predicted share of the time that fusing saves."""
    readings: Sequence[Reading] | None = None
    """The micro-batches as they were run, padded; None if the model is to run alone."""
    passes: tuple[TimedPass, ...] = ()
    """The passes of this rank."""
    bubble: float | None = None
    """Predicted share of idle time."""


def run_together(one: WaitingPipeline, other: WaitingPipeline) -> tuple[SharedRun, SharedRun] | None:
    """Run the micro-batches of two models by a common schedule; None if a model has none on any rank."""
    if one.runner.groups.is_descending:
        shared = run_together(other, one)
        return None if shared is None else (shared[1], shared[0])
    plan = one.runner.schedules.plan(one, other)
    if plan is None:
        return None
    if plan.schedule is None:
        return SharedRun(gain=plan.gain), SharedRun(gain=plan.gain)
    if not (one.given.readings or other.given.readings):
        return SharedRun(gain=plan.gain, readings=()), SharedRun(gain=plan.gain, readings=())
    run = run_fused(one.given, other.given, plan.schedule)
    first, second = (
        SharedRun(
            gain=plan.gain,
            readings=run.readings[index],
            passes=run.passes[index],
            bubble=plan.bubble,
        )
        for index in range(2)
    )
    return first, second


@dataclass(frozen=True, kw_only=True)
class FusedPlan:
    """The schedule of two models' micro-batches on the ranks of this block."""

    gain: float
    """Predicted share of the time that it saves of both pipelines in turn."""
    schedule: FusedSchedule | None = None
    """The orders of its devices; None if the gain is too small."""
    bubble: float = 0.0
    """Predicted share of idle time."""


class FusedSchedules:
    """Schedules of two models' micro-batches; all ranks have the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[list[float], StepPlan]] = {}

    def plan(self, ascending: WaitingPipeline, descending: WaitingPipeline) -> FusedPlan | None:
        """Return the plan for the micro-batches that wait on all ranks; every rank calls it.

        None if one of the models has no micro-batch on any rank.
        """
        both, groups = (ascending, descending), ascending.runner.groups
        own = [each.runner.facts(each.given) for each in both]
        found = groups.everyone.stack(torch.tensor(own, dtype=torch.float64))
        counts = found[:, :, 0].max(0).values.long().tolist()
        if not all(counts):
            return None
        is_measured = bool((found[:, :, 2:4] > 0).all())  # of both: seconds and parameters do not compare
        pipelines = [
            _pipeline(found[:, index], each.runner.groups, name, is_measured=is_measured)
            for index, (each, name) in enumerate(zip(both, ("ascending", "descending"), strict=True))
        ]
        made = self._step_plan((counts[0], counts[1]), pipelines, is_measured=is_measured)
        if not made.pays:
            return FusedPlan(gain=made.gain)
        schedule = _of_block(made.schedule, found[:, :, 0].long().tolist(), groups)
        return FusedPlan(gain=made.gain, schedule=schedule, bubble=made.idle)

    def _step_plan(
        self, counts: tuple[int, int], pipelines: Sequence[Pipeline], *, is_measured: bool
    ) -> StepPlan:
        """Return a plan, from memory if stages take about the same shares of the time."""
        times = [spent for each in pipelines for spent in (*each.forward_s, *each.backward_s)]
        shares = [spent / sum(times) for spent in times]
        begin: FusedSchedule | None = None
        if counts in self._known:
            before, made = self._known.pop(counts)
            if all(abs(new - old) <= _ALIKE * old for new, old in zip(shares, before, strict=True)):
                self._known[counts] = before, made
                return made
            begin = made.schedule
        if len(self._known) >= _KEPT_SCHEDULES:
            del self._known[next(iter(self._known))]
        alone = max(min(each.stages, each.micro_batches) * each.activation_bytes for each in pipelines)
        more = max(_MORE * alone, *(each.activation_bytes for each in pipelines))
        made = step_plan(*pipelines, memory_bytes=alone + more, begin=begin, is_measured=is_measured)
        self._known[counts] = shares, made
        return made


def _pipeline(facts: Tensor, groups: RankGroups, name: str, *, is_measured: bool) -> Pipeline:
    """Return a model's pipeline from the facts [R, 6] of all ranks; see ``PipelineRunner.facts``."""
    micro_batches, longest = int(facts[:, 0].max()), float(facts[:, 1].max())
    by_stage = [
        facts[[rank for rank in groups.mesh.ranks if groups.mesh.coordinates(rank)["pp"] == stage]]
        for stage in range(groups.pp.size)
    ]
    each_s = [
        (float(rows[:, 2].mean()), float(rows[:, 3].mean()))
        if is_measured
        else (float(rows[:, 4].mean()), 2 * float(rows[:, 4].mean()))
        for rows in by_stage
    ]
    return Pipeline(
        name=name,
        micro_batches=micro_batches,
        forward_s=tuple(forward_s * longest for forward_s, _ in each_s),
        backward_s=tuple(backward_s * longest for _, backward_s in each_s),
        activation_bytes=float(facts[:, 5].max()) * longest,
    )


def _of_block(made: FusedSchedule, counts: Sequence[Sequence[int]], groups: RankGroups) -> FusedSchedule:
    """Return the schedule for the replicas of this rank's block, without micro-batches that they lack.

    Args:
        made: schedule of the most micro-batches.
        counts: micro-batches of both models, by rank.
        groups: groups of one of the models.
    """
    width, devices = groups.tp.size, len(made.devices)
    block, place = groups.everyone.rank // (width * devices), groups.everyone.rank % width
    ranks = [(block * devices + device) * width + place for device in range(devices)]
    kept = tuple(
        tuple(task for task in tasks if task.micro_batch < counts[rank][task.pipeline])
        for rank, tasks in zip(ranks, made.devices, strict=True)
    )
    return replace(made, devices=kept)
