"""Fused: seconds and bytes of two updates that run as one fused stage.

grid of each update ─> UpdatePart: pipeline, what is outside of it ─┐
room on a device ───────────────────────────────────────────────────┴─> FusedProblem ─> seconds, peak bytes
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rillflow.placement.grid import Grid
from rillflow.placement.pipeline import Pipeline
from rillflow_parts.fusion.scheduling.problem import FusedProblem, lower_bound
from rillflow_parts.fusion.scheduling.solve import quick_schedule
from rillflow_planner.cost_model import compute, memory
from rillflow_planner.cost_model.compute import RECOMPUTED, TRAINING, Setting

ROUNDS = 4
"""Rounds of a search for a schedule; 0 takes the lower bound instead of a schedule."""
PASSES = 2048
"""Most passes of a searched schedule. Longer pipelines are searched with fewer micro-batches."""


@dataclass(frozen=True, kw_only=True)
class UpdatePart:
    """One of two fused updates on a grid."""

    pipeline: Pipeline
    """Passes of an optimiser step on one replica."""
    beside_s: float
    """Seconds of an optimiser step outside the pipeline: all-reduce, Adam."""
    beside_bytes: float
    """Bytes beside the activations of its micro-batches: logits, a recomputed layer."""
    alone_s: float
    """Seconds of a step's whole update without fusion."""


def part_of(setting: Setting, grid: Grid, name: str) -> UpdatePart:
    """Return an update on a grid.

    Raises:
        PlanError: a pass takes no time.
    """
    load, passes = (
        compute.training_load(setting, grid),
        RECOMPUTED if setting.problem.recomputes else TRAINING,
    )
    work = compute.work_of(setting, load, grid, passes, setting.factors.train_flops)
    share = float(setting.workload.gradient_share / load.micro_batches / passes)
    stages, beside = compute.stages_of(setting, grid), float(memory.training_bytes(setting, grid, 0))
    layer_s, head_s = share * (work.layer_s + work.stage_s / stages.most), share * work.head_s
    layers = stage_counts(setting.shape.layers, grid.pp, int(stages.first), int(stages.last))
    forward_s = [float(count * layer_s) for count in layers]
    forward_s[-1] += float(head_s)
    pipeline = Pipeline(
        name=name,
        micro_batches=int(load.micro_batches),
        forward_s=tuple(forward_s),
        backward_s=tuple((passes - 1) * spent for spent in forward_s),
        send_s=float(compute.pipeline_s(setting, load, grid, passes) / load.micro_batches / 2),
        activation_bytes=float(memory.training_bytes(setting, grid, 1)) - beside,
    )
    return UpdatePart(
        pipeline=pipeline,
        beside_s=float(compute.beside_s(setting, load, grid)),
        beside_bytes=beside,
        alone_s=float(compute.train_s(setting, grid)),
    )


def stage_counts(layers: int, stages: int, first: int, last: int) -> list[int]:
    """Return the layers of every stage; earlier ones in the middle have more."""
    if stages == 1:
        return [layers]
    size, more = divmod(layers - first - last, max(stages - 2, 1))
    return [first, *(size + (place < more) for place in range(stages - 2)), last]


def fused_problem(ascending: UpdatePart, descending: UpdatePart, *, room_bytes: float) -> FusedProblem:
    """Return the problem of two updates on aligned grids.

    Args:
        ascending: the first update.
        descending: the second update.
        room_bytes: bytes of a device beside weights and optimisers.

    Raises:
        PlanError: a micro-batch does not fit, or the stages are not aligned.
    """
    return FusedProblem(
        devices=max(ascending.pipeline.stages, descending.pipeline.stages),
        ascending=ascending.pipeline,
        descending=descending.pipeline,
        memory_bytes=room_bytes - max(ascending.beside_bytes, descending.beside_bytes),
    )


def scheduled(problem: FusedProblem, rounds: int) -> tuple[float, float]:
    """Return the seconds of a fused schedule, and the bytes of activations at its peak.

    A problem of more than ``PASSES`` passes is searched with proportionally fewer micro-batches; its seconds
    are its own lower bound, longer by the same factor.
    """
    bound_s = lower_bound(problem)
    if not rounds:
        return bound_s, max(each.activation_bytes for each in problem.pipelines)
    count = 2 * problem.devices * sum(each.micro_batches for each in problem.pipelines)
    less = [
        replace(each, micro_batches=max(each.micro_batches * PASSES // max(count, PASSES), 1))
        for each in problem.pipelines
    ]
    short = replace(problem, ascending=less[0], descending=less[1])
    found = quick_schedule(short, rounds=rounds)
    return bound_s * found.latency_s / lower_bound(short), max(found.peak_bytes)
