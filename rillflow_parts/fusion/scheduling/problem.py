"""Fused problem: two pipelines in opposite directions on the same devices, and what a schedule of them is.

    device          0      1      2      3      4      5      6      7
    ascending       0  ->  1  ->  2  ->  3  ->  4  ->  5  ->  6  ->  7      8 stages, one replica
    descending      3  <-  2  <-  1  <-  0  |   3  <-  2  <-  1  <-  0      4 stages, two replicas

Every micro-batch runs forwards through the stages of its replica and then backwards. Each pipeline runs its
micro-batches first in, first out on every stage. The two pipelines share no data, so each one can run in the
idle time of the other (RLHFuse, arXiv 2409.13221, section 5). Chimera (arXiv 2107.06925) does the same with
two copies of one model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rillflow.errors import PlanError
from rillflow.placement.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class FusedProblem:
    """Two pipelines on the same devices.

    Raises:
        PlanError: a count, a time or a number of bytes is impossible; the stages of a pipeline do not divide
            the devices; the memory cap is below one micro-batch.
    """

    devices: int
    """Devices, or groups of devices that compute one stage together."""
    ascending: Pipeline
    """The pipeline whose first stage lies on the first device of a replica."""
    descending: Pipeline
    """The pipeline whose first stage lies on the last device of a replica."""
    memory_bytes: float = math.inf
    """Bytes of activations that a device may hold."""

    def __post_init__(self) -> None:
        for each in self.pipelines:
            _check_pipeline(each)
            if self.devices < 1 or self.devices % each.stages:
                raise PlanError(
                    f"{each.stages} stages of {each.name!r} cannot be aligned with {self.devices} devices",
                    why="every device holds one stage of a replica, so stages x replicas = devices",
                    fix=f"take {math.lcm(self.ascending.stages, self.descending.stages)} devices, "
                    "a multiple of them, or other numbers of stages",
                )
            if not each.activation_bytes <= self.memory_bytes:
                raise PlanError(
                    f"a cap of {self.memory_bytes:g} bytes is below one micro-batch of {each.name!r}",
                    why=f"a stage keeps {each.activation_bytes:g} bytes until the backward pass",
                    fix="raise the cap, or take smaller micro-batches or more tensor parallelism",
                )

    @property
    def pipelines(self) -> tuple[Pipeline, Pipeline]:
        """Both pipelines."""
        return self.ascending, self.descending

    def stage(self, pipeline: int, device: int) -> int:
        """Return the stage of a pipeline (0 ascending, 1 descending) that a device holds."""
        stages = self.pipelines[pipeline].stages
        place = device % stages
        return stages - 1 - place if pipeline else place

    def reversed_in_time(self) -> FusedProblem:
        """Return the problem whose schedules, read backwards, are schedules of this one.

        A backward pass read backwards is a forward pass of the same length on the same way.
        """
        turned = [
            replace(each, forward_s=each.backward_s, backward_s=each.forward_s) for each in self.pipelines
        ]
        return replace(self, ascending=turned[0], descending=turned[1])


@dataclass(frozen=True, kw_only=True)
class FusedTask:
    """A forward or backward pass of one micro-batch on one device."""

    pipeline: int
    """0 for the ascending, 1 for the descending pipeline."""
    is_backward: bool
    """Whether it is a backward pass."""
    micro_batch: int
    """Index in its replica, in the order of the forward passes."""
    start_s: float
    """When it begins."""
    end_s: float
    """When it ends."""


@dataclass(frozen=True, kw_only=True)
class FusedSchedule:
    """A schedule of a fused problem."""

    devices: tuple[tuple[FusedTask, ...], ...]
    """Tasks of every device in their order."""
    latency_s: float
    """End of the last task."""
    peak_bytes: tuple[float, ...]
    """Largest number of bytes of activations that each device holds."""


def lower_bound(problem: FusedProblem) -> float:
    """Return a latency in seconds that no schedule can beat, whatever its memory.

    The largest of: each pipeline alone; and for every device, its earliest start, the work of both pipelines
    and the shortest way from its last task to the end.
    """
    found = [each.bound_s for each in problem.pipelines]
    for device in range(problem.devices):
        held = [(each, problem.stage(index, device)) for index, each in enumerate(problem.pipelines)]
        work = sum(each.micro_batches * (each.forward_s[s] + each.backward_s[s]) for each, s in held)
        first = min(each.arrival_s(s) for each, s in held)
        found.append(first + work + min(each.return_s(s) for each, s in held))
    return max(found)


def _check_pipeline(each: Pipeline) -> None:
    """Refuse impossible counts, times and bytes."""
    if each.micro_batches < 1:
        raise PlanError(
            f"{each.name!r} has {each.micro_batches} micro-batches",
            why="a pipeline runs at least one",
            fix="leave out the stage, or give it rows",
        )
    if not each.stages or len(each.backward_s) != each.stages:
        raise PlanError(
            f"{each.name!r} has {each.stages} forward and {len(each.backward_s)} backward times",
            why="every stage needs one forward and one backward time, and there is at least one stage",
            fix="give one time for each stage",
        )
    for stage, spent in enumerate((*each.forward_s, *each.backward_s)):
        if not 0 < spent < math.inf:
            raise PlanError(
                f"stage {stage % each.stages} of {each.name!r} takes {spent:g} seconds",
                why="a pass of a stage takes positive, finite time; without work it would have no place in "
                "the order of its device",
                fix="merge an empty stage with its neighbour",
            )
    for what, value in (("activation bytes", each.activation_bytes), ("seconds to send", each.send_s)):
        if not 0 <= value < math.inf:
            raise PlanError(
                f"{each.name!r} has {value:g} {what}",
                why="a number of bytes or seconds is finite and at least 0",
                fix="correct the number",
            )
