"""Running ahead: a ladder of runs, real pools on two ranks, and learning from off-policy rows.

    ladder      one recipe: in sequence, part by part, one and four versions ahead. Each rung is simulated
                before it runs. Its stages compute (``computing.py``: 100 million parameters, one core per
                pool), or they sleep for the time that they would compute. Sleeping stages show on one
                machine what more pools gain.
    parts       the quickstart's model on one rank, without running ahead: rows in parts, and whole
    pools       the quickstart's model on two ranks of one core each: freshness 0, and one version ahead
    pictures    the timelines of three rungs of the ladder, as the report draws them
    learning    the quickstart's task at several bounds of staleness: accuracy on held-out sums

    python benchmarks/streaming/ahead.py ladder --write benchmarks/results/ladder.md
    python benchmarks/streaming/ahead.py ladder --stages balanced --rungs "in sequence" "4 ahead, by parts"
    python benchmarks/streaming/ahead.py pools --rounds 3
    python benchmarks/streaming/ahead.py learning --seeds 0 1 2 --write results.md

Each part starts whole runs through the code of `rillflow run`. Seconds come from the metrics and spans of the
runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from as_run import endless, simulate_as_run
from computing import SIZES, computing_ladder
from rungs import (
    LADDER,
    READY,
    STAGES,
    busy_seconds,
    climb,
    run_of,
    rungs_of,
    say,
    stage_seconds,
    step_seconds,
    told,
)
from torch import Tensor

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.app.recipe import load_recipe
from rillflow.controller.flow import Flow
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.reader import read_evaluations, read_metrics
from rillflow.runs.run_data import load
from rillflow_parts.report.html import el, style
from rillflow_parts.report.measured import measured, measured_bars
from rillflow_parts.report.timeline import colours_of, draw_timeline
from rillflow_planner.recipe_problem import state_problem
from rillflow_planner.workload import Lengths

sys.path.append(str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = ["ladder --stages tiny --rungs 'in sequence'"]
SLOW = ["pools --rounds 1", "ladder --stages computing-tiny --counted 1"]  # start Ray
NEEDS = ["rillflow_planner"]

SHAPES = {"verl": (357.0, 108.0, 270.0), "balanced": (245.0, 245.0, 245.0)}
SHAPES |= {"tiny": (8.0, 8.0, 8.0), "none": (0.0, 0.0, 0.0)}
"""Seconds of the longest row, of scoring and of the update.

verl: Qwen2.5-Math-7B, DAPO, 32 GPUs, synchronous (verl's documentation: generation, old log probabilities,
update). balanced: the same sum in three equal stages, because AsyncFlow does not publish its stages. A ladder
that reaches its 2.74 needs stages whose sum is at least 2.74 times the longest.
"""
SCALE = 1 / 200
"""Seconds here per second of SHAPES."""
SHAPE = "AHEAD_SHAPE"
"""Environment variable that tells every process the shape."""
PROMPTS, SAMPLES, MINIBATCHES, SIGMA = 64, 4, 16, 0.9
"""Prompts and rows per prompt of a step, its optimiser steps, and the log-normal sigma of row lengths."""
PICTURED = {"in sequence": (3, 4), "1 ahead": (3, 7), "4 ahead, ready first": (7, 11)}
"""The first and last drawn step of each drawn rung."""
DRY_STEPS, COUNTED = 8, 5
"""Steps of the run that does not sleep, and measured steps of a rung after its first steps."""
HEAD = """# A ladder of runs

`python benchmarks/streaming/ahead.py {rungs}`, {versions}.

Whole runs by the command's own path, each with more work side by side than the one before. Every rung is
simulated before the first one is run, by the simulator of `rillflow timeline`, from seconds of single stages
that are measured before. AsyncFlow (arXiv 2507.01663) publishes 1.00, 2.01 and 2.74 for 7B on 512 devices,
without the seconds and devices of its stages. Two pools give at most 2, three at most 3.

"""
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
max_rows = 256
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
function = "sleeping.py:reward"
timeout_s = 300
[placement]
backend = "inline"
pools = { main = 1, answers = 1, scores = 1 }
roles = { sampler = "answers", reward = "scores" }
"""
REWARD = """
import os, time

SECONDS = SCORING

def reward(prompts, completions, **columns):
    time.sleep(SECONDS[os.environ["AHEAD_SHAPE"]] * len(prompts) / ROWS)
    return [float(text < "5") for text in completions]
"""
"""A score that sleeps for its rows' share of the scoring time; a child imports this file at every start."""
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
    "0": ('schedule={mode="ahead",freshness=0}',),
    "1": ('schedule={mode="ahead",freshness=1}',),
    "4": ('schedule={mode="ahead",freshness=4}',),
    "4, decoupled": (
        'schedule={mode="ahead",freshness=4}',
        "algorithm.old_logprobs=trainer",
        "algorithm.loss.correction=tis",
        "algorithm.loss.correction_bounds=[0, 5]",
    ),
    "8": ('schedule={mode="ahead",freshness=8}',),
    "4, ready first": ('schedule={mode="ahead",freshness=4}', READY),
    "4, ready first, decoupled": (
        'schedule={mode="ahead",freshness=4}',
        READY,
        "algorithm.old_logprobs=trainer",
        "algorithm.loss.correction=tis",
        "algorithm.loss.correction_bounds=[0, 5]",
    ),
}
APART = [
    "placement.backend=inline",
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers" }',
    "run.threads=1",
]
ROOT = Path(__file__).parents[2]


def seconds_of(place: int) -> float:
    """Return the seconds that generation (0), scoring (1) or update (2) of a step sleeps."""
    return SCALE * SHAPES[os.environ[SHAPE]][place]


def row_milliseconds() -> list[int]:
    """Return the sampling time of each row of a step, in order: log-normal, the longest equals generation."""
    drawn = [Random(row).lognormvariate(0, SIGMA) for row in range(PROMPTS * SAMPLES)]
    return [round(1000 * seconds_of(0) * each / max(drawn)) for each in drawn]


class SleepingEngine(NativeEngine):
    """The native engine, with rows that it returns only after their sampling time."""

    can: ClassVar = NativeEngine.can

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self._due: dict[RowId, float] = {}
        self._ended: list[Rollout] = []
        self._places = dict[RowId, int]()  # index in the step; the data is shuffled
        self._milliseconds = row_milliseconds()

    def generate_parts(
        self, parts: Sequence[Batch], samples: int = 1, sampling: SamplingConfig | None = None
    ) -> Iterator[Batch]:
        """See Engine."""
        began, milliseconds, done = time.monotonic(), row_milliseconds(), 0
        for rollouts in super().generate_parts(parts, samples, sampling):
            done += len(rollouts)
            time.sleep(max(0.0, began + max(milliseconds[:done]) / 1000 - time.monotonic()))
            yield rollouts

    @property
    def has_work(self) -> bool:
        """See Engine; sleeping rows count as work."""
        return bool(self._due) or super().has_work

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        """See Engine."""
        row = rollout.row
        place = self._places.setdefault(row, len(self._places) % (PROMPTS * SAMPLES))
        self._due.setdefault(row, time.monotonic() + self._milliseconds[place] / 1000)
        super().add(rollout, sampling)

    def abort(self, row: RowId) -> Rollout:
        """See Engine."""
        del self._due[row]
        held = [each for each in self._ended if each.row == row]
        self._ended = [each for each in self._ended if each.row != row]
        return held[0] if held else super().abort(row)

    def step(self) -> list[Rollout]:
        """See Engine; takes some milliseconds and returns the rows whose sampling time is over."""
        time.sleep(0.005)
        self._ended += super().step()
        now = time.monotonic()
        found = [each for each in self._ended if self._due[each.row] <= now]
        self._ended = [each for each in self._ended if self._due[each.row] > now]
        for each in found:
            del self._due[each.row]
        return found


def sleeping_loss(logprobs: Tensor, advantages: Tensor, row_lengths: Tensor) -> Tensor:
    """Compute a policy gradient loss and sleep for the rows' share of the update."""
    time.sleep(seconds_of(2) * len(row_lengths) / (PROMPTS * SAMPLES))
    return -advantages * logprobs


class SleepingConfig(GroupConfig):
    """Settings of [algorithm]."""

    name: Literal["sleeping"]


def step(flow: Flow, prompts: Batch, config: SleepingConfig) -> Handle:
    """Run one iteration: sample, score, update."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    advantages = flow.compute(formulas.group_advantages, rewards, into="advantages", scale="off")
    report = flow.policy.update(rollouts, advantages, loss=sleeping_loss, passes=config)
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=SleepingConfig, step=step)


run_sleeping = partial(run_of, algorithms=[ALGORITHM])


def overheads(recipe: Path, folder: Path, *settings: str) -> dict[str, float]:
    """Return seconds of a step without sleep: by stage, and under "" the seconds that belong to no stage."""
    shape, os.environ[SHAPE] = os.environ[SHAPE], "none"
    run = run_sleeping(recipe, folder, *settings, f"algorithm.steps={DRY_STEPS}")
    os.environ[SHAPE] = shape
    found = {stage: busy_seconds(run, stage, 2) for stage in STAGES[1:]}
    sampled = busy_seconds(run, "policy.generate", 2)
    return found | {"": max(0.0, step_seconds(run, 2) - sampled - sum(found.values()))}


def simulated_seconds(recipe: Path, beside: Mapping[str, float], steps: int, *settings: str) -> list[float]:
    """Simulate a rung and return its seconds per step, from the stages' sleep and their overheads."""
    loaded = load_recipe(recipe, settings, [ALGORITHM])
    paced = {"decode_launch_s": 1e-3, "decode_row_s": 0.0}  # one millisecond per token, at any batch size
    problem = state_problem(loaded, endless(3, step_s=beside[""], **paced)).problem
    rows = row_milliseconds()
    lengths = Lengths(kind="measured", limit=max(rows), values=tuple(sorted(rows)), in_order=tuple(rows))
    problem = replace(problem, workload=replace(problem.workload, response=lengths))
    stages = {"reward.score": seconds_of(1), "policy.update": seconds_of(2)}
    given = {stage: spent + beside[stage] for stage, spent in stages.items()}
    phase = loaded.phases[-1]
    return list(simulate_as_run(loaded, phase, problem, given, steps=steps).step_s)


def written(folder: Path) -> Path:
    """Write the recipe of sleeping stages and its reward."""
    recipe = folder / "run.toml"
    text = SLEEPING.replace("MINIBATCHES", str(MINIBATCHES)).replace("STEPS", "1")
    recipe.write_text(text.replace("PROMPTS", str(PROMPTS)).replace("SAMPLES", str(SAMPLES)))
    scoring = {shape: SCALE * seconds[1] for shape, seconds in SHAPES.items()}
    reward = REWARD.replace("SCORING", repr(scoring)).replace("ROWS", str(PROMPTS * SAMPLES))
    (folder / "sleeping.py").write_text(reward)
    return recipe


def ladder(arguments: argparse.Namespace) -> list[str]:
    """Predict and run each rung; return lines with seconds per step and the speedup over the first rung."""
    lines = list[str]()
    for stages in arguments.stages:
        with tempfile.TemporaryDirectory() as name:
            folder, names = Path(name), arguments.rungs or list(LADDER)
            if stages in SIZES:
                size = replace(SIZES[stages], at_once=arguments.at_once or SIZES[stages].at_once)
                given = (size, names, arguments.counted, arguments.backend)
                lines += ["## Stages that compute", "", *computing_ladder(folder, *given), ""]
            else:
                lines += [f"## Stages that sleep: {stages}", ""]
                lines += [*sleeping_ladder(folder, stages, names, arguments.counted), ""]
    return lines


def sleeping_ladder(folder: Path, shape: str, names: Sequence[str], counted: int) -> list[str]:
    """Predict and run the rungs of sleeping stages; return lines of the page."""
    os.environ[SHAPE] = shape
    recipe, rungs = written(folder), rungs_of(names, MINIBATCHES, counted)
    beside = {
        parts: overheads(
            recipe, folder / f"dry-{parts}", f'schedule={{mode="streamed",stream_chunks={parts}}}'
        )
        for parts in sorted({rung.parts for rung in rungs})
    }
    for parts, each in beside.items():
        say(f"without sleep, in {parts} parts: {told(each)}")
    seconds = [seconds_of(place) for place in range(3)]
    return [
        f"Generation, scoring and update sleep {', '.join(f'{each:.2f}' for each in seconds)} s, so overlap "
        f"gives at most {sum(seconds) / max(seconds):.2f}. {PROMPTS} prompts x {SAMPLES} rows, {MINIBATCHES} "
        f"minibatches and parts, three pools. {counted} steps or more are counted.",
        "",
        *climb(
            rungs,
            lambda rung: simulated_seconds(recipe, beside[rung.parts], rung.steps, *rung.settings),
            lambda rung: run_sleeping(
                recipe, folder / rung.name, *rung.settings, f"algorithm.steps={rung.steps}"
            ),
        ),
    ]


def parts(arguments: argparse.Namespace) -> list[str]:
    """Time steps on one rank with rows whole and in two parts, alternating, over all steps of all rounds."""
    found: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for each in range(arguments.rounds):
            for count, taken in sorted(found.items(), reverse=bool(each % 2)):
                run = run_of(
                    ROOT / "recipes/arithmetic/run.toml",
                    Path(folder) / f"{each}-{count}",
                    *("warm_start.steps=5", "algorithm.steps=12", "evaluate=none", "algorithm.shuffle=false"),
                    f'schedule={{mode="streamed",stream_chunks={count}}}',
                    "run.threads=1",
                )
                steps = [one.metrics["run/step_seconds/mean"].value for one in read_metrics(run)]
                taken += steps[5 + 2 :]
                print(f"in {count}: {statistics.median(steps[5 + 2 :]):.3f} s a step", flush=True)
    middle = [statistics.median(found[count]) for count in (1, 2)]
    quarter = [_first_quartile(found[count]) for count in (1, 2)]
    return [
        "| | median, s a step | first quartile |",
        "|---|---|---|",
        f"| whole | {middle[0]:.3f} | {quarter[0]:.3f} |",
        f"| in two parts, each trained as it is scored | {middle[1]:.3f} | {quarter[1]:.3f} |",
        f"| times as long | {middle[1] / middle[0]:.3f} | {quarter[1] / quarter[0]:.3f} |",
    ]


def _first_quartile(values: Sequence[float]) -> float:
    """Return the first quartile, because other programs slow some steps of a shared machine."""
    return statistics.quantiles(values, n=4)[0]


def pools(arguments: argparse.Namespace) -> list[str]:
    """Time the two pools with freshness 0 and 1, alternating; return medians over rounds."""
    found: dict[int, list[float]] = {0: [], 1: []}
    stages: dict[str, list[float]] = {"policy.generate": [], "policy.update": []}
    with tempfile.TemporaryDirectory() as folder:
        for each in range(arguments.rounds):
            for bound in (0, 1):
                name = Path(folder) / f"{each}-{bound}"
                recipe = ROOT / "recipes/arithmetic/run.toml"
                run = run_of(recipe, name, *POOLS, f'schedule={{mode="ahead",freshness={bound}}}')
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
    """Return held-out accuracy of the quickstart at every bound."""
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


def pictures(arguments: argparse.Namespace) -> list[str]:
    """Draw the timelines of three rungs as the report does, each as a standalone SVG file."""
    target = arguments.write or Path("pictures")
    target.mkdir(exist_ok=True)
    os.environ[SHAPE], lines = "balanced", []
    with tempfile.TemporaryDirectory() as folder:
        recipe = written(Path(folder))
        for name, (first, last) in PICTURED.items():
            run = run_sleeping(recipe, Path(folder) / name, *LADDER[name], f"algorithm.steps={last + 2}")
            bars = [bar for bar in measured_bars(measured(load(run), first, last)) if not bar.is_idle]
            svg = re.sub(r"^<div[^>]*>|</div>$", "", str(draw_timeline(bars)[0]))
            width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
            keys = [
                el("rect", class_=f"span k{colour}", x=170 * place, y=height + 6, width=12, height=12)
                + el("text", stage, x=170 * place + 18, y=height + 16)
                for place, (stage, colour) in enumerate(list(colours_of(bars).items())[:6])
            ]
            svg = svg.replace(f"0 0 {width} {height}", f"0 0 {width} {height + 24}")
            drawn = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
            drawn = drawn.replace(">", f"><style>{style()}</style>", 1)
            file = target / f"{name.replace(', ', '-').replace(' ', '-')}.svg"
            file.write_text(drawn.removesuffix("</svg>") + "".join(keys) + "</svg>\n")
            lines.append(f"{file}: {name}, steps {first} to {last}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ladder", "parts", "pools", "pictures", "learning"))
    stages = (*SIZES, *(shape for shape in SHAPES if shape != "none"))
    default = ["computing", "balanced"]
    parser.add_argument("--stages", nargs="+", choices=stages, default=default, help="of the ladder's rungs")
    parser.add_argument("--backend", choices=("ray", "inline"), default="ray", help="of stages that compute")
    parser.add_argument("--at-once", type=int, help="rows that a computing sampler runs at once, 2 or more")
    parser.add_argument("--counted", type=int, default=COUNTED, help="steps of a rung that are measured")
    parser.add_argument("--rungs", nargs="+", choices=LADDER, help="those that are run; all if left out")
    parser.add_argument("--rounds", type=int, default=3, help="of parts, and of the two pools")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", nargs="*", help="rows of the table; all if left out")
    parser.add_argument("--write", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    tables = {each.__name__: each for each in (ladder, parts, pools, pictures, learning)}
    lines = tables[arguments.what](arguments)
    versions = f"rillflow {version('rillflow')}, torch {version('torch')}, {os.cpu_count()} cores"
    text = "\n".join([*lines, "", versions, ""])
    print(text)
    if arguments.write and arguments.what == "ladder":
        head = HEAD.format(rungs=shlex.join(sys.argv[1:]), versions=versions)
        arguments.write.write_text(below_title(head + "\n".join(lines).rstrip("\n") + "\n", line()), "utf-8")
    elif arguments.write and arguments.what != "pictures":
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
