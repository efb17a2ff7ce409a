"""How long the search for a plan takes: models and devices, one core, medians.

    python benchmarks/planner/mapping.py                                  # prints the tables
    python benchmarks/planner/mapping.py --runs 3 --wholes 5 --write benchmarks/results/mapping.md

Equal models of 7B, HybridFlow's setting (arXiv 2409.19256): prompts and responses of 1,024 tokens, 1,024
rows, 8 updates, machines of 8 A100. Four models: PPO's; with generation apart too, at freshness 1 and 4.
Seven: Safe RLHF's with every role a model, and a judge. Every search makes its cost model anew, and says why
each other placement loses. Seconds are the process's own: what else runs on the machine counts little.
40 drawn problems are also compared with all their plans (``every_plan.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from every_plan import checked

from rillflow.app.recipe import load_recipe
from rillflow.graph.graph import Graph, Stage
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.hardware import Factors, Fleet, Hardware, shipped_devices
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem
from rillflow_planner.ranking import Ranking
from rillflow_planner.search import search
from rillflow_planner.workload import Lengths, Workload

sys.path.append(str(Path(__file__).parents[1]))
from measured_at import below_title, line

SMALLEST = []
SLOW = ["--runs 1 --wholes 1 --checked 2"]  # searches for seven models on thousands of devices
NEEDS = ["rillflow_planner"]

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape(
    name="llama-7b",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    inner=11008,
    vocabulary=32000,
)
FIXED = Lengths(kind="fixed", limit=1024)
WORKLOAD = Workload(prompts=1024, samples=1, prompt=FIXED, response=FIXED, minibatches=8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One search."""

    recipe: str
    """Whose graph."""
    judged: bool
    """Whether a judge scores too."""
    devices: int
    """Of machines of 8."""
    freshness: tuple[int, ...]
    """Bounds tried."""
    limit_s: float | None
    """What it may take; none where nothing was promised."""


CASES = (
    Case(recipe="ppo", judged=False, devices=128, freshness=(0,), limit_s=1.0),
    Case(recipe="ppo", judged=False, devices=1024, freshness=(0,), limit_s=10.0),
    Case(recipe="safe_rlhf", judged=True, devices=128, freshness=(0,), limit_s=60.0),
    Case(recipe="ppo", judged=False, devices=128, freshness=(0, 1, 4), limit_s=None),
    Case(recipe="ppo", judged=False, devices=1024, freshness=(0, 1, 4), limit_s=None),
)


SHORT = "--model examples/planning/qwen2.5-7b/config.json --gpus 128xH100 --response mean=1000,max=8192"
WHOLE = {
    f"{SHORT} --algorithm ppo": 3,
    f"{SHORT} --algorithm safe_rlhf": 4,
    "recipes/arithmetic/run.toml --cluster clusters/laptop.toml": 2,
    "recipes/ppo/run.toml --cluster clusters/16x8_a100.toml": 3,
    "recipes/safe_rlhf/run.toml --cluster clusters/16x8_a100.toml": 4,
    "examples/planning/run.toml --cluster clusters/16x8_a100.toml": 3,
    "examples/planning/run.toml --cluster clusters/16x8_a100.toml --freshness 0,1": 3,
}
"""Commands that are timed as whole processes, with their models."""
PROMISED_S, PROMISED_AHEAD_S = 1.5, 3.0


def problem(case: Case) -> Problem:
    """The step to be planned."""
    graph = load_recipe(ROOT / f"recipes/{case.recipe}/run.toml").graphs[-1]
    graph = with_judge(graph) if case.judged else graph
    fleet = Fleet(
        name="a100",
        device=shipped_devices()["A100-80"],
        devices=case.devices,
        per_machine=8,
        between_bandwidth=25e9,
    )
    scalar = replace(SHAPE, is_scalar=True)
    return Problem(
        graph=graph,
        shapes={role: SHAPE if role in ("policy", "reference") else scalar for role in graph.roles},
        workload=WORKLOAD,
        hardware=Hardware(name="cluster", fleets=(fleet,), factors=Factors()),
    )


def with_judge(graph: Graph) -> Graph:
    """A judge beside the reward: it reads what that reads, and the same formulas read it."""
    place = next(stage.index for stage in graph.stages if stage.name == "reward.score")

    def moved(index: int) -> int:
        return index + (index > place)

    stages = [replace(stage, index=moved(stage.index)) for stage in graph.stages]
    first = graph.stages[place]
    judge = Stage(
        index=place + 1,
        role="judge",
        endpoint="score",
        reads=first.reads,
        writes=first.writes,
        transfer=first.transfer,
    )
    edges = [
        replace(edge, source=moved(edge.source), destination=moved(edge.destination)) for edge in graph.edges
    ]
    edges += [replace(edge, destination=place + 1) for edge in edges if edge.destination == place]
    edges += [replace(edge, source=place + 1) for edge in edges if edge.source == place]
    return replace(
        graph,
        stages=tuple(sorted([*stages, judge], key=lambda stage: stage.index)),
        edges=tuple(sorted(edges, key=lambda edge: (edge.destination, edge.source))),
    )


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A case, measured."""

    case: Case
    seconds: float
    ranking: Ranking


def measure(runs: int) -> Iterator[Timed]:
    """Every case, each as often as asked."""
    for case in CASES:
        step, spent = problem(case), []
        for _ in range(runs):
            begun = time.process_time()
            ranking = search(step, CostModel, freshness=case.freshness)
            spent.append(time.process_time() - begun)
        yield Timed(case=case, seconds=statistics.median(spent), ranking=ranking)
        print(f"{case.recipe} on {case.devices}: {spent}", file=sys.stderr)


def whole_lines(runs: int) -> list[str]:
    """Processor seconds of ``rillflow plan``, its start and what it reads included; the medians.

    Modules are compiled before, as an installation has them, into a directory of their own.
    """
    lines = ["| rillflow plan ... | models | seconds | promised |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as compiled:
        kept = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        for words, models in WHOLE.items():
            spent = []
            for _ in range(runs + 1):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                command = [sys.executable, "-m", "rillflow.cli.main", "plan", *words.split()]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=kept)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            print(f"{words}, the whole process: {spent}", file=sys.stderr)
            promised = PROMISED_AHEAD_S if "--freshness" in words else PROMISED_S
            lines.append(f"| `{words}` | {models} | {statistics.median(spent[1:]):.2f} | {promised} |")
    return lines


def checked_lines(count: int) -> list[str]:
    """Drawn problems, searched and enumerated: by number of models that are placed."""
    found = [*checked(count)]
    worse = [one for one in found if one.ratio > 1 + 1e-6]
    lines = ["| models placed | problems | plans of a problem | worst ratio | search, s | all plans, s |"]
    lines.append("|---|---|---|---|---|---|")
    for models in sorted({len(one.problem.units) for one in found}):
        some = [one for one in found if len(one.problem.units) == models]
        plans = f"{min(one.plans for one in some):,} to {max(one.plans for one in some):,}"
        searched, every = max(one.search_s for one in some), max(one.every_s for one in some)
        worst = max(one.ratio for one in some)
        lines.append(f"| {models} | {len(some)} | {plans} | {worst:.3f} | {searched:.2f} | {every:.2f} |")
    worst = max(one.ratio for one in found)
    return [
        f"{count} drawn problems of 4 to 16 devices against all their plans: as good in "
        f"{count - len(worse)}, at worst {worst:.3f} times the best step. A sampler is a model here;",
        f"{sum(one.problem.freshness > 0 for one in found)} problems run ahead. Nothing fits in "
        f"{sum(math.isinf(one.best_s) for one in found)}, for the search and for all plans.",
        "",
        *lines,
    ]


def table(timed: Sequence[Timed]) -> str:
    """The results as a table."""
    lines = [
        "| models | devices | freshness | placements | seconds | promised | best step, s | on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in timed:
        case, best = one.case, one.ranking.best[0]
        lines.append(
            f"| {7 if case.judged else 4} | {case.devices} | {', '.join(map(str, case.freshness))} "
            f"| {one.ranking.placements} | {one.seconds:.2f} "
            f"| {'' if case.limit_s is None else f'{case.limit_s:g}'} | {best.evaluation.step_s:.2f} "
            f"| {' + '.join(str(pool.devices) for pool in best.plan.pools)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="searches of each case; the median counts")
    parser.add_argument("--wholes", type=int, default=3, help="processes of each command, after one more")
    parser.add_argument("--checked", type=int, default=40, help="drawn problems compared with all plans")
    parser.add_argument("--write", type=Path, help="a page for the table")
    options = parser.parse_args(arguments)
    timed = list(measure(options.runs))
    setting = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": version("numpy")}
    command = f"python benchmarks/planner/mapping.py --runs {options.runs} --wholes {options.wholes}"
    text = f"# The search for a plan\n\n`{command}`; {json.dumps(setting)}\n\n{table(timed)}\n\n"
    text += "\n".join(checked_lines(options.checked)) + "\n\n"
    text += "Whole processes, modules compiled: searches of four sizes of the cluster, three simulations.\n\n"
    text += "\n".join(whole_lines(options.wholes)) + "\n"
    print(text)
    if options.write:
        options.write.write_text(below_title(text, line()), "utf-8")


if __name__ == "__main__":
    main()
