"""Measured steps beside those that the sets of published stacks were fitted to: each row is one step.

    measured.toml ── row ── cluster, workload, grid ── evaluate ──> seconds of the stages and of the step

Rows of the stack ``gpu`` are Rillflow's own, from the pages of ``benchmarks/results``. They are of one model
on one type of device: a fit explains them and none is left out, so no range follows. The others are published
steps of other stacks, devices and precisions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from published.models import shape
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import Factors, read_hardware, shipped_stacks
from rillflow_planner.problem import Problem
from rillflow_planner.workload import Lengths, Packing, Workload, lengths_of_mean

OWN = "gpu"
"""Stack of Rillflow's own steps."""
STAGES = ("generate", "score", "update")
OWN_FREE = {
    "train_flops": (0.1, 0.5, 0.75),
    "score_flops": (0.1, 0.43, 0.65),
    "touches": (1.0, 6.0, 60.0),
    "launch_s": (5e-5, 3e-4, 2e-3),
    "decode_launch_s": (1e-5, 1e-4, 1e-3),
    "decode_token_s": (1e-5, 5e-4, 5e-3),
    "decode_row_s": (1e-7, 2e-6, 5e-5),
}
"""Least, expected and most of what is fitted to Rillflow's own steps."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A measured step, or those of its stages that were measured; 0 for the others."""

    name: str
    page: str
    device: str
    prompts: int
    samples: int
    prompt: int
    answer: float
    stack: str = OWN
    model: str = "Qwen2.5-0.5B, a head of its own"
    assumed: str = ""
    devices: int = 1
    limit: int = 0
    sigma: float = 0.0
    minibatches: int = 1
    scored: int = 0
    micro: int = Workload.tokens_per_micro_batch
    dtype: Literal["float8", "bfloat16"] = "bfloat16"
    recomputes: bool = False
    gradient_share: float = 1.0
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    fsdp: bool = False
    generate_tp: int = 1
    separate: int = 0
    ahead: int = 0
    generate_s: float = 0.0
    score_s: float = 0.0
    update_s: float = 0.0
    step_s: float = 0.0

    @property
    def measured(self) -> dict[str, float]:
        """Measured seconds of the stages and of the whole step, by name."""
        return {name: vars(self)[f"{name}_s"] for name in (*STAGES, "step") if vars(self)[f"{name}_s"]}


@cache
def rows() -> list[MeasuredRow]:
    """Return all rows."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return [MeasuredRow(**row) for row in found["row"]]


def problem(row: MeasuredRow) -> Problem:
    """Return the step; of Rillflow's own, only with the stages that were measured."""
    has_update = bool(row.update_s or row.step_s)
    scored = row.scored or int(row.score_s > 0)
    calls = ["generate", *["logprobs"] * scored, *["update"] * has_update, "publish"]
    stages = tuple(
        Stage(index=index, role="policy", endpoint=endpoint, reads=(), writes=())
        for index, endpoint in enumerate(calls)
    )
    edges = tuple(Edge(source=index, destination=index + 1, fields=()) for index in range(len(calls) - 1))
    once = (row.prompt + row.samples * row.answer) / (row.samples * (row.prompt + row.answer))
    answers = lengths_of_mean(row.answer, row.limit, row.sigma) if row.sigma else None
    workload = Workload(
        prompts=row.prompts,
        samples=row.samples,
        prompt=Lengths(kind="fixed", limit=row.prompt),
        response=answers or Lengths(kind="fixed", limit=int(row.answer)),
        minibatches=row.minibatches,
        tokens_per_micro_batch=row.micro,
        dtype=row.dtype,
        packing=Packing(trained=once, scored=once) if row.stack == OWN else Packing(),
        gradient_share=row.gradient_share,
    )
    fleet = {
        "device": row.device,
        "devices": row.devices,
        "per_machine": min(row.devices, 8),
        "between": "50 GB/s",
    }
    hardware = read_hardware({"name": row.device, "like": row.stack, "machine_type": [fleet]}, row.name)
    return Problem(
        graph=Graph(name="grpo", stages=stages, edges=edges),
        shapes={"policy": shape(row.model)},
        workload=workload,
        hardware=hardware,
        samples_apart=row.separate > 0,
        freshness=row.ahead,
        layouts=LAYOUTS[hardware.published.layouts if hardware.published else "rillflow"],
        recomputes=row.recomputes,
    )


def plan(row: MeasuredRow) -> Plan:
    """Return the placement of a row."""
    training, kind = row.devices - row.separate, row.device.lower()
    dp = training // (row.tp * row.cp * row.pp)
    grid = Grid(dp=dp, pp=row.pp, tp=row.tp, cp=row.cp, ep=row.ep, is_sharded=row.fsdp)
    pools = [PlannedPool(name="train", machine_type=kind, devices=training)]
    units = {
        "policy": PlannedUnit(pool="train", grid=grid, generate_tp=0 if row.separate else row.generate_tp)
    }
    if row.separate:
        pools.append(PlannedPool(name="sample", machine_type=kind, devices=row.separate))
        own = Grid(dp=row.separate // row.generate_tp, tp=row.generate_tp)
        units[SAMPLER] = PlannedUnit(pool="sample", grid=own, generate_tp=row.generate_tp)
    return Plan(name=row.name, pools=tuple(pools), units=units, freshness=row.ahead)


def predict(row: MeasuredRow, factors: Factors | None = None) -> dict[str, float]:
    """Return predicted seconds of the measured stages, and of the step, with shipped factors or others."""
    step = problem(row)
    step = step if factors is None else replace(step, hardware=replace(step.hardware, factors=factors))
    evaluation = evaluate(step, CostModel(step), plan(row))
    spent = dict.fromkeys(STAGES, 0.0) | {"step": evaluation.step_s}
    for stage in step.graph.stages:
        name = "score" if stage.endpoint == "logprobs" else stage.endpoint
        spent[name] = spent.get(name, 0.0) + evaluation.seconds[stage.index]
    return {name: spent[name] for name in row.measured}


def own_factors(values: dict[str, float]) -> Factors:
    """Return the factors with fitted values; links and experts keep those of published steps."""
    theirs = shipped_stacks()["nemo-rl"].factors
    return replace(theirs, refit=0.0, refit_separate=0.0, step_s=0.0, **values)


def ratios(row: MeasuredRow, factors: Factors | None = None) -> list[float]:
    """Return predicted over measured: the step first, if it was measured, then the stages."""
    found = predict(row, factors)
    names = sorted(row.measured, key=lambda name: name != "step")
    return [found[name] / row.measured[name] for name in names]


def own_ratios(row: MeasuredRow, values: dict[str, float]) -> list[float]:
    """Return predicted over measured with fitted values."""
    return ratios(row, own_factors(values))


def lines(rows: Sequence[MeasuredRow]) -> list[str]:
    """Return the table of measured rows: every stage and the step, measured and predicted."""
    found = ["| step | source | set | devices | stage | measured | predicted | error |", "|---" * 8 + "|"]
    for row in rows:
        for name, seconds in predict(row).items():
            told = row.measured[name]
            found.append(
                f"| {row.name} | {row.page} | {row.stack} | {row.devices} {row.device} | {name} | {told:g} "
                f"| {seconds:.3g} | {seconds / told - 1:+.0%} |"
            )
    assumed = {row.name: row.assumed for row in rows if row.assumed}
    return [*found, "", *(f"Assumed of {name}: {what}." for name, what in assumed.items()), ""]
