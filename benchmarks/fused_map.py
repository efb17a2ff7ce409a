"""Where fusing the updates of actor and critic pays, beside the best plan without fusion.

    python benchmarks/fused_map.py                                            # prints the page
    python benchmarks/fused_map.py --write benchmarks/results/fused_map.md

Seconds are the planner's formulas, not measurements. Both updates of a PPO step, without fusion: one after
the other on all devices, or side by side on two parts of them, on any grids (pipelines, tensor parallelism,
FSDP). Fused: both models as pipelines with the same tensor parallelism over the same devices.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured_at
from published.models import shape

from rillflow.placement.fused.problem import FusedProblem, Pipeline, even, lower_bound
from rillflow.placement.fused.solve import schedule
from rillflow.placement.grid import Grid
from rillflow_planner.cost_model import compute, memory
from rillflow_planner.cost_model.compute import RECOMPUTED, Setting
from rillflow_planner.cost_model.options import LAYOUTS, divisors, grids
from rillflow_planner.hardware import read_hardware
from rillflow_planner.problem import Problem
from rillflow_planner.request import graph_of
from rillflow_planner.workload import Lengths, Workload

SMALLEST = ["--pairs 0 --devices 32 --minibatches 64 --budget 20"]
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
SCHEDULED, LONGEST = 3, 16
"""Fused plans of the least bounds that are scheduled, and the most stages of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pair of models on devices."""

    actor: Setting
    """The policy."""
    critic: Setting
    """The critic."""
    devices: int
    """Devices of both."""

    @property
    def room_bytes(self) -> float:
        """Memory of a device."""
        return self.actor.fleet.device.memory_bytes * self.actor.factors.memory


def case(pair: tuple[str, str], devices: int, link: str, minibatches: int) -> Case:
    """A PPO step of 512 rows of 2,048 tokens."""
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
    graph = graph_of("ppo")
    shapes = {"policy": shape(pair[0]), "critic": shape(pair[1], is_scalar=True)}
    hardware = read_hardware(data, "map")
    problem = Problem(graph=graph, shapes=shapes, workload=workload, hardware=hardware)
    settings = [Setting(problem=problem, shape=each, fleet=hardware.fleets[0]) for each in shapes.values()]
    return Case(actor=settings[0], critic=settings[1], devices=devices)


def alone(setting: Setting, devices: int) -> Iterator[tuple[float, Grid, float, float]]:
    """Seconds of an update, its grid, resident and working bytes, of every grid."""
    for grid in grids(setting.shape, devices, min(8, devices), LAYOUTS["rillflow"]):
        kept = memory.weight_bytes(setting, grid) + memory.optimizer_bytes(setting, grid)
        yield (
            float(compute.train_s(setting, grid)),
            grid,
            float(kept),
            float(memory.training_bytes(setting, grid)),
        )


def unfused(one: Case) -> tuple[float, str]:
    """The best plan without fusion."""
    found: list[tuple[float, str]] = []
    both = [sorted(alone(each, one.devices), key=lambda way: way[0]) for each in (one.actor, one.critic)]
    for actor in both[0]:
        for critic in both[1]:
            if actor[2] + critic[2] + max(actor[3], critic[3]) <= one.room_bytes:
                found.append((actor[0] + critic[0], f"in turn: {actor[1]}; {critic[1]}"))
                break
    for part in divisors(one.devices):
        if part % 8 or part == one.devices:
            continue
        apart = []
        for setting, devices in ((one.actor, one.devices - part), (one.critic, part)):
            fits = [way for way in alone(setting, devices) if way[2] + way[3] <= one.room_bytes]
            apart.append(min(fits, key=lambda way: way[0], default=None))
        if apart[0] and apart[1]:
            found.append((max(apart[0][0], apart[1][0]), f"apart: {apart[0][1]}; {apart[1][1]}"))
    return min(found, default=(float("inf"), "none fits"))


def pipeline(setting: Setting, grid: Grid, name: str) -> tuple[Pipeline, float]:
    """The pipeline of one replica's minibatch, and the seconds of the optimiser step."""
    workload = setting.workload
    load = compute.load_of(workload, grid.dp, workload.minibatches)
    work = compute.products_s(setting, load, grid, RECOMPUTED, setting.factors.train_flops)
    terms = (compute.activations_s, compute.attention_s, compute.launches_s, compute.tensor_s)
    work = work + sum(term(setting, load, grid, RECOMPUTED) for term in terms)
    micro_batches = int(load.micro_batches)
    running = min(grid.pp, micro_batches)
    each_s = float(work) / micro_batches / RECOMPUTED
    sent_s = float(compute.pipeline_s(setting, load, grid, RECOMPUTED)) / micro_batches / 2
    kept = float(memory.activation_bytes(setting, load, grid)) / running
    made = even(
        name,
        stages=grid.pp,
        micro_batches=micro_batches,
        forward_s=each_s,
        backward_s=(RECOMPUTED - 1) * each_s,
        activation_bytes=kept,
        send_s=sent_s if grid.pp > 1 else 0.0,
    )
    return made, float(compute.gradients_s(setting, grid) + compute.optimizer_s(setting, grid))


def fused(one: Case, budget: int, below_s: float) -> tuple[float, str]:
    """The best fused plan; plans whose bound is above ``below_s`` are not scheduled, only bounded."""
    ways = []
    for tp in divisors(min(8, one.devices)):
        for actor_pp in divisors(one.devices // tp):
            for critic_pp in divisors(one.devices // tp):
                longer, shorter = max(actor_pp, critic_pp), min(actor_pp, critic_pp)
                fit = all(
                    s.shape.layers % p == 0 for s, p in ((one.actor, actor_pp), (one.critic, critic_pp))
                )
                if 1 < longer <= LONGEST and longer % shorter == 0 and fit:
                    way = fused_way(one, tp, actor_pp, critic_pp)
                    ways += [way] if way else []
    best_s, said = float("inf"), "none fits"
    for bound_s, problem, beside_s, name in sorted(ways, key=lambda way: way[0])[:SCHEDULED]:
        if bound_s >= min(best_s, below_s):
            break
        count = one.actor.workload.minibatches
        latency_s = schedule(problem, budget=budget).latency_s
        if count * (latency_s + beside_s) < best_s:
            best_s, said = count * (latency_s + beside_s), name
    if best_s == float("inf") and ways:
        bound_s, _, _, name = min(ways, key=lambda way: way[0])
        return bound_s, f"at least: {name}"
    return best_s, said


def fused_way(
    one: Case, tp: int, actor_pp: int, critic_pp: int
) -> tuple[float, FusedProblem, float, str] | None:
    """Bound, problem, seconds outside the schedule and name of a fused plan; None if it does not fit."""
    sizes = [Grid(dp=one.devices // tp // pp, pp=pp, tp=tp) for pp in (actor_pp, critic_pp)]
    pipelines, beside_s, room = [], 0.0, one.room_bytes
    for setting, grid, name in zip((one.actor, one.critic), sizes, ("actor", "critic"), strict=True):
        if setting.shape.heads % tp or setting.shape.kv_heads % tp or grid.dp > setting.workload.rows:
            return None
        made, after_s = pipeline(setting, grid, name)
        load = compute.load_of(setting.workload, grid.dp, setting.workload.minibatches)
        room -= float(memory.weight_bytes(setting, grid) + memory.optimizer_bytes(setting, grid))
        tokens = memory.micro_batch_tokens(setting, load, grid)
        room -= float(memory.logit_bytes(setting, tokens, grid, 2))
        pipelines.append(made)
        beside_s += after_s
    if room < max(each.activation_bytes for each in pipelines):
        return None
    problem = FusedProblem(
        devices=max(actor_pp, critic_pp), ascending=pipelines[0], descending=pipelines[1], memory_bytes=room
    )
    bound_s = one.actor.workload.minibatches * (lower_bound(problem) + beside_s)
    return bound_s, problem, beside_s, f"{sizes[0]}; {sizes[1]}"


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, nargs="*", default=list(range(len(PAIRS))))
    parser.add_argument("--devices", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--minibatches", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--budget", type=int, default=200, help="schedules timed for each fused plan")
    parser.add_argument("--write", type=Path, help="page of results to write")
    arguments = parser.parse_args()
    rows = [
        "| actor, critic | H100 | link | minibatches | best without fusion | s | best fused | s | gain |",
        "|---|---:|---|---:|---|---:|---|---:|---:|",
    ]
    for place in arguments.pairs:
        for devices in arguments.devices:
            for link in LINKS:
                for minibatches in arguments.minibatches:
                    one = case(PAIRS[place], devices, link, minibatches)
                    plain_s, plain = unfused(one)
                    fused_s, way = fused(one, arguments.budget, plain_s)
                    gain = f"{100 * (plain_s / fused_s - 1):+.0f}%"
                    rows.append(
                        f"| {', '.join(PAIRS[place])} | {devices} | {link} | {minibatches} | {plain} | "
                        f"{plain_s:.2f} | {way} | {fused_s:.2f} | {gain} |"
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
    page = [
        "# Where fused updates pay",
        "",
        measured_at.line(),
        "",
        "```",
        " ".join(["python", "benchmarks/fused_map.py", *sys.argv[1:]]),
        "```",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores. Predicted seconds of both updates of a "
        "PPO step: 512 rows of 2,048 tokens, micro-batches of one row, recomputed activations, ZeRO-1, "
        "machines of 8 H100, default factors. Gain: seconds without fusion over those with it. \"At least\" "
        "stands for a bound that is above the plan without fusion already, so nothing was scheduled. Fused "
        f"pipelines have at most {LONGEST} stages of equally many layers; other plans have no such limit. "
        f"The {SCHEDULED} fused plans with the least bounds are scheduled.",
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
