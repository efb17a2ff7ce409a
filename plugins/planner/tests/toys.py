"""Toys: small steps and costs drawn at random, and the search as written without a thought for time.

A number of a toy depends on its seed and on what it is asked of, so it is the same whenever it is asked.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError
from rillflow.graph.graph import CONTROLLER, Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.options import Option
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.evaluate import evaluate
from rillflow_planner.hardware import Device, Factors, Fleet, Hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.planning import stated
from rillflow_planner.plugin import plan_arguments
from rillflow_planner.problem import Problem, Statement, Unit
from rillflow_planner.ranking import SearchObjective
from rillflow_planner.workload import Lengths, Workload

SHAPE = ModelShape(name="toy", hidden=8, layers=2, heads=2, kv_heads=2, head_dim=4, inner=16, vocabulary=32)
DEVICE = Device(
    name="toy",
    memory_bytes=100.0,
    flops={"bfloat16": 1.0, "float32": 1.0},
    memory_bandwidth=1.0,
    inside_bandwidth=1.0,
    host_bandwidth=1.0,
)
LENGTHS = Lengths(kind="fixed", limit=8)
WORKLOAD = Workload(prompts=4, samples=2, prompt=LENGTHS, response=LENGTHS)


@dataclass(frozen=True)
class ToyDecoder:
    """A decoder that generates in the seconds it was made with."""

    seconds: float
    replicas: int = 1
    capacity_tokens: int = 100
    most_rows: int = 8
    row_begin_s: float = 0.0
    begin_s: float = 0.0

    def advance_s(self, rows: int, context_tokens: float, tokens: float) -> float:
        return self.seconds * tokens

    def prefill_s(self, tokens: float) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class ToyCosts:
    """A cost model with random options of every unit at every place; what the search relies on holds."""

    problem: Problem
    seed: int
    options_each: int = 2
    memory: float = 100.0
    speed: float = 1.0
    link: float = 1.0
    aliases: tuple[tuple[str, str], ...] = ()
    known: dict[object, tuple[Option, ...]] = field(default_factory=dict)

    def options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        key = (unit.name, fleet, devices)
        if key not in self.known:
            self.known[key] = self._options(unit, fleet, devices)
        return self.known[key]

    def _options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        draw = self._draw("count", unit.name, fleet, devices)
        count = draw.randint(0 if draw.random() < 0.1 else 1, self.options_each)
        found = [self._option(unit, fleet, devices, number) for number in range(count)]
        return tuple(one for one in found if self.room_bytes(fleet, {unit.name: one}) >= 0)

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        for one in self.options(unit, fleet, devices):
            if (one.grid, one.generate_tp) == (grid, generate_tp):
                return one
        raise PlanError(f"{unit.name} has no grid {grid}")

    def shortfall_bytes(self, unit: Unit, fleet: str, devices: int) -> float:
        return 0.0 if self.options(unit, fleet, devices) else 7.0

    def room_bytes(self, fleet: str, options: Mapping[str, Option]) -> float:
        free = self.memory - sum(one.resident_bytes for one in options.values())
        working = max(one.working_bytes for one in options.values())
        if free < working or not any(one.generate_tp for one in options.values()):
            return free - working
        return free - sum(one.sampling_bytes for one in options.values())

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> ToyDecoder | None:
        draw = self._draw("decoder", unit.name, fleet, devices, option.generate_tp, option.grid.ep)
        seconds, needed = draw.uniform(1, 20), draw.choice((0, 10, 30))
        if room_bytes < needed:
            return None
        crowded = 1 + (room_bytes < 2 * needed) * draw.random() + (room_bytes < 50) * draw.random()
        return ToyDecoder(seconds * crowded * self.speed)

    def generate_s(self, stage: Stage, decoder: ToyDecoder) -> float:
        return decoder.advance_s(1, 0.0, 1.0 + stage.index / 10)

    def worked_s(self, stage: Stage, decoder: ToyDecoder) -> float:
        return self.generate_s(stage, decoder)

    def steady_s(self, stage: Stage, decoder: ToyDecoder) -> float:
        return 0.6 * self.generate_s(stage, decoder)

    def longest_s(self, stage: Stage, decoder: ToyDecoder) -> NDArray[np.float64]:
        return np.array([self.generate_s(stage, decoder)])

    def function_s(self, stage: Stage, devices: int) -> float:
        return self._draw("function", stage.index).choice((0.0, 0.1, 4.0 / devices)) * self.speed

    def transfer_s(self, edge: Edge, source: Seat, destination: Seat) -> float:
        ends = (
            source.pool.machine_type,
            source.pool.devices,
            destination.pool.machine_type,
            destination.pool.devices,
        )
        draw = self._draw("edge", edge.source, edge.destination, *ends)
        grids = (str(source.option.grid), str(destination.option.grid))
        by_grid = self._draw("grids", edge.source, edge.destination, *grids)
        return (draw.choice((0.0, 0.5, 2.0)) + by_grid.choice((0.0, 0.0, 1.0))) * self.link

    def crossing_s(self, source: Seat, sampler: Seat) -> float:
        sizes = (source.pool.devices, sampler.pool.devices, sampler.option.generate_tp)
        draw = self._draw("crossing", str(source.option.grid), *sizes)
        return draw.choice((0.5, 1.0, 3.0)) * self.link

    def _option(self, unit: Unit, fleet: str, devices: int, number: int) -> Option:
        draw = self._draw("option", unit.name, fleet, devices, number)
        generates = any(self.problem.graph.stages[index].endpoint == "generate" for index in unit.stages)
        return Option(
            grid=Grid(dp=devices, is_sharded=number > 0),
            generate_tp=math.gcd(draw.choice((1, 2)), devices) if generates else 0,
            seconds={
                index: draw.choice((1.0, 2.0, draw.uniform(0, 10))) / devices**0.5 * self.speed
                for index in unit.stages
            },
            resident_bytes=draw.choice((5.0, 20.0, 45.0)) / devices,
            working_bytes=draw.choice((1.0, 20.0)),
            sampling_bytes=draw.choice((0.0, 15.0)) if generates else 0.0,
        )

    def _draw(self, *key: object) -> random.Random:
        names = dict(self.aliases)
        text = repr((self.seed, *(names.get(str(part), part) for part in key)))
        return random.Random(zlib.crc32(text.encode()))


def toy_problem(seed: int, *, roles: int, fleets: Sequence[Fleet], functions: int = 1) -> Problem:
    """A step of some roles: generation first, then a random graph, then updates and publishing."""
    draw = random.Random(seed)
    names = ["policy", "critic", "reference", "reward"][:roles]
    calls = [("policy", "generate")]
    calls += [(draw.choice(names), "score") for _ in range(draw.randint(roles - 1, roles + 2))]
    calls += [(name, "score") for name in names[1:] if name not in {role for role, _ in calls}]
    calls += [(CONTROLLER, "formula")] * draw.randint(0, 2) + [("checker", "score")] * functions
    middle = calls[1:]
    draw.shuffle(middle)
    calls = [calls[0], *middle, *((name, "update") for name in names[:2]), ("policy", "publish")]
    stages = [
        Stage(index=index, role=role, endpoint=endpoint, reads=(), writes=("x",))
        for index, (role, endpoint) in enumerate(calls)
    ]
    edges = [Edge(source=-1, destination=0, fields=("x",))]
    for stage in stages[1:-1]:
        sources = draw.sample(range(stage.index), k=min(stage.index, draw.randint(1, 2)))
        edges += [Edge(source=source, destination=stage.index, fields=("x",)) for source in sorted(sources)]
    return Problem(
        graph=Graph(name="toy", stages=tuple(stages), edges=tuple(edges)),
        shapes=dict.fromkeys(names, SHAPE),
        workload=WORKLOAD,
        hardware=Hardware(name="toys", fleets=tuple(fleets), factors=Factors(step_s=0.25)),
    )


def toy_fleet(name: str = "here", *, devices: int = 4, per_machine: int = 2, price: float = 1.0) -> Fleet:
    """Machines of toy devices."""
    return Fleet(
        name=name,
        device=DEVICE,
        devices=devices,
        per_machine=per_machine,
        between_bandwidth=1.0,
        price_per_hour=price,
    )


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One plan of all."""

    names: frozenset[frozenset[str]]
    freshness: int
    value: float
    devices: int
    plan: Plan


def every_plan(problem: Problem, costs: ToyCosts, objective: SearchObjective) -> Iterator[Tried]:
    """Every plan there is that fits, one by one."""
    units = [unit.name for unit in problem.units]
    prices = {fleet.name: fleet.price_per_hour for fleet in problem.hardware.fleets}
    places = [(fleet.name, size) for fleet in problem.hardware.fleets for size in fleet.sizes]
    for numbers in itertools.product(range(len(units)), repeat=len(units)):
        if any(number > max((-1, *numbers[:place])) + 1 for place, number in enumerate(numbers)):
            continue
        if SAMPLER in units and numbers.count(numbers[units.index(SAMPLER)]) > 1:
            continue
        for taken in itertools.product(places, repeat=max(numbers) + 1):
            pools = [
                PlannedPool(name=f"p{pool}", machine_type=fleet, devices=size)
                for pool, (fleet, size) in enumerate(taken)
            ]
            for plan in _plans(problem, costs, dict(zip(units, numbers, strict=True)), pools):
                try:
                    found = evaluate(problem, costs, plan)
                except PlanError:
                    continue
                price = sum(pool.devices * prices[pool.machine_type] for pool in pools)
                value = objective.values(
                    np.array([found.step_s]), np.array([found.devices]), np.array([price])
                )[0]
                groups = frozenset(
                    frozenset(unit for unit in units if plan.units[unit].pool == pool.name) for pool in pools
                )
                if value < float("inf"):
                    yield Tried(
                        names=groups,
                        freshness=plan.freshness,
                        value=float(value),
                        devices=found.devices,
                        plan=plan,
                    )


def _plans(
    problem: Problem, costs: ToyCosts, pool_of: Mapping[str, int], pools: Sequence[PlannedPool]
) -> Iterator[Plan]:
    options = [
        costs.options(unit, pools[pool_of[unit.name]].machine_type, pools[pool_of[unit.name]].devices)
        for unit in problem.units
    ]
    for chosen in itertools.product(*options):
        yield Plan(
            name="toy",
            pools=tuple(pools),
            freshness=problem.freshness,
            units={
                unit.name: PlannedUnit(
                    pool=pools[pool_of[unit.name]].name, grid=one.grid, generate_tp=one.generate_tp
                )
                for unit, one in zip(problem.units, chosen, strict=True)
            },
        )


def variants(problem: Problem, freshness: Sequence[int]) -> list[Problem]:
    """The problem in step, and apart with each bound."""
    return [problem.apart(bound) if bound else replace(problem, samples_apart=False) for bound in freshness]


def question(**options: object) -> Statement:
    """What ``rillflow plan`` is asked with these options; True and lists as on the command line."""
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return stated(parser.parse_args(words))
