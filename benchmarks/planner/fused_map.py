"""Where fusing the updates of actor and critic pays, beside the best plan without fusion.

    python benchmarks/planner/fused_map.py                                            # prints the page
    python benchmarks/planner/fused_map.py --write benchmarks/results/fused_map.md

Seconds are the planner's formulas, not measurements. A step is both updates of a PPO step and nothing else;
its plans are those that ``rillflow plan`` finds with and without fusion.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from published.models import shape

from rillflow.errors import PlanError
from rillflow.graph.graph import Graph, Stage
from rillflow_parts.fusion.alignment import fused_of
from rillflow_parts.fusion.scheduling.solve import quick_schedule
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.fused import ROUNDS
from rillflow_planner.fusion import LONGEST, with_fusion
from rillflow_planner.hardware import read_hardware
from rillflow_planner.problem import Problem
from rillflow_planner.ranking import PAYS, Fusion, Ranked, SearchObjective
from rillflow_planner.search import search
from rillflow_planner.workload import Lengths, Workload

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
import measured_at

from tests.parts.fusion.scheduling.check import check

SMALLEST = ["--pairs 0 --devices 32 --minibatches 64"]
NEEDS = ["rillflow_planner"]
PAIRS = (
    ("Llama-7B", "Llama-7B"),
    ("Llama-13B", "Llama-7B"),
    ("Llama-34B", "Llama-13B"),
    ("Llama-70B", "Llama-34B"),
)
LINKS = ("50 GB/s", "12.5 GB/s", "3 GB/s")
"""A device's share of the network. Inside a machine of 8 H100 it is NVLink."""
ROW_TOKENS = 1024


def updates(pair: tuple[str, str], devices: int, link: str, minibatches: int) -> Problem:
    """Both updates of 512 rows of 2,048 tokens."""
    data: dict[str, Any] = {
        "machine_type": [{"device": "H100", "devices": devices, "per_machine": 8, "between": link}],
        "engine": {"zero1": True},
    }
    fixed = Lengths(kind="fixed", limit=ROW_TOKENS)
    workload = Workload(
        prompts=512,
        samples=1,
        prompt=fixed,
        response=fixed,
        minibatches=minibatches,
        tokens_per_micro_batch=2 * ROW_TOKENS,
    )
    roles = ("policy", "critic")
    stages = [
        Stage(index=n, role=role, endpoint="update", reads=(), writes=()) for n, role in enumerate(roles)
    ]
    return Problem(
        graph=Graph(name="ppo", stages=tuple(stages), edges=()),
        shapes={"policy": shape(pair[0]), "critic": shape(pair[1], is_scalar=True)},
        workload=workload,
        hardware=read_hardware(data, "map"),
    )


def compared(problem: Problem) -> Fusion | None:
    """The best fused plan beside the best plan without; None if nothing fits."""
    try:
        ranking = search(problem, CostModel)
    except PlanError:
        return None
    return with_fusion(problem, ranking, SearchObjective()).fusion


def grids(one: Ranked) -> str:
    """The grids of both, and whether they share devices."""
    units = [one.plan.units[name] for name in ("policy", "critic")]
    how = "" if fused_of(one.plan) else ("in turn: " if units[0].pool == units[1].pool else "apart: ")
    return how + "; ".join(str(unit.grid) for unit in units)


def confirmed(problem: Problem, found: Ranked) -> float:
    """Seconds of a fused step with a schedule of all micro-batches, over those of the planner.

    Raises:
        SystemExit: the independent checker finds a fault in the schedule.
    """
    pool, seats = found.plan.pools[0], found.evaluation.units
    options = {name: seat.option for name, seat in seats.items()}
    pair = [seats[name].unit for name in fused_of(found.plan)]
    parts, whole = CostModel(problem).fused_stage(pool.machine_type, options, pair)
    made = quick_schedule(whole)
    if faults := check(whole, made):
        raise SystemExit("\n".join(faults))
    steps = problem.workload.minibatches
    return steps * (made.latency_s + sum(part.beside_s for part in parts)) / found.evaluation.step_s


def row(case: str, found: Fusion | None) -> str:
    """A row of the table."""
    if found is None:
        return f"| {case} | none fits | | | | |"
    plain = f"{grids(found.plain)} | {found.plain.value:.2f}"
    if found.best is None:
        return f"| {case} | {plain} | none fits | | |"
    least, most = ("at least: ", "at most ") if found.is_bound else ("", "")
    best = f"{least}{grids(found.best)} | {found.best.value:.2f}"
    return f"| {case} | {plain} | {best} | {most}{100 * found.gain:+.0f}% |"


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, nargs="*", default=list(range(len(PAIRS))))
    parser.add_argument("--devices", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--minibatches", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--write", type=Path, help="page of results to write")
    arguments = parser.parse_args()
    rows = [
        "| actor, critic | H100 | link | minibatches | best without fusion | s | best fused | s | gain |",
        "|---|---:|---|---:|---|---:|---|---:|---:|",
    ]
    spent: list[float] = []
    whole: list[float] = []
    for place in arguments.pairs:
        for devices in arguments.devices:
            for link in LINKS:
                for minibatches in arguments.minibatches:
                    begin = time.process_time()
                    problem = updates(PAIRS[place], devices, link, minibatches)
                    found = compared(problem)
                    spent.append(time.process_time() - begin)
                    case = f"{', '.join(PAIRS[place])} | {devices} | {link} | {minibatches}"
                    rows.append(row(case, found))
                    if found is not None and found.best is not None and not found.why:
                        whole.append(confirmed(problem, found.best))
                    print(rows[-1], file=sys.stderr, flush=True)
    page = [
        "# Where fused updates pay",
        "",
        measured_at.line(),
        "",
        "```",
        " ".join(["python", "benchmarks/planner/fused_map.py", *sys.argv[1:]]),
        "```",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores. Predicted seconds of both updates of a "
        "PPO step: 512 rows of 2,048 tokens, micro-batches of one row, recomputed activations, ZeRO-1, "
        "machines of 8 H100, default factors. Gain: seconds without fusion over those with it. \"At least\" "
        f"marks a plan whose bound cannot win by {PAYS:.0%}, so it was not scheduled; then the gain is at "
        f"most the one shown. Fused pipelines have at most {LONGEST} stages; other plans have no "
        f"such limit. Schedules are the best of {ROUNDS} rounds of list schedules.",
        "",
        f"Fusion pays in {len(whole)} of {len(spent)} cases. There the schedule was made again for all "
        f"micro-batches and passed `fused.check`; a step then takes {min(whole, default=1):.3f} to "
        f"{max(whole, default=1):.3f} times the seconds in the table. A case took {max(spent):.2f} processor "
        "seconds at most, the search without fusion included.",
        "",
        *rows,
        "",
    ]  # fmt: skip
    if arguments.write:
        arguments.write.write_text("\n".join(page), encoding="utf-8")
    else:
        print("\n".join(page))


if __name__ == "__main__":
    main()
