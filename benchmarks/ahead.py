"""What running ahead gives: stages that sleep, two real pools, and what is learnt from older rows.

    ladder      one recipe in step, part by part, one and four versions ahead; every stage sleeps as long as
                it would compute, so that one machine shows what pools side by side do
    pools       the quickstart's model on two ranks of one core each: in step and one version ahead
    learning    the quickstart's task at several bounds: accuracy on held-out sums

    python benchmarks/ahead.py ladder
    python benchmarks/ahead.py pools --rounds 3
    python benchmarks/ahead.py learning --seeds 0 1 2 --write results.md

All are whole runs by the command's own path; seconds are those of the run's own metrics and spans.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from torch import Tensor

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import GroupConfig
from rillflow.assembly.launch import launch
from rillflow.assembly.recipe import load_recipe
from rillflow.dataflow.flow import Flow
from rillflow.graph.handle import Handle
from rillflow.observe.reader import SpanRecord, read_evaluations, read_metrics, read_spans
from rillflow.records.batch import Batch
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability
from rillflow.rollout.native.engine import NativeEngine

SCALE = 1 / 200
"""Seconds here for a second there."""
GENERATE_S, SCORE_S, UPDATE_S = 357.0, 108.0, 270.0
"""Qwen2.5-Math-7B, DAPO, 32 GPUs in step (verl's documentation): generation, old logprobs, update."""
PROMPTS, SAMPLES, MINIBATCHES, SIGMA = 64, 4, 16, 0.9
"""Rows of a step, optimiser steps over them, and the tail of their lengths."""
LADDER = {
    "apart, one after another": (),
    "and part by part": (f"rollout.parts={MINIBATCHES}",),
    "one version ahead": ("algorithm.freshness=1",),
    "one version ahead, part by part": (f"rollout.parts={MINIBATCHES}", "algorithm.freshness=1"),
    "four versions ahead, part by part": (f"rollout.parts={MINIBATCHES}", "algorithm.freshness=4"),
}
SLEEPING = """
[run]
threads = 1
checkpoint_minutes = 0
[task]
source = "arithmetic"
digits = 2
size = 4000
held_out = 10
[policy]
model.new = { hidden = 16, layers = 1, heads = 2, context = 16, alphabet = "0123456789+-*=" }
[rollout]
engine = "ahead:SleepingEngine"
max_tokens = 2
[evaluate]
problems = 0
[algorithm]
name = "sleeping"
steps = STEPS
prompts_per_step = PROMPTS
samples_per_prompt = SAMPLES
minibatches = MINIBATCHES
shuffle = false
old_logprobs = "sampler"
[reward]
function = "ahead.py:sleeping_reward"
timeout_s = 60
[placement]
backend = "inline"
pools = { main = 1, answers = 1, scores = 1 }
roles = { sampler = "answers", reward = "scores" }
"""
POOLS = [
    "placement.backend=ray",
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers", reward = "answers" }',
    "warm_start.steps=5",
    "algorithm.steps=10",
    "evaluate=none",
    "run.threads=1",
]
BOUNDS = {
    "0": ("algorithm.freshness=0",),
    "1": ("algorithm.freshness=1",),
    "4": ("algorithm.freshness=4",),
    "4, decoupled": (
        "algorithm.freshness=4",
        "algorithm.old_logprobs=trainer",
        "algorithm.loss.correction=tis",
        "algorithm.loss.correction_bounds=[0, 5]",
    ),
    "8": ("algorithm.freshness=8",),
}
APART = [
    "placement.backend=inline",
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers" }',
    "run.threads=1",
]
ROOT = Path(__file__).parents[1]


def row_seconds(step_rows: Sequence[tuple[int, int]]) -> list[float]:
    """How long rows (prompt, sample) are sampled: log-normal, the longest of a step near GENERATE_S."""
    longest = math.exp(SIGMA * statistics.NormalDist().inv_cdf(1 - 0.56 / (PROMPTS * SAMPLES)))
    drawn = [Random(f"{prompt} {sample}").lognormvariate(0, SIGMA) for prompt, sample in step_rows]
    return [GENERATE_S * SCALE * each / longest for each in drawn]


class SleepingEngine(NativeEngine):
    """The native engine, which hands rows over when they would have been sampled."""

    can: ClassVar = frozenset(Capability)

    def generate_parts(
        self, parts: Sequence[Batch], samples: int = 1, sampling: SamplingConfig | None = None
    ) -> Iterator[Batch]:
        """See Engine."""
        began = time.monotonic()
        for rollouts in super().generate_parts(parts, samples, sampling):
            rows = [(row.prompt, row.sample) for row in rollouts.row_ids()]
            time.sleep(max(0.0, began + max(row_seconds(rows)) - time.monotonic()))
            yield rollouts


def sleeping_reward(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """A score that takes its share of SCORE_S."""
    del columns
    time.sleep(SCORE_S * SCALE * len(prompts) / (PROMPTS * SAMPLES))
    return [float(text < "5") for text in completions]


def sleeping_loss(logprobs: Tensor, advantages: Tensor, row_lengths: Tensor) -> Tensor:
    """A policy gradient that takes its share of UPDATE_S."""
    time.sleep(UPDATE_S * SCALE * len(row_lengths) / (PROMPTS * SAMPLES))
    return -advantages * logprobs


class SleepingConfig(GroupConfig):
    """Settings of [algorithm]."""

    name: Literal["sleeping"]


def step(flow: Flow, prompts: Batch, config: SleepingConfig) -> Handle:
    """One iteration: sample, score, update."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    advantages = flow.compute(formulas.group_advantages, rewards, into="advantages", scale="off")
    report = flow.policy.update(rollouts, advantages, loss=sleeping_loss, passes=config)
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=SleepingConfig, step=step, data=Data.PROMPTS)


def run_of(recipe: Path, folder: Path, *settings: str) -> Path:
    """Run a recipe; the run directory."""
    loaded = load_recipe(recipe, [f"run.dir='{folder}'", *settings], [ALGORITHM])
    launch(loaded.recipe, loaded.base, quiet=True)
    return folder


def step_seconds(run: Path, skipped: int) -> float:
    """The mean step after the first ones."""
    every = [each.metrics["run/step_seconds/mean"].value for each in read_metrics(run)]
    return statistics.fmean(every[skipped:])


def stage_seconds(run: Path, stage: str, skipped: int) -> float:
    """The mean seconds of a stage after the first steps."""
    spans: list[SpanRecord] = [
        each for each in read_spans(run) if each.stage == stage and each.step > skipped
    ]
    return statistics.fmean(each.duration_s for each in spans)


def ladder(arguments: argparse.Namespace) -> list[str]:
    """Every rung: seconds of a step, as ratios to the first."""
    lines = ["| | seconds a step | times as fast | max(generation, update) is |", "|---|---|---|---|"]
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "run.toml"
        text = SLEEPING.replace("MINIBATCHES", str(MINIBATCHES)).replace("STEPS", str(arguments.steps))
        recipe.write_text(text.replace("PROMPTS", str(PROMPTS)).replace("SAMPLES", str(SAMPLES)))
        (Path(folder) / "ahead.py").write_text(Path(__file__).read_text("utf-8"))
        for index, (name, settings) in enumerate(LADDER.items()):
            run = run_of(recipe, Path(folder) / str(index), *settings)
            spent = step_seconds(run, 5)
            first = first or spent
            bound = max(stage_seconds(run, stage, 5) for stage in ("policy.generate", "policy.update"))
            lines.append(f"| {name} | {spent:.2f} | {first / spent:.2f} | {bound:.2f} |")
            print(lines[-1], flush=True)
    return lines


def pools(arguments: argparse.Namespace) -> list[str]:
    """In step and ahead, alternating; medians over rounds."""
    found: dict[int, list[float]] = {0: [], 1: []}
    stages: dict[str, list[float]] = {"policy.generate": [], "policy.update": []}
    with tempfile.TemporaryDirectory() as folder:
        for each in range(arguments.rounds):
            for bound in (0, 1):
                name = Path(folder) / f"{each}-{bound}"
                recipe = ROOT / "recipes/arithmetic/run.toml"
                run = run_of(recipe, name, *POOLS, f"algorithm.freshness={bound}")
                found[bound].append(step_seconds(run, 8))
                if not bound:
                    for stage, every in stages.items():
                        every.append(stage_seconds(run, stage, 8))
    in_step, ahead = (statistics.median(found[bound]) for bound in (0, 1))
    generate, update = (statistics.median(every) for every in stages.values())
    return [
        "| | seconds a step |",
        "|---|---|",
        f"| in step | {in_step:.2f} |",
        f"| of it generation, update | {generate:.2f}, {update:.2f} |",
        f"| one version ahead | {ahead:.2f} |",
        f"| times as fast | {in_step / ahead:.2f} |",
        f"| at most, by the two stages | {in_step / max(generate, update):.2f} |",
    ]


def learning(arguments: argparse.Namespace) -> list[str]:
    """Held-out accuracy after the quickstart at every bound."""
    lines = ["| bound | " + " | ".join(f"seed {seed}" for seed in arguments.seeds) + " | mean |"]
    lines.append("|---" * (len(arguments.seeds) + 2) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in BOUNDS.items():
            if arguments.bounds and name not in arguments.bounds:
                continue
            found = []
            for seed in arguments.seeds:
                recipe = ROOT / "recipes/arithmetic/run.toml"
                where = Path(folder) / f"{name}-{seed}".replace(", ", "-")
                run = run_of(recipe, where, *APART, *settings, f"run.seed={seed}", "evaluate.every=0")
                found.append(read_evaluations(run)[-1].mean_reward)
            cells = " | ".join(f"{each:.3f}" for each in found)
            lines.append(f"| {name} | {cells} | {statistics.fmean(found):.3f} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ladder", "pools", "learning"))
    parser.add_argument("--steps", type=int, default=15, help="of a rung")
    parser.add_argument("--rounds", type=int, default=3, help="of the two pools")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", nargs="*", help="rows of the table; all if left out")
    parser.add_argument("--write", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    lines = {"ladder": ladder, "pools": pools, "learning": learning}[arguments.what](arguments)
    versions = f"rillflow {version('rillflow')}, torch {version('torch')}, {os.cpu_count()} cores"
    text = "\n".join([*lines, "", versions, ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
