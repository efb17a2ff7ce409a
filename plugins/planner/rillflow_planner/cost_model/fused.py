"""Fused: seconds and bytes of two updates that run as one fused stage.

grid of each update ─> UpdatePart: pipeline, what is outside of it ─┐
room on a device ───────────────────────────────────────────────────┴─> FusedProblem ─> seconds, peak bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rillflow.placement.fused.problem import FusedProblem, Pipeline, even, lower_bound
from rillflow.placement.fused.solve import quick_schedule
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model import compute, memory
from rillflow_planner.cost_model.compute import RECOMPUTED, TRAINING, Setting
from rillflow_planner.cost_model.grids import grids_of

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


def parts_of(setting: Setting, grids: Sequence[Grid], name: str) -> list[UpdatePart]:
    """Return an update on each of the grids.

    Raises:
        PlanError: a pass takes no time.
    """
    laid, workload = grids_of(*grids), setting.workload
    load, passes = (
        compute.training_load(setting, laid),
        RECOMPUTED if setting.problem.recomputes else TRAINING,
    )
    work = compute.work_s(setting, load, laid, passes, setting.factors.train_flops)
    forward_s = workload.gradient_share * work / load.micro_batches / passes
    send_s = compute.pipeline_s(setting, load, laid, passes) / load.micro_batches / 2
    beside = memory.training_bytes(setting, laid, 0)
    numbers = {
        "count": load.micro_batches,
        "forward_s": forward_s,
        "send_s": send_s,
        "activation_bytes": memory.training_bytes(setting, laid, 1) - beside,
        "beside_s": compute.beside_s(setting, load, laid),
        "beside_bytes": beside,
        "alone_s": compute.train_s(setting, laid),
    }
    found = []
    for place, grid in enumerate(grids):
        one = {key: float(column[place]) for key, column in numbers.items()}
        passed = {key: one[key] for key in ("forward_s", "send_s", "activation_bytes")}
        passed |= {"backward_s": (passes - 1) * one["forward_s"]}
        made = even(name, stages=grid.pp, micro_batches=int(one["count"]), **passed)
        beside_them = {key: one[key] for key in ("beside_s", "beside_bytes", "alone_s")}
        found.append(UpdatePart(pipeline=made, **beside_them))
    return found


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
