"""Cost factors of one CPU core: seconds of training, scoring and generation at many sizes, and a fit to all.

    models x rows ─ Trainer.update, Trainer.logprobs, NativeEngine.generate ─> seconds ─┐
    the same as problems ─ cost model, initial factors ─────────────────────────────────┴─ calibrate

    python benchmarks/planner/processor.py                              # some minutes, one thread

One run of a recipe has too few sizes to separate matrix products from overheads. Its fit starts from the
factors found here (``rillflow`` of ``plugins/planner/rillflow_planner/stacks.toml``). Sizes take turns, so
that a drift of the machine's speed affects all of them; seconds are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from rillflow.graph.graph import Graph, Stage
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import load_model
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedPool, PlannedUnit
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.sharding.packed_rows import pack
from rillflow.training.config import TrainConfig
from rillflow.training.loss import SupervisedLoss
from rillflow.training.trainer import Trainer
from rillflow_planner.calibration import Calibration, Observation, calibrate
from rillflow_planner.problem import Problem
from rillflow_planner.recipe_problem import shape_of_new, this_machine
from rillflow_planner.workload import Lengths, Packing, Workload

SMALLEST = []
SLOW = ["--rounds 1"]  # times many sizes after five rounds of warm-up
NEEDS = ["rillflow_planner"]

FITTED = (
    "train_flops",
    "score_flops",
    "decode_flops",
    "decode_bandwidth",
    "touches",
    "head_token_s",
    "pass_s",
    "launch_s",
    "decode_launch_s",
    "decode_row_s",
    "row_s",
)
"""All factors of one core; links and calls need several cores."""
STAGES = ("generate", "logprobs", "update")
DIGITS = "0123456789+-="
PROMPT = 6


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its rows."""

    hidden: int
    """Hidden size of the model."""
    layers: int
    """Layers of the model."""
    prompts: int
    """Number of different prompts."""
    samples: int
    """Rows of each prompt."""
    answer: int
    """Tokens of each answer; half of the rows have half as many."""

    def __str__(self) -> str:
        return (
            f"{self.hidden} wide, {self.layers} layers | {self.prompts} x {self.samples}, "
            f"{PROMPT} + {self.answer}"
        )


MODELS = ((64, 4), (128, 4), (192, 4), (128, 8))
ROWS = ((256, 1, 3), (64, 8, 4), (32, 8, 16), (2, 1, 16), (16, 2, 56))
SIZES = tuple(
    Size(hidden=hidden, layers=layers, prompts=prompts, samples=samples, answer=answer)
    for hidden, layers in MODELS
    for prompts, samples, answer in ROWS
)


class Case:
    """One size, ready to run."""

    def __init__(self, size: Size) -> None:
        self.size = size
        new = NewModel(
            hidden=size.hidden, layers=size.layers, heads=4, kv_heads=2, context=64, alphabet=DIGITS
        )
        model = load_model(ModelConfig(new=new), seed=0, device=torch.device("cpu"), base=Path())
        self._shape = shape_of_new(new)
        self._trainer = Trainer(model.module, TrainConfig(lr=1e-9), total_steps=10_000)
        self._engine = NativeEngine(
            model.module,
            RolloutConfig(max_rows=2048, max_tokens=size.answer),
            stop_tokens=frozenset(),
            seed=0,
            context=model.context,
        )
        generator = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(len(DIGITS), (size.prompts, PROMPT), generator=generator)
        self._rows = _batch(list(_rows(size, self._prompts, generator)))

    def run(self, stage: str) -> None:
        """Run a stage once."""
        match stage:
            case "generate":
                prompts = _batch(list(self._prompts)).with_fields(
                    columns=Ragged.from_text(["{}"] * self.size.prompts)
                )
                self._engine.generate(prompts, self.size.samples)
            case "logprobs":
                self._trainer.scorer.logprobs(self._rows)
            case _:
                self._trainer.update(self._rows, SupervisedLoss())

    def observations(self, seconds: dict[str, float]) -> Iterator[Observation]:
        """Yield the measured stages.

        Generation counts with full answer lengths, the other stages with the lengths of the actual rows.
        """
        lengths = (self._rows.ragged("tokens").lengths - PROMPT).tolist()
        read = self._rows.ragged("tokens").lengths - 1
        cut = Ragged.from_rows([row[:-1] for row in self._rows.ragged("tokens").rows()])
        tokens = int(read.sum()) + len(read)
        distinct = len(pack(cut).tokens) / tokens
        packing = Packing(trained=distinct, scored=distinct)
        sampled = Lengths(kind="fixed", limit=self.size.answer)
        learnt = Lengths(kind="measured", limit=max(lengths), values=tuple(sorted(lengths)))
        for stages, response in ((STAGES[:1], sampled), (STAGES[1:], learnt)):
            workload = Workload(
                prompts=self.size.prompts,
                samples=self.size.samples,
                prompt=Lengths(kind="fixed", limit=PROMPT),
                response=response,
                dtype="float32",
                rows_at_once=2048,
                packing=packing,
            )
            yield self._observation(stages, workload, seconds)

    def _observation(
        self, stages: tuple[str, ...], workload: Workload, seconds: dict[str, float]
    ) -> Observation:
        graph = Graph(
            name=str(self.size),
            stages=tuple(
                Stage(index=index, role="policy", endpoint=stage, reads=(), writes=())
                for index, stage in enumerate(stages)
            ),
            edges=(),
        )
        problem = Problem(
            graph=graph, shapes={"policy": self._shape}, workload=workload, hardware=this_machine(1)
        )
        plan = Plan(
            name="one core",
            pools=(PlannedPool(name="main", machine_type="cores", devices=1),),
            units={"policy": PlannedUnit(pool="main", grid=Grid(), generate_tp=int("generate" in stages))},
        )
        taken = {f"policy.{stage}": seconds[stage] for stage in stages}
        return Observation(
            name=str(self.size), problem=problem, plan=plan, stages_s=taken, step_s=sum(taken.values())
        )


def main() -> int:
    """Measure, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to write the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [Case(size) for size in SIZES]
    taken = measured(cases, arguments.rounds)
    observations = [one for case in cases for one in case.observations(taken[case.size])]
    table = page(calibrate(observations, FITTED))
    print(table)
    if arguments.write is not None:
        arguments.write.write_text(table, "utf-8")
    return 0


def measured(cases: list[Case], rounds: int) -> dict[Size, dict[str, float]]:
    """Return seconds of every stage of every case, measured in turn."""
    found: dict[Size, dict[str, list[float]]] = {case.size: {stage: [] for stage in STAGES} for case in cases}
    for number in range(rounds + WARM_UP):
        for case in cases:
            for stage in STAGES:
                seconds = _timed(partial(case.run, stage))
                if number >= WARM_UP:
                    found[case.size][stage].append(seconds)
    return {
        size: {stage: median(seconds) for stage, seconds in stages.items()} for size, stages in found.items()
    }


WARM_UP = 5
"""Warm-up rounds; the sampler records its passes by the fifth at the latest."""


def page(fitted: Calibration) -> str:
    """Return the page with its tables."""
    values = ((name, getattr(fitted.factors, name)) for name in FITTED)
    lines = [
        "# Factors of one processor core",
        "",
        f"`python benchmarks/planner/processor.py --write benchmarks/results/processor.md`, "
        f"{os.cpu_count()} cores, "
        f"one thread, Python {platform.python_version()}, torch {version('torch')}.",
        "",
        "| factor | fitted |",
        "|---|---|",
        *(f"| `{name}` | {value:.3g}{' s' if name.endswith('_s') else ''} |" for name, value in values),
        "",
        f"Of {len(fitted.stages)} stages {sum(abs(one.error) <= 0.15 for one in fitted.stages)} within 15%, "
        f"median {median(abs(one.error) for one in fitted.stages):.1%}, "
        f"worst {max(abs(one.error) for one in fitted.stages):.0%}.",
        "",
        "| model | rows, tokens of prompt and answer | stage | measured ms | fitted ms | error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one.phase} | {one.stage.removeprefix('policy.')} | {1e3 * one.measured_s:.1f} "
            f"| {1e3 * one.predicted_s:.1f} | {one.error:+.0%} |"
            for one in fitted.stages
        ),
        "",
    ]
    return "\n".join(lines)


def _rows(size: Size, prompts: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    for prompt in prompts:
        for sample in range(size.samples):
            count = size.answer if sample % 2 == 0 else max(1, size.answer // 2)
            yield torch.cat([prompt, torch.randint(len(DIGITS), (count,), generator=generator)])


def _batch(rows: list[Tensor]) -> Batch:
    tokens = Ragged.from_rows(rows)
    ids = torch.tensor([[0, number, 0] for number in range(len(rows))])
    return Batch(
        ids=ids, fields={"tokens": tokens, "loss_mask": tokens.with_values(tokens.positions >= PROMPT)}
    )


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    raise SystemExit(main())
