"""NeMo-RL's published steps: each row is a command of ``rillflow plan``.

    row ─ command ─> words of ``rillflow plan`` ─ statement ─> Problem, Plan ─ evaluate ─> seconds

- A prompt has 110 tokens. Lengths are log-normal, clipped at the limit, with the published mean; sigma 0.6 of
  short answers and 0.9 of long ones are figures others use for such data.
- Two forward passes, policy and reference; one in release 0.7, whose recipes set ``force_on_policy_ratio``.
- Release 0.7 decodes DeepSeek-V3 with its own next-token layer: by its pull request 2779 generation then
  takes 40.1 s instead of 57.4.
- Before release 0.5 a weight update waited for the batch; rows are not interrupted.
- Its recipes for several racks of GB200 say since release 0.7 which nodes must share one (pull request 2612,
  ``cluster.segment_size``). Before, a group's ranks could lie in any rack, so the factor sets of older
  releases have ``scatters``. How its older runs did lie was not published.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import StepEvaluation, evaluate
from rillflow_planner.hardware import Factors
from rillflow_planner.planning import stated
from rillflow_planner.plugin import plan_arguments
from rillflow_planner.problem import Statement

PROMPT_TOKENS = 110
SIGMA = {"Llama-3.1-8B": 0.6, "Llama-3.1-70B": 0.6, "DeepSeek-V3": 0.6}
LONG_SIGMA = 0.9
RECOMPUTED = {"Llama-3.1-8B", "DeepSeek-V3", "Qwen3-235B-A22B"}
"""Models whose recipes since 0.4 recompute activations."""
STAGES = ("generate", "score", "update", "refit")
ROOT = Path(__file__).parents[3]
CONFIGS_FOLDER = "benchmarks/planner/published/configs"
FREE = {
    "train_flops": (0.2, 0.4, 0.75),
    "score_flops": (0.2, 0.45, 0.65),
    "decode_bandwidth": (0.4, 0.7, 0.95),
    "expert_flops": (0.15, 0.4, 0.8),
    "launch_s": (5e-5, 3e-4, 2e-3),
    "expert_launch_s": (2e-4, 2e-3, 6e-3),
    "decode_token_s": (1e-4, 1e-3, 2e-2),
    "decode_row_s": (1e-6, 2e-5, 1.5e-4),
    "between_collective_s": (5e-6, 2e-5, 3e-4),
    "host_links": (0.05, 0.3, 0.9),
    "step_s": (0.5, 4.0, 12.0),
    "refit": (5e9, 35e9, 200e9),
    "refit_separate": (5e9, 35e9, 200e9),
    "refit_gain": (1.0, 1.5, 4.0),
    "refit_first": (1.0, 2.0, 10.0),
    "decode_gain": (1.0, 2.0, 6.0),
}
"""Least, expected and most of what is fitted; ``refit_gain``: how much faster release 0.7 moves weights;
``refit_first``: how much slower 0.3 moves them; ``decode_gain``: how much less the engine of
0.4 and later spends on a token position than that of 0.3."""
DTENSOR_FREE = {
    "train_flops": (0.05, 0.4, 0.75),
    "score_flops": (0.05, 0.45, 0.65),
    "launch_s": (5e-5, 3e-4, 1e-2),
}
"""Factors that are fitted to DTensor's runs; the others keep the values of Megatron's runs."""
FIXED = Factors(decode_flops=0.4, collective_s=5e-6, between_links=1.0, inside_links=0.7)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published step."""

    release: str
    device: str
    model: str
    ahead: int
    devices: int
    rows: int
    trained_at_once: int
    limit: int
    mean: float
    generate_tp: int
    tp: int
    cp: int
    ep: int
    pp: int
    step_s: float
    source: str = "performance summary"
    backend: str = "megatron"
    is_sharded: bool = False
    recomputes: bool | None = None
    scored_tokens: int = 0
    dtype: Literal["float8", "bfloat16"] = "bfloat16"
    tokens_per_pass: float = 1.0
    generate_s: float = 0.0
    score_s: float = 0.0
    update_s: float = 0.0
    refit_s: float = 0.0

    @property
    def name(self) -> str:
        """The row in words."""
        told = "" if self.source == "performance summary" else f", {self.source}"
        return f"{self.release} {self.device} {self.model}{told}"

    @property
    def stages_s(self) -> dict[str, float]:
        """Published seconds of stages."""
        found = {stage: float(vars(self)[f"{stage}_s"]) for stage in STAGES}
        return {stage: spent for stage, spent in found.items() if spent}

    @property
    def training(self) -> int:
        """Devices that train: all in place, two thirds of the 192, else half."""
        if not self.ahead:
            return self.devices
        return self.devices * 2 // 3 if self.ahead > 1 else self.devices // 2

    @property
    def stack(self) -> str:
        """The factor set of its release and backend."""
        if self.backend == "dtensor":
            return "nemo-rl-dtensor"
        if self.release >= "0.7":
            return "nemo-rl"
        return "nemo-rl-0.6" if self.release >= "0.5" else "nemo-rl-0.4"


def rows() -> list[Row]:
    """Return all published rows."""
    data = tomllib.loads((Path(__file__).parent / "nemo.toml").read_text("utf-8"))
    return [
        Row(**{name: float(one) if name in _NUMBERS else one for name, one in row.items()})
        for row in data["row"]
    ]


def fitted() -> list[Row]:
    """Return the rows that the factors of Megatron runs are fitted to: without those that sample again."""
    return [row for row in rows() if row.backend == "megatron" and not row.source.startswith("DAPO")]


def dtensor() -> list[Row]:
    """Return the rows of the other training backend, which has a set of its own."""
    return [row for row in rows() if row.backend == "dtensor"]


_NUMBERS = ("mean", "step_s", *(f"{stage}_s" for stage in STAGES))


def command(row: Row) -> list[str]:
    """Return the words of the command for a row, from the root of the repository."""
    samples = 16 if row.model == "DeepSeek-V3" else 32
    recomputes = row.model in RECOMPUTED if row.recomputes is None else row.recomputes
    sigma, limit = SIGMA.get(row.model, LONG_SIGMA), row.limit - PROMPT_TOKENS
    response = f"mean={row.mean:.8g},sigma={sigma:g},max={limit}"
    sizes = {axis: vars(row)[axis] for axis in ("tp", "cp", "pp", "ep") if vars(row)[axis] > 1}
    if row.ep > 1:  # published for all devices
        sizes["ep"] = min(row.ep, row.training // row.pp)
    sizes |= {"generate": row.generate_tp} | ({"separate": row.devices - row.training} if row.ahead else {})
    more = {
        "--freshness": row.ahead,
        "--tokens-per-pass": f"{row.tokens_per_pass:g}" if row.tokens_per_pass > 1 else "",
        "--scoring-tokens": row.scored_tokens,
        "--set": f"policy.model.dtype={row.dtype}" if row.dtype != "bfloat16" else "",
    }
    return [
        *("plan", "--model", f"{CONFIGS_FOLDER}/{row.model}", "--gpus", f"{row.devices}x{row.device}"),
        *("--algorithm", "grpo", "--response", response, "--prompt", str(PROMPT_TOKENS)),
        *("--prompts", str(row.rows // samples), "--samples", str(samples)),
        *("--minibatches", str(row.rows // row.trained_at_once), "--like", row.stack),
        *("--layout", ",".join(f"{axis}={size}" for axis, size in sizes.items())),
        *("--set", f"policy.gradient_checkpointing={str(recomputes).lower()}"),
        *(word for option, value in more.items() if value for word in (option, str(value))),
    ]


def predict(row: Row, factors: Factors | None = None) -> StepEvaluation:
    """Return the prediction of a row's command, with the shipped factors or others."""
    asked = statement(row)
    assert asked.placed is not None
    step = asked.problem.of_plan(asked.placed)
    if factors is not None:
        step = replace(step, hardware=replace(step.hardware, factors=factors))
    return evaluate(step, CostModel(step), asked.placed)


@cache
def statement(row: Row) -> Statement:
    """The question that a row's command asks."""
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    _, option, model, *others = command(row)
    return stated(parser.parse_args([option, str(ROOT / model), *others]))


def placed(grid: Grid, generate_tp: int, sampling: int, freshness: float) -> Plan:
    """One model on a grid, generating in place or on so many devices apart."""
    pools = [PlannedPool(name="train", machine_type="all", devices=grid.devices)]
    units = {"policy": PlannedUnit(pool="train", grid=grid, generate_tp=0 if sampling else generate_tp)}
    if sampling:
        pools.append(PlannedPool(name="sample", machine_type="all", devices=sampling))
        own = Grid(dp=sampling // generate_tp, tp=generate_tp)
        units[SAMPLER] = PlannedUnit(pool="sample", grid=own, generate_tp=generate_tp)
    return Plan(name="policy alone", pools=tuple(pools), units=units, freshness=freshness)


@cache
def graph(scored: int) -> Graph:
    """A step of one model: it generates, scores so many times, trains and publishes."""
    calls = ["generate", *["logprobs"] * scored, "update", "publish"]
    stages = tuple(
        Stage(index=index, role="policy", endpoint=endpoint, reads=(), writes=())
        for index, endpoint in enumerate(calls)
    )
    edges = tuple(Edge(source=index, destination=index + 1, fields=()) for index in range(len(calls) - 1))
    return Graph(name="policy alone", stages=stages, edges=edges)


def factors_of(row: Row, values: dict[str, float]) -> Factors:
    """The factors of a row's release."""
    gain = values["refit_gain"] if row.release >= "0.7" else 1.0
    if row.release == "0.3":
        gain = 1 / values["refit_first"]
    known = {name: value for name, value in values.items() if name in vars(FIXED)}
    known |= {name: gain * values[name] for name in ("refit", "refit_separate")}
    if row.release > "0.3":
        known["decode_token_s"] /= values["decode_gain"]
    return replace(FIXED, **known)


def stages_s(found: StepEvaluation) -> dict[str, float]:
    """Predicted seconds of stages, under the names of the published ones."""
    generate, _, *scored, update, refit = (found.seconds[index] for index in sorted(found.seconds))
    return dict(zip(STAGES, (generate, sum(scored), update, refit), strict=True))


def ratios(row: Row, values: dict[str, float]) -> list[float]:
    """Predicted over published with fitted values: the step, then each published stage."""
    found = predict(row, factors_of(row, values))
    spent = stages_s(found)
    return [found.step_s / row.step_s, *(spent[name] / told for name, told in row.stages_s.items())]


Held = Callable[[Row], bool]
LEFT_OUT: dict[str, Sequence[Held]] = {
    "each model": [
        lambda row, name=name: row.model == name  # type: ignore[misc]
        for name in (
            "Llama-3.1-8B",
            "DeepSeek-V3",
            "Qwen3-235B-A22B",
            "Qwen3-30B-A3B",
            "Qwen3-32B",
            "Llama-3.1-70B",
        )
    ],
    "each release": [
        lambda row, name=name: row.release == name  # type: ignore[misc]
        for name in ("0.3", "0.4", "0.5", "0.6", "0.7")
    ],
    "each machine type": [
        lambda row, name=name: row.device == name  # type: ignore[misc]
        for name in ("H100", "GB200")
    ],
}
"""Which rows are predicted by a fit to all others."""
