"""Plan of one training step: a fused schedule found in little time, and the time of both pipelines in turn.

micro-batches and seconds of a pass, by stage ── Pipeline, Pipeline ─┬─ in_1f1b ───> alone_s ─┐
schedule of the step before ─────────────────────────────────────────┴─ schedule ─────────────┴─> StepPlan
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from zlib import crc32

from rillflow.placement.pipeline import Pipeline
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule
from rillflow_parts.fusion.scheduling.solve import BUDGET, schedule

LEAST_GAIN = 0.03
"""Share of the time that a fused schedule must save; with less, run the pipelines one after the other."""
_TASK_S = 2e-6
"""Seconds in which a search times one pass, once; a schedule has all passes of all devices."""
_SEARCH_S, _SEARCH_SHARE = 0.1, 0.01
"""Time of a search: this many seconds, or this share of the step if that is longer."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A fused schedule of one step, and the time without fusion.

    Example:
        plan = step_plan(actor, critic)
        run_fused(..., plan.schedule) if plan.pays else ...
    """

    schedule: FusedSchedule
    """The fused schedule."""
    alone_s: float
    """Seconds of both pipelines one after the other, each in 1F1B."""
    idle: float
    """Share of the devices' time in which they wait."""

    @property
    def gain(self) -> float:
        """Return the share of time that the fused schedule saves."""
        return 1 - self.schedule.latency_s / self.alone_s

    @property
    def pays(self) -> bool:
        """Return whether the fused schedule saves enough."""
        return self.gain >= LEAST_GAIN


def step_plan(
    ascending: Pipeline,
    descending: Pipeline,
    *,
    memory_bytes: float | None = None,
    begin: FusedSchedule | None = None,
    is_measured: bool = False,
) -> StepPlan:
    """Return a fused schedule, found in about 0.1 s or 1% of the step, and the time without fusion.

    It depends on the arguments alone, so ranks with equal arguments have the same.

    Args:
        ascending: the pipeline whose first stage is on the first device.
        descending: the pipeline whose first stage is on the last device.
        memory_bytes: cap on activations; left out, what the larger pipeline needs alone in 1F1B.
        begin: schedule of the step before; ignored if its micro-batches differ.
        is_measured: whether the pipelines' times are seconds; otherwise only their ratios count.
    """
    pipelines = ascending, descending
    alone = [each.activation_bytes * min(each.stages, each.micro_batches) for each in pipelines]
    problem = FusedProblem(
        devices=lcm(ascending.stages, descending.stages),
        ascending=ascending,
        descending=descending,
        memory_bytes=max(alone) if memory_bytes is None else memory_bytes,
    )
    alone_s = in_1f1b(ascending) + in_1f1b(descending)
    search_s = max(_SEARCH_S, _SEARCH_SHARE * alone_s if is_measured else 0.0)
    tasks = 2 * problem.devices * (ascending.micro_batches + descending.micro_batches)
    found = schedule(
        problem,
        budget=min(BUDGET, max(20, int(search_s / (_TASK_S * tasks)))),
        seed=crc32(repr(problem).encode()),  # so that a later step tries other paces
        begin=begin if begin is not None and _is_of(problem, begin) else None,
    )
    work_s = sum(task.end_s - task.start_s for tasks in found.devices for task in tasks)
    idle = 1 - work_s / (problem.devices * found.latency_s)
    return StepPlan(schedule=found, alone_s=alone_s, idle=idle)


def in_1f1b(pipeline: Pipeline) -> float:
    """Return the seconds of a pipeline alone, in 1F1B.

    A stage runs as many micro-batches ahead as there are stages after it, then one backward and one forward
    pass in turn.
    """
    stages, count = pipeline.stages, pipeline.micro_batches
    there, back = ([[0.0] * count for _ in range(stages)] for _ in range(2))
    free = [0.0] * stages

    def run(stage: int, one: int, *, is_backward: bool) -> None:
        """Append a pass to a stage; its inputs are known."""
        if is_backward:
            ready = back[stage + 1][one] + pipeline.send_s if stage < stages - 1 else there[stage][one]
            back[stage][one] = free[stage] = max(free[stage], ready) + pipeline.backward_s[stage]
        else:
            ready = there[stage - 1][one] + pipeline.send_s if stage else 0.0
            there[stage][one] = free[stage] = max(free[stage], ready) + pipeline.forward_s[stage]

    for turn in range(count + stages):  # backward passes of a turn end before its forward passes begin
        for stage in reversed(range(stages)):
            one = turn - (stages - stage)
            if 0 <= one < count:
                run(stage, one, is_backward=True)
        for stage in range(stages):
            if turn < count:
                run(stage, turn, is_backward=False)
    return max(free)


def _is_of(problem: FusedProblem, schedule: FusedSchedule) -> bool:
    """Return whether a schedule has the problem's devices and micro-batches."""
    counts = [2 * each.micro_batches for each in problem.pipelines]
    return len(schedule.devices) == problem.devices and all(
        [sum(task.pipeline == index for task in tasks) for index in range(2)] == counts
        for tasks in schedule.devices
    )
