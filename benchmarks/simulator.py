"""The simulator: how fast it is, how well it agrees with paper, and the shapes others published.

    python benchmarks/simulator.py --write benchmarks/results/simulator.md      # a minute, one core

Nothing is fitted here. Lengths of RollPacker's rows are those of benchmarks/results/planner.md; what else is
assumed stands above each table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from drawn_plans import Compared, compared
from published import verl
from published.models import shape
from published.nemo import placed

from rillflow.app.graphs import graphs
from rillflow.app.recipe import load_recipe
from rillflow.graph.graph import Graph
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import EngineFactors, Factors, Fleet, Hardware, shipped_devices
from rillflow_planner.problem import Problem
from rillflow_planner.request import graph_of
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

# Simulates plans of thousands of devices.
SMALLEST = []
SLOW = ["--only speed"]
NEEDS = ["rillflow_planner"]

NETWORK = 50e9
COMMAND = "python benchmarks/simulator.py --write benchmarks/results/simulator.md"
BOUNDS = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}
"""AReaL: thousand tokens a second by freshness bound."""
PACKED = {
    (1.0, 1.0): 82,
    (1.25, 1.25): 47,
    (1.0, 1.125): 77,
    (1.0, 1.25): 71,
    (1.0, 1.5): 54,
    (1.125, 1.0): 77,
    (1.25, 1.0): 72,
    (1.5, 1.0): 60,
}
"""RollPacker: seconds of a rollout by prompts and by answers begun for each that is kept."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to simulate."""

    problem: Problem
    costs: CostModel
    plan: Plan

    def run(self, steps: int) -> Simulation:
        return simulate(self.problem, self.costs, self.plan, steps=steps)

    @property
    def paper_s(self) -> float:
        return evaluate(self.problem, self.costs, self.plan).step_s


def case(
    graph: Graph,
    model: str,
    workload: Workload,
    pools: Mapping[str, int],
    homes: Mapping[str, str],
    *,
    device: str,
    tp: int,
    generate_tp: int,
    freshness: int = 0,
    engine: EngineFactors | None = None,
    **planned: float | str | bool,
) -> Case:
    """Roles on pools, each pool on machines of its own kind so that it may have any size."""
    fleets = tuple(
        Fleet(
            name=name,
            device=shipped_devices()[device],
            devices=devices,
            per_machine=min(devices, 8),
            between_bandwidth=NETWORK,
        )
        for name, devices in pools.items()
    )
    problem = Problem(
        graph=graph,
        shapes={
            role: shape(model, is_scalar=role in ("critic", "reward")) for role in homes if role != SAMPLER
        },
        workload=workload,
        hardware=Hardware(
            name=device, fleets=fleets, factors=Factors(decode_row_s=2e-5), engine=engine or EngineFactors()
        ),
    )
    if SAMPLER in homes:
        problem = problem.apart(freshness)
    sampler = SAMPLER if SAMPLER in homes else "policy"
    units = {
        unit: PlannedUnit(
            pool=pool,
            grid=Grid(dp=pools[pool] // tp, tp=tp, is_sharded=True),
            generate_tp=generate_tp if unit == sampler else 0,
        )
        for unit, pool in homes.items()
    }
    plan = Plan(
        name=graph.name,
        pools=tuple(
            PlannedPool(name=name, machine_type=name, devices=devices) for name, devices in pools.items()
        ),
        units=units,
        freshness=freshness,
        **planned,
    )
    return Case(problem=problem, costs=CostModel(problem), plan=plan)


def group_graph() -> Graph:
    """The step with groups and no critic, its roles programmed but for the policy."""
    return graphs(load_recipe(Path(__file__).parents[1] / "recipes/arithmetic/run.toml").recipe)[-1]


ROLES = ("policy", "critic", "reference", "reward")


def ppo(pools: Mapping[str, int], homes: Mapping[str, str], freshness: int = 0) -> Case:
    """1,024 rows of four models of 7B."""
    workload = Workload(
        prompts=128,
        samples=8,
        prompt=Lengths(kind="fixed", limit=1024),
        response=Lengths(kind="lognormal", limit=8192, median=800, sigma=0.9),
    )
    graph = graphs(load_recipe(Path(__file__).parents[1] / "recipes/ppo/run.toml").recipe)[-1]
    return case(
        graph,
        "Qwen2.5-7B",
        workload,
        pools,
        homes,
        device="A100-80",
        tp=4,
        generate_tp=2,
        freshness=freshness,
    )


TOGETHER = ({"main": 128}, dict.fromkeys(ROLES, "main"))
HALVES = ({"a": 64, "b": 64}, {"policy": "a", "reference": "a", "critic": "b", "reward": "b"})
AHEAD = ({"train": 64, "sample": 64}, {**dict.fromkeys(ROLES, "train"), SAMPLER: "sample"})


def median_s(work: Callable[[], object], times: int = 5) -> float:
    """The median of some runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found)


def speed_lines() -> list[str]:
    """Seconds to simulate, and the step simulated against the one on paper."""
    rows = [
        ("together", TOGETHER, 0),
        ("policy, reference / critic, reward", HALVES, 0),
        ("training / sampling, freshness 1", AHEAD, 1),
        ("training / sampling, freshness 4", AHEAD, 4),
    ]
    lines = [
        "## Speed, and agreement with paper",
        "",
        "PPO, four models of 7B on 128 A100, 1,024 rows, responses log-normal (median 800, sigma 0.9, "
        "at most 8,192). To simulate: seconds of one core, with tracing the graph and the cost model; "
        "median of 5. The first step of rows that flow is the filling of k + 1 batches.",
        "",
        "| placement | 1 step, s | 20 steps, s | step simulated | on paper | difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, placement, freshness in rows:
        one = median_s(lambda p=placement, k=freshness: ppo(*p, k).run(1))
        found = ppo(*placement, freshness)
        many = median_s(lambda c=found: c.run(20), 3)
        steps = found.run(20)
        step_s = steps.settled_step_s if freshness else steps.mean_step_s
        lines.append(
            f"| {name} | {one:.3f} | {many:.2f} | {step_s:.1f} | {found.paper_s:.1f} | "
            f"{step_s / found.paper_s - 1:+.1%} |"
        )
    return [*lines, ""]


def packed(prompts: float, answers: float) -> Case:
    """RollPacker's rollout: Qwen2.5-7B on 16 H800, 128 prompts x 8 answers."""
    workload = Workload(
        prompts=128,
        samples=8,
        prompt=Lengths(kind="fixed", limit=200),
        response=Lengths(kind="lognormal", limit=8192, median=2500, sigma=0.5),
    )
    return case(
        group_graph(),
        "Qwen2.5-7B",
        workload,
        {"main": 16},
        {"policy": "main"},
        device="H800",
        tp=1,
        generate_tp=1,
        oversample_prompts=prompts,
        oversample_samples=answers,
    )


def packed_lines() -> list[str]:
    """Rollout seconds with more begun than kept, as ratios to the plain one."""
    lines = [
        "## The tail: more begun than kept (RollPacker)",
        "",
        "Ratios to the rollout with nothing begun beside. Lengths as fitted in `planner.md` (median 2,500, "
        "sigma 0.5, independent). First rounds: of fresh prompts. All rounds: those of rows put aside too.",
        "",
        "| prompts begun | answers begun | published | first rounds | error | all rounds |",
        "|---|---|---|---|---|---|",
    ]
    plain = statistics.fmean(packed(1.0, 1.0).run(20).generation_s)
    for (prompts, answers), seconds in PACKED.items():
        found = packed(prompts, answers).run(20).generation_s
        later = round(1 / (prompts - 1)) if prompts > 1 else len(found)
        first, every = statistics.fmean(found[:later]) / plain, statistics.fmean(found) / plain
        known = seconds / 82
        lines.append(
            f"| {prompts} | {answers} | {known:.2f} | {first:.2f} | {first / known - 1:+.0%} | {every:.2f} |"
        )
    return [*lines, "", f"The plain rollout: published 82 s, simulated {plain:.0f} s.", ""]


def bounded(freshness: int, late: str, interrupts: bool = True) -> Case:
    """AReaL: 1.5B on 8 devices, 6 of which generate, 64 prompts x 16."""
    workload = Workload(
        prompts=64,
        samples=16,
        prompt=Lengths(kind="fixed", limit=150),
        response=lengths_of_mean(2500.0, 8192, 0.9),
        minibatches=4,
    )
    return case(
        group_graph(),
        "Qwen2.5-1.5B",
        workload,
        {"sample": 6, "train": 2},
        {"policy": "train", SAMPLER: "sample"},
        device="H800",
        tp=1,
        generate_tp=1,
        freshness=freshness,
        engine=EngineFactors(interrupts=interrupts),
        late=late,
    )


def steps_of(freshness: int) -> int:
    """Enough for the first batches, which are younger, to be in the earlier half."""
    return freshness + 8


def bounded_lines() -> list[str]:
    """Throughput by freshness bound, as ratios to bound 0."""
    kinds = {
        "wait": ("wait", False),
        "wait, interrupted": ("wait", True),
        "drop, interrupted (its own way)": ("drop", True),
    }
    lines = [
        "## Throughput by freshness bound (AReaL)",
        "",
        "Ratios of trained rows a second to bound 0. Assumed: 6 H800 generate and 2 train, mean response "
        "2,500, sigma 0.9, at most 8,192; k + 8 steps, the later half. Rows, not the tokens they happen to "
        "have: training takes what the mean length takes, and with these numbers it is what bounds the step.",
        "",
        "| | " + " | ".join(map(str, BOUNDS)) + " | rows dropped at 1 | mean age at 4 | at 16 |",
        "|---|" + "---|" * (len(BOUNDS) + 3),
        "| published | " + " | ".join(f"{rate / BOUNDS[0]:.2f}" for rate in BOUNDS.values()) + " | | | |",
    ]
    base = bounded(0, "wait").run(8).rows_per_s
    for name, (late, interrupts) in kinds.items():
        found = {k: bounded(k, late, interrupts).run(steps_of(k)) for k in BOUNDS if k}
        ratios = ["1.00", *(f"{one.rows_per_s / base:.2f}" for one in found.values())]
        dropped = sum(found[1].dropped.values()) / found[1].begun
        ages = [sum(age * rows for age, rows in found[k].ages.items()) / found[k].trained for k in (4, 16)]
        lines.append(f"| {name} | {' | '.join(ratios)} | {dropped:.0%} | {ages[0]:.1f} | {ages[1]:.1f} |")
    return [*lines, ""]


LADDER = {
    "apart, one after another": (1.00, {}),
    "and streamed inside a step": (2.01, {"streams": True}),
    "and one step ahead, weights hidden": (
        2.74,
        {"streams": True, "freshness": 1, "weights": "hidden"},
    ),
}
"""AsyncFlow: throughput of 7B on 512 devices, and what a plan says of each rung."""


def rung(score: int, sample: int, minibatches: int = 16, **planned: object) -> Case:
    """AsyncFlow's task-separated step: generation, reference and training on devices of their own."""
    workload = Workload(
        prompts=512,
        samples=8,
        prompt=Lengths(kind="fixed", limit=256),
        response=lengths_of_mean(2000.0, 8192, 0.9),
        minibatches=minibatches,
    )
    return case(
        graph_of("reinforce_pp"),
        "Qwen2.5-7B",
        workload,
        {"sample": sample, "score": score, "train": 512 - sample - score},
        {"policy": "train", "reference": "score", SAMPLER: "sample"},
        device="A100-80",
        tp=1,
        generate_tp=1,
        **planned,  # type: ignore[arg-type]
    )


def ladder_lines() -> list[str]:
    """AsyncFlow's ladder."""
    splits = [(64, 256), (64, 128), (128, 256)]
    heads = [f"{sample} + {score} + {512 - sample - score}" for score, sample in splits]
    lines = [
        "## Streaming and running ahead (AsyncFlow)",
        "",
        "Throughput of 7B on 512 devices, as ratios to generation, scoring and training apart, one after "
        "another. Split, lengths and batch are not published with it. Assumed: A100, 512 prompts x 8, mean "
        "response 2,000, sigma 0.9, at most 8,192, 16 minibatches; three splits into devices that generate, "
        "score, train.",
        "",
        f"| | published | {' | '.join(f'{head} | error' for head in heads)} |",
        "|---" * (2 + 2 * len(splits)) + "|",
    ]
    first: dict[tuple[int, int], float] = {}
    for name, (known, planned) in LADDER.items():
        cells = []
        for split in splits:
            found = rung(*split, **planned).run(8 if "freshness" in planned else 2)
            spent = found.settled_step_s if "freshness" in planned else found.mean_step_s
            ratio = first.setdefault(split, spent) / spent
            cells.append(f"{ratio:.2f} | {ratio / known - 1:+.0%}")
        lines.append(f"| {name} | {known:.2f} | {' | '.join(cells)} |")
    return [*lines, ""]


def mode_lines() -> list[str]:
    """verl's published steps, simulated with the shipped factors and the mean length that its fit has."""
    lines = [
        "## verl, in step and ahead",
        "",
        "Seconds of a step with the shipped `verl` factors and the mean length of their fit; ahead, training "
        "streams minibatches.",
        "",
        "| training + generating | published | simulated | error |",
        "|---|---|---|---|",
    ]
    mean = json.loads((Path(__file__).parent / "results/fits.json").read_text("utf-8"))["verl"]["values"][
        "mean"
    ]
    for row in verl.ROWS:
        step = verl.problem(row, mean)
        grid = Grid(dp=row.training // 4, cp=4, is_sharded=True)
        sampling = row.training if row.is_ahead else 0
        plan = replace(placed(grid, 4, sampling, int(row.is_ahead)), streams=row.is_ahead)
        found = simulate(step, CostModel(step), plan, steps=6 if row.is_ahead else 1)
        spent = found.settled_step_s
        off = spent / row.step_s - 1
        lines.append(f"| {row.training} + {sampling} | {row.step_s:.0f} | {spent:.0f} | {off:+.0%} |")
    return [*lines, ""]


def agreement_lines(known: Iterable[Compared] | None = None) -> list[str]:
    """Drawn plans: what the formulas say and what `rillflow plan` shows, against a long simulation."""
    lines = [
        "## Plan and simulation on 40 drawn problems",
        "",
        "`benchmarks/drawn_plans.py` draws model, devices, algorithm, rows, lengths, engine and bound, and "
        "takes one of the four best placements. Computed: by formulas. Shown: what `rillflow plan` shows "
        "first, which ahead is a short simulation. Simulated: more steps, another seed.",
        "",
        "| devices | pools | bound | interrupts | rows | mean, most, sigma | computed | shown | simulated "
        "| computed off | shown off |",
        "|---" * 11 + "|",
    ]
    off: dict[str, list[float]] = {"in step, computed": [], "ahead, computed": [], "ahead, shown": []}
    for found in map(compared, range(40)) if known is None else known:
        one, load, bound = found.drawn, found.drawn.problem.workload, found.drawn.plan.freshness
        computed, shown = found.computed_s / found.simulated_s - 1, found.shown_s / found.simulated_s - 1
        off["ahead, computed" if bound else "in step, computed"].append(computed)
        if bound:
            off["ahead, shown"].append(shown)
        pools, hardware = " + ".join(str(pool.devices) for pool in one.plan.pools), one.problem.hardware
        lines.append(
            f"| {hardware.devices} | {pools} | {bound} | {'yes' if hardware.engine.interrupts else 'no'} | "
            f"{load.prompts} x {load.samples} | {load.response.mean:.0f}, {load.response.limit}, "
            f"{load.response.sigma} | {found.computed_s:.2f} | {found.shown_s:.2f} | "
            f"{found.simulated_s:.2f} | {computed:+.0%} | {shown:+.0%} |"
        )
    lines += ["", "| | within 5% | within 10% | median | worst |", "|---|---|---|---|---|"]
    for name, errors in off.items():
        sizes = sorted(map(abs, errors))
        within = [sum(size <= limit for size in sizes) for limit in (0.05, 0.10)]
        lines.append(
            f"| {name} | {within[0]} of {len(sizes)} | {within[1]} of {len(sizes)} | "
            f"{statistics.median(sizes):.1%} | {sizes[-1]:.0%} |"
        )
    return [*lines, ""]


PARTS = {
    "speed": speed_lines,
    "agreement": agreement_lines,
    "packed": packed_lines,
    "bounded": bounded_lines,
    "ladder": ladder_lines,
    "modes": mode_lines,
}


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a markdown file for the tables")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these tables alone")
    chosen = parser.parse_args()
    lines = [
        "# The simulator",
        "",
        f"`{COMMAND}`, one of {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"numpy {np.__version__}.",
        "",
        *(line for name in chosen.only or PARTS for line in PARTS[name]()),
    ]
    text = "\n".join(lines)
    if chosen.write:
        chosen.write.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
