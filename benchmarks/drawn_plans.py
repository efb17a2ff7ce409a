"""Randomly drawn problems and placements, with the planned seconds next to simulated ones."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from published.models import shape

from rillflow.placement.plan import Plan
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import read_hardware
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
    """Draw the problem and the plan of a seed."""
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
    scalar = {role: role in ("critic",) for role in graph.roles}
    problem = Problem(
        graph=graph,
        shapes={
            role: shape(model, is_scalar=scalar[role])
            for role in graph.roles
            if role not in ("controller", "reward")
        },
        workload=workload,
        hardware=read_hardware(data, "drawn"),
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
    one = drawn(seed)
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
