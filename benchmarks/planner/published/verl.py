"""verl's published steps: Qwen2.5-Math-7B on H20, 512 prompts of 16 answers up to 28k tokens; others on H100.

One mean length for all rows, though answers grew while each ran and differ between runs. Fsdp over all
devices that train, 4 of them share a row (sequence parallelism), copies of tp 4 generate; apart, as many
devices again do. There training takes ``require_batches`` minibatches at once, and weights are published once
per 16 minibatches. What remains of a step in place beside its stages is 10.7 to 11.2 s on 32, 64 and 128
devices: it does not depend on devices, and the rows are as many, so it is counted per row. Rows of
``measured.toml`` are of verl and of EasyR1, which is built on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from published import measured
from published.models import shape
from published.nemo import graph, placed
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan
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
    "touches": (1.0, 6.0, 60.0),
    "decode_launch_s": (1e-5, 5e-5, 3e-4),
    "step_row_s": (1e-4, 1e-3, 5e-3),
}
"""Least, expected and most of what is fitted; ``mean`` is the task's, not the stack's."""
FIXED = Factors(decode_bandwidth=0.7, decode_flops=0.4, decode_row_s=2e-5)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step; runs apart have as many devices again that generate."""

    training: int
    staleness: float | None
    """``staleness_threshold``; None: generation in place."""
    required: int = 0
    """``require_batches``."""
    generate_s: float
    score_s: float
    update_s: float
    step_s: float

    @property
    def is_apart(self) -> bool:
        """Whether generation runs on separate devices."""
        return self.staleness is not None

    @property
    def devices(self) -> int:
        """All devices."""
        return self.training * (1 + self.is_apart)

    @property
    def name(self) -> str:
        """The row in words."""
        if not self.is_apart:
            return f"{self.training} in step"
        return f"{self.training} + {self.training}, staleness {self.staleness:g}, {self.required} required"


def _apart(
    training: int, staleness: float, required: int, *, wait_s: float, update_s: float, step_s: float
) -> Row:
    return Row(
        training=training,
        staleness=staleness,
        required=required,
        generate_s=wait_s,
        score_s=0.0,
        update_s=update_s,
        step_s=step_s,
    )


ROWS = (
    Row(training=32, staleness=None, generate_s=357.41, score_s=107.71, update_s=313.81, step_s=790.1),
    Row(training=64, staleness=None, generate_s=150.72, score_s=70.26, update_s=133.41, step_s=365.28),
    Row(training=128, staleness=None, generate_s=177.85, score_s=53.92, update_s=113.81, step_s=356.3),
    _apart(16, 0.5, 4, wait_s=21.26, update_s=269.8, step_s=294.77),
    _apart(32, 0.5, 4, wait_s=28.46, update_s=156.98, step_s=189.26),
    _apart(64, 0.5, 4, wait_s=33.14, update_s=113.16, step_s=150.63),
    _apart(64, 0.0, 4, wait_s=128.47, update_s=98.77, step_s=231.34),
    _apart(64, 0.1, 4, wait_s=58.17, update_s=109.12, step_s=171.3),
    _apart(64, 0.3, 4, wait_s=38.88, update_s=103.22, step_s=146.11),
)
"""volcengine/verl, docs/advance/fully_async.md of October 2025. Later copies have the updates of the first
and the fourth row the other way round; only so do stages add up to steps. Apart, ``generate_s`` is the wait
for rows.
"""
REQUIRED = (
    _apart(64, 0.5, 1, wait_s=30.88, update_s=181.08, step_s=203.47),
    _apart(64, 0.5, 2, wait_s=26.32, update_s=128.08, step_s=158.72),
    _apart(64, 0.5, 4, wait_s=25.62, update_s=95.06, step_s=124.64),
)
"""Ablation of ``require_batches`` in verl's page; not fitted. With fewer batches at once, answers grew
longer, the page says. The first 100 steps took 3 h 31, 3 h 35 and 3 h 13.
"""


OTHERS = tuple(row for row in measured.rows() if row.stack == "verl")
"""Rows on H100."""
FITTED: tuple[Row | measured.MeasuredRow, ...] = (*ROWS, *OTHERS)
LEFT_OUT = {
    "each row": [[row] for row in FITTED],
    "H100": [list(OTHERS)],
}
"""Which rows are predicted by a fit to all others; without those on H20, their mean length is unknown."""


def change(one: Row, other: Row) -> str:
    """Return what differs between two rows, if it is one thing and other is the row with more of it."""
    if (one.staleness, one.required, 2 * one.devices) == (other.staleness, other.required, other.devices):
        return f"{one.devices} to {other.devices}{', apart' * one.is_apart}"
    if one.devices != other.devices or other.staleness is None:
        return ""
    if one.staleness is None:
        return f"apart on {one.devices}, staleness {other.staleness:g}"
    return f"staleness {one.staleness:g} to {other.staleness:g}" * (one.staleness < other.staleness)


def cluster(row: Row) -> dict[str, Any]:
    """The content of the cluster's file."""
    fleet = {"name": "all", "device": "H20", "devices": row.devices, "per_machine": 8, "between": "25 GB/s"}
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
        graph=graph(0 if row.is_apart else 1),
        shapes={"policy": shape("Qwen2.5-7B")},
        workload=workload,
        hardware=read_hardware(cluster(row), "H20"),
        samples_apart=row.is_apart,
        freshness=row.staleness or 0,
        layouts=LAYOUTS["fsdp"],
    )


def plan(row: Row) -> Plan:
    """The published placement and its settings."""
    grid = Grid(dp=row.training // 4, cp=4, is_sharded=True)
    found = placed(grid, 4, row.training * row.is_apart, row.staleness or 0)
    return replace(found, streams=row.required)


def predict(row: Row, mean: float, factors: Factors | None = None) -> StepEvaluation:
    """What the planner makes of a row, with the shipped factors or others."""
    step = problem(row, mean)
    if factors is not None:
        step = replace(step, hardware=replace(step.hardware, factors=factors))
    return evaluate(step, CostModel(step), plan(row))


def mean_of(row: Row) -> float:
    """Return the mean length with which the shipped factors give the published seconds of the update."""
    low, high = 20.0, 0.5 * LIMIT
    for _ in range(20):
        middle = (low * high) ** 0.5
        is_longer = predict(row, middle).seconds[1] < row.update_s
        low, high = (middle, high) if is_longer else (low, middle)
    return low


def factors_of(values: dict[str, float]) -> Factors:
    """Return the factors with fitted values; the mean length is the task's."""
    return replace(FIXED, **{name: value for name, value in values.items() if name != "mean"})


def ratios(row: Row | measured.MeasuredRow, values: dict[str, float]) -> list[float]:
    """Predicted over published: the step, and where stages were published one after another, each."""
    if isinstance(row, measured.MeasuredRow):
        return measured.ratios(row, factors_of(values))
    found = predict(row, values["mean"], factors_of(values))
    spent = [found.seconds[index] for index in sorted(found.seconds)]
    if row.is_apart:
        return [found.step_s / row.step_s, spent[1] / row.update_s]
    stages = (row.generate_s, row.score_s, row.update_s)
    return [found.step_s / row.step_s, *(mine / told for mine, told in zip(spent, stages, strict=False))]
