"""Every plan of a small drawn problem, one by one, to compare a search with: what ``mapping.py`` reports.

A problem has one to four models on 4 to 16 devices. A plan has a set partition of the models, a size for
each device group, a grid for each model, and a size of the generation copy: all that the runtime allows, with
those that the search drops because others are faster and smaller.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from rillflow.errors import PlanError
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.options import copy_sizes, copy_sizes_of, grids
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import read_hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.request import graph_of
from rillflow_planner.search import search
from rillflow_planner.variant import partitions
from rillflow_planner.workload import Lengths, Workload, lengths_of_mean

FEWEST, MOST = 100, 4_000
"""Number of plans of a drawn problem."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A drawn problem, searched and enumerated."""

    problem: Problem
    """The problem."""
    plans: int
    """Number of all plans, with those that do not fit."""
    searched_s: float
    """Seconds of a step of the plan that the search found; infinite for none."""
    best_s: float
    """Seconds of a step of the best of all plans; infinite for none."""
    search_s: float
    """Seconds that the search took."""
    every_s: float
    """Seconds that the enumeration took."""

    @property
    def ratio(self) -> float:
        """Seconds of the step found over those of the best one; 1 if neither finds a plan that fits."""
        return 1.0 if self.searched_s == self.best_s else self.searched_s / self.best_s


def checked(count: int) -> Iterator[Checked]:
    """Yield drawn problems with few enough plans, searched and enumerated."""
    seed = 0
    while count:
        seed += 1
        problem = drawn(seed)
        costs = CostModel(problem)
        plans = [*every_plan(problem)]
        if not FEWEST <= len(plans) <= MOST:
            continue
        begun = time.process_time()
        steps = [step_s(problem, costs, plan) for plan in plans]
        middle = time.process_time()
        yield Checked(
            problem=problem,
            plans=len(plans),
            best_s=min(steps),
            searched_s=searched_s(problem),
            every_s=middle - begun,
            search_s=time.process_time() - middle,
        )
        count -= 1


def drawn(seed: int) -> Problem:
    """Return the problem of a number."""
    draw = random.Random(seed)
    shape = ModelShape(
        name="drawn",
        hidden=128 * draw.choice([16, 24, 32]),
        layers=draw.choice([6, 16, 28, 32]),
        heads=draw.choice([16, 32]),
        kv_heads=draw.choice([1, 2, 4]),
        head_dim=128,
        inner=draw.choice([5504, 11008]),
        vocabulary=32000,
    )
    limit = draw.choice([1024, 4096, 16384])
    workload = Workload(
        prompts=draw.choice([32, 128]),
        samples=draw.choice([1, 8]),
        prompt=Lengths(kind="fixed", limit=draw.choice([128, 1024])),
        response=lengths_of_mean(limit / draw.choice([2, 4, 8]), limit, draw.choice([0.3, 0.9])),
        minibatches=draw.choice([1, 4]),
    )
    per_machine = draw.choice([2, 4, 8])
    devices = max(draw.choice([4, 8, 12, 16]) // per_machine, 1) * per_machine
    machines = {
        "device": draw.choice(["A100-40", "A100-80", "H100", "H20"]),
        "devices": devices,
        "per_machine": per_machine,
        "between": draw.choice(["5 GB/s", "25 GB/s", "50 GB/s"]),
    }
    graph = graph_of(draw.choice(["grpo", "reinforce_pp", "ppo"]))
    models = [role for role in graph.roles if role not in ("controller", "reward")]
    problem = Problem(
        graph=graph,
        shapes={role: replace(shape, is_scalar=role == "critic") for role in models},
        workload=workload,
        hardware=read_hardware({"machine_type": [machines], "like": "gpu"}, "drawn"),
        recomputes=draw.random() < 0.5,
    )
    freshness = draw.choice([0, 0, 1, 2])
    return problem.apart(freshness) if freshness else problem


def every_plan(problem: Problem) -> Iterator[Plan]:
    """Yield every plan; those that need more machines or memory than there are do not fit."""
    (fleet,) = problem.hardware.fleets
    units = problem.units
    for partition in partitions([unit.name for unit in units]):
        for sizes in product(fleet.sizes, repeat=len(partition)):
            if sum(sizes) > fleet.devices or fleet.machines_needed(sizes) > fleet.machines:
                continue
            group = {units[unit].name: number for number, pool in enumerate(partition) for unit in pool}
            choices = [_choices(problem, unit, sizes[group[unit.name]]) for unit in units]
            if prod(map(len, choices)) > MOST:
                yield from [Plan(name="too many", pools=(), units={})] * (MOST + 1)
                return
            pools = tuple(fleet.pool(str(number), size) for number, size in enumerate(sizes))
            for picked in product(*choices):
                yield _plan(problem, units, group, pools, picked)


def _plan(
    problem: Problem,
    units: Sequence[Unit],
    group: Mapping[str, int],
    pools: tuple[PlannedPool, ...],
    picked: Sequence[PlannedUnit],
) -> Plan:
    placed = {
        unit.name: replace(one, pool=str(group[unit.name])) for unit, one in zip(units, picked, strict=True)
    }
    return Plan(name=problem.graph.name, pools=pools, units=placed, freshness=problem.freshness)


def _choices(problem: Problem, unit: Unit, devices: int) -> list[PlannedUnit]:
    """Return every grid of a model on these devices, with every size of a generation copy."""
    machine = min(problem.hardware.fleets[0].per_machine, devices)
    layouts, generates = problem.layouts, bool(problem.generating.intersection(unit.stages))
    if unit.name == SAMPLER:
        sizes = copy_sizes(unit.shape, devices, machine, layouts)
        return [PlannedUnit(pool="", grid=Grid(dp=devices // tp, tp=tp), generate_tp=tp) for tp in sizes]
    return [
        PlannedUnit(pool="", grid=grid, generate_tp=tp)
        for grid in grids(unit.shape, devices, machine, layouts)
        for tp in (copy_sizes_of(unit.shape, grid, machine, layouts) if generates else (0,))
    ]


def step_s(problem: Problem, costs: CostModel, plan: Plan) -> float:
    """Return the seconds of a plan's step; infinite if it does not fit."""
    try:
        return evaluate(problem, costs, plan).step_s
    except PlanError:
        return float("inf")


def searched_s(problem: Problem) -> float:
    """Return the seconds of a step of the plan that a search finds; infinite for none."""
    try:
        return (
            search(replace(problem, samples_apart=False), CostModel, freshness=(problem.freshness,))
            .best[0]
            .value
        )
    except PlanError:
        return float("inf")
