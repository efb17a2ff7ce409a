"""verl's published steps: Qwen2.5-Math-7B on H20, 512 prompts of 16 answers up to 28k tokens.

One mean length for all rows, though answers grew while each ran and differ between runs. Fsdp over all
devices that train, 4 of them share a row (sequence parallelism), copies of tp 4 generate; ahead, as many
devices again do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from published.models import shape
from published.nemo import graph, placed
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.evaluate import StepEvaluation, evaluate
from rillflow_planner.hardware import Factors, read_hardware
from rillflow_planner.problem import Problem
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

LIMIT = 28 * 1024
SIGMA = 1.8
FREE = {
    "mean": (500.0, 2000.0, 8000.0),
    "train_flops": (0.15, 0.4, 0.6),
    "score_flops": (0.15, 0.45, 0.65),
    "decode_launch_s": (1e-5, 5e-5, 3e-4),
    "step_s": (1.0, 8.0, 20.0),
}
"""Least, expected and most of what is fitted; ``mean`` is the task's, not the stack's."""
FIXED = Factors(decode_bandwidth=0.7, decode_flops=0.4, decode_row_s=2e-5)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step; runs ahead have as many devices again that generate."""

    training: int
    is_ahead: bool
    generate_s: float
    score_s: float
    update_s: float
    step_s: float


ROWS = (
    Row(training=32, is_ahead=False, generate_s=357.41, score_s=107.71, update_s=313.81, step_s=790.10),
    Row(training=64, is_ahead=False, generate_s=150.72, score_s=70.26, update_s=133.41, step_s=365.28),
    Row(training=128, is_ahead=False, generate_s=177.85, score_s=53.92, update_s=113.81, step_s=356.30),
    Row(training=16, is_ahead=True, generate_s=21.26, score_s=0.0, update_s=269.80, step_s=294.77),
    Row(training=32, is_ahead=True, generate_s=28.46, score_s=0.0, update_s=156.98, step_s=189.26),
    Row(training=64, is_ahead=True, generate_s=33.14, score_s=0.0, update_s=113.16, step_s=150.63),
)
"""volcengine/verl, docs/advance/fully_async.md of October 2025. Later copies have the updates of the first
and the fourth row the other way round; only so do stages add up to steps."""


def cluster(row: Row) -> dict[str, Any]:
    """The content of the cluster's file."""
    devices = row.training * (1 + row.is_ahead)
    fleet = {"name": "all", "device": "H20", "devices": devices, "per_machine": 8, "between": "25 GB/s"}
    return {"name": "H20", "like": "verl", "machine_type": [fleet]}


def problem(row: Row, mean: float) -> Problem:
    """The step: 16 optimiser steps of 512 rows."""
    workload = Workload(
        prompts=512,
        samples=16,
        prompt=Lengths(kind="fixed", limit=150),
        response=lengths_of_mean(mean, LIMIT, SIGMA),
        minibatches=16,
        tokens_per_micro_batch=4 * 15 * 1024,
    )
    return Problem(
        graph=graph(0 if row.is_ahead else 1),
        shapes={"policy": shape("Qwen2.5-7B")},
        workload=workload,
        hardware=read_hardware(cluster(row), "H20"),
        samples_apart=row.is_ahead,
        freshness=int(row.is_ahead),
        layouts=LAYOUTS["fsdp"],
    )


def predict(row: Row, mean: float, factors: Factors | None = None) -> StepEvaluation:
    """What the planner makes of a row, with the shipped factors or others."""
    step = problem(row, mean)
    if factors is not None:
        step = replace(step, hardware=replace(step.hardware, factors=factors))
    grid = Grid(dp=row.training // 4, cp=4, is_sharded=True)
    plan = placed(grid, 4, row.training if row.is_ahead else 0, int(row.is_ahead))
    return evaluate(step, CostModel(step), plan)


def factors_of(values: dict[str, float]) -> Factors:
    """Return the factors with fitted values; the mean length is the task's."""
    return replace(FIXED, **{name: value for name, value in values.items() if name != "mean"})


def ratios(row: Row, values: dict[str, float]) -> list[float]:
    """Predicted over published: the step, and where stages were published one after another, each."""
    found = predict(row, values["mean"], factors_of(values))
    spent = [found.seconds[index] for index in sorted(found.seconds)]
    if row.is_ahead:
        return [found.step_s / row.step_s, spent[1] / row.update_s]
    stages = (row.generate_s, row.score_s, row.update_s)
    return [found.step_s / row.step_s, *(mine / told for mine, told in zip(spent, stages, strict=False))]
