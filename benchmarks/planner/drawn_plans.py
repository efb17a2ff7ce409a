"""Randomly drawn problems and placements, with the planned seconds next to simulated ones."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from published.models import shape

from rillflow.errors import PlanError
from rillflow.graph.graph import Graph
from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import LAYOUTS
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import read_hardware, shipped_stacks
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem
from rillflow_planner.request import graph_of
from rillflow_planner.search import search
from rillflow_planner.simulator.simulate import enough_steps, simulate
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

MODELS = {
    "Qwen2.5-1.5B": 8,
    "Qwen2.5-7B": 16,
    "Llama-3.1-8B": 16,
    "Llama-13B": 32,
    "Qwen3-30B-A3B": 64,
    "Qwen3-32B": 64,
}
"""The least number of devices for each model."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan and its problem."""

    problem: Problem
    """A randomly drawn problem."""
    plan: Plan
    """One of its four best placements."""


def drawn(seed: int) -> Drawn:
    """Draw the problem and the plan of a seed, on H100."""
    draw = random.Random(seed)
    model = draw.choice(sorted(MODELS))
    devices = draw.choice([size for size in (8, 16, 32, 64, 128, 256) if size >= MODELS[model]])
    graph = graph_of(draw.choice(["grpo", "cispo", "ppo"]))
    sigma = draw.choice([0.3, 0.6, 0.9, 1.2])
    mean = math.exp(draw.uniform(math.log(200), math.log(4000)))
    limit = round(mean * math.exp(draw.uniform(math.log(2), math.log(12))))
    freshness = draw.choice([0, 0, 0, 0, 1, 1, 2, 4, 8])
    workload = Workload(
        prompts=draw.choice([16, 32]),
        samples=draw.choice([4, 8]),
        prompt=Lengths(kind="fixed", limit=draw.choice([64, 256, 1024])),
        response=lengths_of_mean(mean, limit, sigma),
        minibatches=draw.choice([1, 2, 4]),
    )
    data = {
        "machine_type": [{"device": "H100", "devices": devices, "per_machine": 8, "between": "50 GB/s"}],
        "engine": {"interrupts": draw.random() < 0.5},
    }
    return _placed(draw, graph, shape(model), workload, data, freshness)


def drawn_on_processor(seed: int) -> Drawn:
    """Draw the problem and the plan of a seed, for a small model on cores of one processor."""
    draw = random.Random(seed)
    graph = graph_of(draw.choice(["grpo", "cispo", "ppo"]))
    width, heads = draw.choice([64, 128, 256, 512]), draw.choice([2, 4, 8])
    model = ModelShape(
        name="small",
        hidden=width,
        layers=draw.choice([2, 4, 6, 8]),
        heads=heads,
        kv_heads=draw.choice([heads, heads // 2]),
        head_dim=width // heads,
        inner=draw.choice([2, 4]) * width,
        vocabulary=draw.choice([256, 4096]),
    )
    mean = math.exp(draw.uniform(math.log(8), math.log(200)))
    workload = Workload(
        prompts=draw.choice([2, 4, 16, 32]),
        samples=draw.choice([1, 4, 8]),
        prompt=Lengths(kind="fixed", limit=draw.choice([8, 32, 128])),
        response=lengths_of_mean(mean, round(4 * mean), draw.choice([0.3, 0.6, 0.9])),
        dtype="float32",
        rows_at_once=draw.choice([4, 64]),
    )
    cores = draw.choice([1, 2, 4, 8])
    data = {
        "like": "rillflow",
        "machine_type": [{"device": "cpu", "devices": cores, "per_machine": cores}],
        "factors": {"step_s": "15 ms", "step_row_s": "150 us"},
    }
    return _placed(draw, graph, model, workload, data, draw.choice([0, 0, 1, 2]) if cores > 1 else 0)


def recommended(seed: int, stack: str) -> Drawn | None:
    """Draw a problem for a stack, and return its best plan; None if none fits."""
    draw = random.Random(seed)
    model, devices = draw.choice(sorted(MODELS)), 8 * draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 32])
    graph = graph_of(draw.choice(["grpo", "ppo"]))
    published = shipped_stacks()[stack].published
    mean = math.exp(draw.uniform(math.log(200), math.log(4000)))
    minibatches = draw.choice([1, 2, 4])
    problem = Problem(
        graph=graph,
        shapes={
            role: shape(model, is_scalar=role == "critic")
            for role in graph.roles
            if role not in ("controller", "reward")
        },
        workload=Workload(
            prompts=minibatches * draw.choice([8, 12, 16, 36, 64]),
            samples=draw.choice([4, 6, 8, 16]),
            prompt=Lengths(kind="fixed", limit=256),
            response=lengths_of_mean(mean, round(4 * mean), 0.6),
            minibatches=minibatches,
        ),
        hardware=read_hardware(
            {
                "machine_type": [
                    {"device": "H100", "devices": devices, "per_machine": 8, "between": "50 GB/s"}
                ],
                "like": stack,
            },
            "drawn",
        ),
        layouts=LAYOUTS[published.layouts if published else "rillflow"],
    )
    try:
        plan = search(problem, CostModel, freshness=(draw.choice([0, 0, 1]),)).best[0].plan
    except PlanError:
        return None
    return Drawn(problem=problem.of_plan(plan), plan=plan)


def _placed(
    draw: random.Random,
    graph: Graph,
    model: ModelShape,
    workload: Workload,
    cluster: Mapping[str, Any],
    freshness: float,
) -> Drawn:
    """Draw one of the four best placements of a model in every role."""
    problem = Problem(
        graph=graph,
        shapes={
            role: replace(model, is_scalar=role == "critic")
            for role in graph.roles
            if role not in ("controller", "reward")
        },
        workload=workload,
        hardware=read_hardware(cluster, "drawn"),
    )
    ranking = search(problem, CostModel, freshness=(freshness,), separate_in_step=True)
    plan = draw.choice(ranking.best[:4]).plan
    return Drawn(problem=problem.of_plan(plan), plan=plan)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Seconds of a step of a drawn plan."""

    drawn: Drawn
    """The problem and its plan."""
    computed_s: float
    """Seconds by the cost model."""
    shown_s: float
    """Seconds that ``rillflow plan`` shows first: by formulas at freshness 0, else by a short simulation."""
    simulated_s: float
    """Seconds by a longer simulation with another seed."""


def compared(seed: int, times: int = 4) -> Compared:
    """Compute and simulate the plan of a seed over ``times`` as many steps as a stable estimate needs."""
    return compared_plan(drawn(seed), times)


def compared_plan(one: Drawn, times: int = 4) -> Compared:
    """Compute and simulate a plan over ``times`` as many steps as a stable estimate needs."""
    costs, ahead, enough = CostModel(one.problem), one.plan.freshness, enough_steps(one.problem, one.plan)
    computed_s = evaluate(one.problem, costs, one.plan).step_s
    steps = times * enough if ahead else 16 * times * enough
    long = simulate(one.problem, costs, one.plan, steps=steps, seed=1)
    return Compared(
        drawn=one,
        computed_s=computed_s,
        shown_s=simulate(one.problem, costs, one.plan, steps=enough).settled_step_s if ahead else computed_s,
        simulated_s=long.settled_step_s if ahead else long.mean_step_s,
    )
