"""The simulator: how fast it is, how well it agrees with paper, and the shapes others published.

    python benchmarks/planner/simulator.py --write benchmarks/results/simulator.md      # minutes, one core
    python benchmarks/planner/simulator.py --fit  # RollPacker's lengths anew

Nothing but the lengths of RollPacker's rows is fitted here; what is assumed stands above each table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from drawn_plans import Compared, compared
from published.asynchronous_tables import SIGNS, pair_lines, sign_lines, verl_lines
from published.fitting import Fit, summary
from published.models import shape

from rillflow.app.recipe import load_recipe
from rillflow.graph.graph import Graph
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import EngineFactors, Fleet, Hardware, shipped_devices, shipped_stacks
from rillflow_planner.problem import Problem
from rillflow_planner.request import graph_of
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

sys.path.append(str(Path(__file__).parents[1]))
import measured_at

# Simulates plans of thousands of devices.
SMALLEST = []
SLOW = ["--only speed"]
NEEDS = ["rillflow_planner"]

NETWORK = 50e9
COMMAND = "python benchmarks/planner/simulator.py --write benchmarks/results/simulator.md"
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
ROUNDS = 6
PACKING_FIT = Path(__file__).parents[1] / "results/packing.json"
"""The lengths fitted to these rollouts."""


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
    **planned: float,
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
            name=device,
            fleets=fleets,
            factors=shipped_stacks()["areal"].factors,
            engine=engine or EngineFactors(),
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
    return load_recipe(Path(__file__).parents[2] / "recipes/arithmetic/run.toml").graphs[-1]


ROLES = ("policy", "critic", "reference", "reward")


def ppo(pools: Mapping[str, int], homes: Mapping[str, str], freshness: int = 0) -> Case:
    """1,024 rows of four models of 7B."""
    workload = Workload(
        prompts=128,
        samples=8,
        prompt=Lengths(kind="fixed", limit=1024),
        response=Lengths(kind="lognormal", limit=8192, median=800, sigma=0.9),
    )
    graph = load_recipe(Path(__file__).parents[2] / "recipes/ppo/run.toml").graphs[-1]
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


def packed(begun: tuple[float, float], lengths: Mapping[str, float], rounds: int = ROUNDS) -> list[float]:
    """Seconds of RollPacker's rounds: Qwen2.5-7B on 16 H800, 128 prompts x 8 answers, so many times begun."""
    workload = Workload(
        prompts=128,
        samples=8,
        prompt=Lengths(kind="fixed", limit=200),
        response=Lengths(kind="lognormal", limit=8192, **lengths),
    )
    found = case(
        group_graph(),
        "Qwen2.5-7B",
        workload,
        {"main": 16},
        {"policy": "main"},
        device="H800",
        tp=1,
        generate_tp=1,
        oversample_prompts=begun[0],
        oversample_samples=begun[1],
    )
    return list(found.run(rounds).generation_s)


def first_s(begun: tuple[float, float], lengths: Mapping[str, float]) -> float:
    """Mean seconds of the first rounds: those of fresh prompts."""
    later = round(1 / (begun[0] - 1)) if begun[0] > 1 else ROUNDS
    return statistics.fmean(packed(begun, lengths, min(later, ROUNDS)))


PACKING: Fit[tuple[float, float]] = Fit(
    ratios=lambda begun, values: [first_s(begun, values) / PACKED[begun]],
    free={"median": (200.0, 1500.0, 6000.0), "sigma": (0.3, 0.9, 1.5)},
)


def fit_packing() -> None:
    """Fit the lengths of RollPacker's answers to its rollouts: to all, and without each way to begin more."""
    rows, left = list(PACKED), {}
    for way in (0, 1):
        part = [row for row in rows if row[way] > 1 == row[1 - way]]
        known = PACKING.values([row for row in rows if row not in part])
        left |= {str(row): round(PACKING.ratios(row, known)[0], 4) for row in part}
    found = {"values": PACKING.values(rows), "left_out": left}
    PACKING_FIT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def packed_lines() -> list[str]:
    """Rollout seconds with more begun than kept."""
    fit = json.loads(PACKING_FIT.read_text("utf-8"))
    lengths, left = fit["values"], fit["left_out"]
    lines = [
        "## The tail: more begun than kept (RollPacker)",
        "",
        "Seconds of a rollout. Answers are log-normal, clipped at 8,192 tokens; median "
        f"{lengths['median']:.0f} and sigma {lengths['sigma']:.2f} are fitted to these rollouts (`--fit`, "
        "from 1,500 and 0.9). First rounds: of fresh prompts; left out: by a fit without the rows that begin "
        "more prompts alone, or more answers alone. All rounds: with those of rows put aside (RollPacker's "
        "long rounds).",
        "",
        "| prompts begun | answers begun | published | first rounds | error | left out | all rounds |",
        "|---" * 7 + "|",
    ]
    plain = first_s((1.0, 1.0), lengths)
    for begun, known in PACKED.items():
        first, every = first_s(begun, lengths), statistics.fmean(packed(begun, lengths))
        off = f"{left[str(begun)] - 1:+.0%}" if str(begun) in left else ""
        cells = f"{known} | {first:.0f} | {first / known - 1:+.0%} | {off} | {every:.0f}"
        lines.append(f"| {begun[0]} | {begun[1]} | {cells} |")
        if begun != (1.0, 1.0):
            SIGNS["RollPacker: more begun than kept"].append((known - 82, first - plain))
    told = summary([*left.values()]).split(" | ")
    return [*lines, "", f"Left out: median error {told[1]}, worst {told[2]}.", ""]


def bounded(freshness: int, *, counts: bool, interrupts: bool = True) -> Case:
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
        engine=EngineFactors(interrupts=interrupts, counts=counts),
    )


def bounded_lines() -> list[str]:
    """Throughput by freshness bound, as ratios to bound 0."""
    kinds = {
        "counts rows, interrupted (its own way)": (True, True),
        "counts rows": (True, False),
        "bounds the age, interrupted": (False, True),
        "bounds the age": (False, False),
    }
    lines = [
        "## Throughput by freshness bound (AReaL)",
        "",
        "Ratios of trained rows a second to bound 0 (`max_head_offpolicyness`). Assumed: 6 H800 generate and "
        "2 train, mean response 2,500, sigma 0.9, at most 8,192; k + 8 steps. Training takes what the mean "
        "length takes.",
        "",
        "| | " + " | ".join(map(str, BOUNDS)) + " | mean age at 4 | at 16 |",
        "|---|" + "---|" * (len(BOUNDS) + 2),
        "| published | " + " | ".join(f"{rate / BOUNDS[0]:.2f}" for rate in BOUNDS.values()) + " | | |",
    ]
    base = bounded(0, counts=True).run(8).rows_per_s
    for name, (counts, interrupts) in kinds.items():
        found = {k: bounded(k, counts=counts, interrupts=interrupts).run(k + 8) for k in BOUNDS if k}
        ratios = ["1.00", *(f"{one.rows_per_s / base:.2f}" for one in found.values())]
        ages = [sum(age * rows for age, rows in found[k].ages.items()) / found[k].trained for k in (4, 16)]
        lines.append(f"| {name} | {' | '.join(ratios)} | {ages[0]:.1f} | {ages[1]:.1f} |")
        if counts and interrupts:
            signs = [(1 / BOUNDS[k] - 1 / BOUNDS[0], base - one.rows_per_s) for k, one in found.items()]
            SIGNS["AReaL, 1.5B on 8: bound above 0"] += signs
    return [*lines, ""]


LADDER = {
    "apart, one after another": (1.00, {}),
    "and streamed inside a step": (2.01, {"streams": 1}),
    "and one step ahead": (2.74, {"streams": 1, "freshness": 1}),
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
            if planned:
                SIGNS["AsyncFlow: streaming, one step ahead, three splits"].append((1 - known, 1 - ratio))
        lines.append(f"| {name} | {known:.2f} | {' | '.join(cells)} |")
    return [*lines, ""]


def agreement_lines(known: Iterable[Compared] | None = None) -> list[str]:
    """Drawn plans: what the formulas say and what `rillflow plan` shows, against a long simulation."""
    lines = [
        "## Plan and simulation on 40 drawn problems",
        "",
        "`benchmarks/planner/drawn_plans.py` draws model, devices, algorithm, rows, lengths, engine and "
        "bound, and takes one of the four best placements. Computed: by formulas. Shown: what "
        "`rillflow plan` shows first, which ahead is a short simulation. Simulated: more "
        "steps, another seed.",
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
    "verl": verl_lines,
    "pairs": pair_lines,
}


def made(part: str) -> tuple[list[str], dict[str, list[tuple[float, float]]]]:
    """Return a table, and the signs of its pairs."""
    SIGNS.clear()
    return PARTS[part](), dict(SIGNS)


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a markdown file for the tables")
    parser.add_argument("--fit", action="store_true", help="fit the lengths of RollPacker's answers")
    parser.add_argument("--jobs", type=int, default=1, help="tables made at the same time")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these tables alone")
    chosen = parser.parse_args()
    if chosen.fit:
        fit_packing()
        return
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = list(pool.map(made, chosen.only or PARTS))
    lines = [
        "# The simulator",
        "",
        f"`{COMMAND}`, one of {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"numpy {np.__version__}.",
        "",
        *(line for part, _ in found for line in part),
        *sign_lines({kind: pairs for _, signs in found for kind, pairs in signs.items()}),
    ]
    text = measured_at.below_title("\n".join(lines) + "\n", measured_at.line())
    if chosen.write:
        chosen.write.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
