"""SharedPipeline: run a model's passes alone, or together with the other model's on the same ranks.

    PipelineRunner ─ SharedPipeline ─┬─ no partner ──────────────────────────────> PipelinePass.run_alone
                                     └─ BatonSide.meet ─ both ─ sizes and times of all ranks
                                                            ├─ small gain ───────> run_alone, in turn
                                                            └─ FusedSchedules ───> run_fused

All ranks exchange sizes and times before they choose, so all choose the same schedule. The times are those of
the passes before. Before the first ones a stage counts by its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rillflow.placement.pipeline import Pipeline
from rillflow.sharding.mesh import RankGroups
from rillflow.sharding.pass_times import median_s
from rillflow.sharding.pipeline_runner import PipelinePass, PipelineRunner, RanPasses
from rillflow_parts.fusion.alternating_calls import BatonSide
from rillflow_parts.fusion.fused_pipeline import run_fused
from rillflow_parts.fusion.scheduling.problem import FusedSchedule
from rillflow_parts.fusion.scheduling.step import StepPlan, step_plan

_MORE = 0.25
"""Activations that a rank may hold beyond those of the larger pipeline alone; at least of a micro-batch."""
_KEPT_SCHEDULES = 16
_ALIKE = 0.25
"""Relative change of a stage's share of the time up to which a schedule is used again."""


class SharedPipeline:
    """Passes of one model on this rank, which another model may share.

    Args:
        groups: the rank's groups.
    """

    def __init__(self, groups: RankGroups) -> None:
        self.groups = groups
        self.side: BatonSide | None = None
        """BatonSide of a call that shares its passes with another model's; None alone."""
        self.gain: float | None = None
        """Predicted share of the time that fusing the current passes saves; None without a partner."""
        self.seconds = 0.0, 0.0
        """Seconds of the last passes for one packed token, forward and backward; 0 if there were none."""
        self.schedules = FusedSchedules()

    @classmethod
    def of(cls, runner: PipelineRunner) -> SharedPipeline:
        """Return the one that a model's runner uses; let the runner use a new one if it has none."""
        if not isinstance(runner.run_passes, cls):
            runner.run_passes = cls(runner.groups)
        return runner.run_passes

    def __call__(self, given: PipelinePass) -> RanPasses:
        """Run the micro-batches of a model."""
        self.gain, shared = None, None
        if self.side is not None:
            shared = self.side.meet(WaitingPipeline(pipeline=self, given=given), run_together)
        ran = replace(shared or given.run_alone(), gain=self.gain)
        if ran.readings:
            forward_s, backward_s = (median_s(ran.passes, is_backward=back) for back in (False, True))
            self.seconds = forward_s / ran.readings[0].size, backward_s / ran.readings[0].size
        return ran

    def facts(self, given: PipelinePass) -> list[float]:
        """Return what other ranks need to know of a waiting pipeline: a row of ``_pipeline``'s facts."""
        config = given.module.config.get_text_config()
        layers = config.num_hidden_layers / self.groups.pp.size
        kept = config.hidden_size * layers * given.module.dtype.itemsize
        parameters = sum(weight.numel() for weight in given.module.parameters())
        return [len(given.readings), given.longest, *self.seconds, parameters, kept]


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitingPipeline:
    """A model's micro-batches that wait for the other model's."""

    pipeline: SharedPipeline
    """Runs the model's passes."""
    given: PipelinePass
    """The micro-batches."""


def run_together(one: WaitingPipeline, other: WaitingPipeline) -> tuple[RanPasses, RanPasses] | None:
    """Run the micro-batches of two models by a common schedule; None if each had better run alone."""
    if one.pipeline.groups.is_descending:
        shared = run_together(other, one)
        return None if shared is None else (shared[1], shared[0])
    plan = one.pipeline.schedules.plan(one, other)
    if plan is None:
        return None
    one.pipeline.gain = other.pipeline.gain = plan.gain
    if not plan.pays:
        return None
    if not (one.given.readings or other.given.readings):
        return RanPasses(readings=(), passes=()), RanPasses(readings=(), passes=())
    first, second = run_fused(one.given, other.given, plan.schedule)
    return replace(first, bubble=plan.idle), replace(second, bubble=plan.idle)


class FusedSchedules:
    """Schedules of two models' micro-batches; all ranks have the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[list[float], StepPlan]] = {}

    def plan(self, ascending: WaitingPipeline, descending: WaitingPipeline) -> StepPlan | None:
        """Return the plan for the micro-batches that wait on all ranks; every rank calls it.

        If it pays, its schedule is that of this rank's block. None if one of the models has no micro-batch on
        any rank.
        """
        both, groups = (ascending, descending), ascending.pipeline.groups
        own = [each.pipeline.facts(each.given) for each in both]
        found = groups.everyone.stack(torch.tensor(own, dtype=torch.float64))
        counts = found[:, :, 0].max(0).values.long().tolist()
        if not all(counts):
            return None
        is_measured = bool((found[:, :, 2:4] > 0).all())  # of both: seconds and parameters do not compare
        pipelines = [
            _pipeline(found[:, index], each.pipeline.groups, name, is_measured=is_measured)
            for index, (each, name) in enumerate(zip(both, ("ascending", "descending"), strict=True))
        ]
        made = self._step_plan((counts[0], counts[1]), pipelines, is_measured=is_measured)
        if not made.pays:
            return made
        return replace(made, schedule=_of_block(made.schedule, found[:, :, 0].long().tolist(), groups))

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
    """Return a model's pipeline from the facts [R, 6] of all ranks; see ``SharedPipeline.facts``."""
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
