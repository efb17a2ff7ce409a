"""Fakes for planning: a toy step on toy devices whose seconds are given, not computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.placement.grid import Grid
from rillflow.placement.plan import SAMPLER, Plan, PlannedPool, PlannedUnit
from rillflow_planner.cost_model.options import Option
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.hardware import Device, EngineFactors, Factors, Fleet, Hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.workload import Lengths, Workload

DEVICE = Device(
    name="toy",
    memory_bytes=100.0,
    flops={"bfloat16": 1.0, "float32": 1.0},
    memory_bandwidth=1.0,
    inside_bandwidth=1.0,
    host_bandwidth=1.0,
)
SHAPE = ModelShape(name="toy", hidden=8, layers=2, heads=2, kv_heads=2, head_dim=4, inner=16, vocabulary=32)


@dataclass(frozen=True, kw_only=True)
class FakeDecoder:
    """A decoder whose token takes ``token_s`` and a share for every row and every token in the cache."""

    replicas: int = 2
    capacity_tokens: int = 1_000_000
    most_rows: int = 8
    token_s: float = 0.01
    row_s: float = 0.0005
    context_s: float = 0.0
    prompt_s: float = 0.0001
    row_begin_s: float = 0.0
    begin_s: float = 0.0

    def advance_s(self, rows: int, context_tokens: float, tokens: float) -> float:
        context = context_tokens + rows * tokens / 2
        return tokens * (self.token_s + self.row_s * rows + self.context_s * context)

    def prefill_s(self, tokens: float) -> float:
        return self.prompt_s * tokens


@dataclass(frozen=True, kw_only=True)
class FakeCosts:
    """A cost model of seconds as they are given; every unit fits everywhere."""

    workload: Workload
    stage_s: Mapping[str, float] = field(default_factory=dict)
    replica: FakeDecoder = FakeDecoder()
    link_s: float = 0.0
    weights_s: float = 0.0

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        return Option(
            grid=grid,
            generate_tp=generate_tp,
            seconds=_Seconds(self.stage_s, unit),
            resident_bytes=20.0,
            working_bytes=10.0,
            sampling_bytes=5.0,
        )

    def options(self, unit: Unit, fleet: str, devices: int) -> tuple[Option, ...]:
        return (self.option(unit, fleet, devices, Grid(dp=devices), 1),)

    def shortfall_bytes(self, unit: Unit, fleet: str, devices: int) -> float:
        return 0.0

    def room_bytes(self, fleet: str, options: Mapping[str, Option]) -> float:
        return 90.0 - sum(option.resident_bytes for option in options.values())

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> FakeDecoder | None:
        return self.replica

    def generate_s(self, stage: Stage, decoder: FakeDecoder) -> float:
        """Of rows of one length and alone with their prompt: wave after wave."""
        length, prompt = self.workload.response.limit, self.workload.prompt.limit
        left = math.ceil(self._rows(stage) / decoder.replicas)
        seconds = 0.0
        while left > 0:
            wave = min(left, decoder.most_rows)
            seconds += decoder.prefill_s(wave * prompt) + decoder.advance_s(wave, wave * prompt, length)
            left -= wave
        return seconds

    def worked_s(self, stage: Stage, decoder: FakeDecoder) -> float:
        return self.generate_s(stage, decoder)

    def steady_s(self, stage: Stage, decoder: FakeDecoder) -> float:
        """Of replicas that are always full."""
        length, prompt, full = self.workload.response.limit, self.workload.prompt.limit, decoder.most_rows
        wave = decoder.prefill_s(full * prompt) + decoder.advance_s(full, full * prompt, length)
        return wave * self._rows(stage) / (decoder.replicas * full)

    def longest_s(self, stage: Stage, decoder: FakeDecoder) -> NDArray[np.float64]:
        return np.array([self.generate_s(stage, decoder)])

    def function_s(self, stage: Stage, devices: int) -> float:
        return self.stage_s.get(stage.name, 0.0)

    def transfer_s(self, edge: Edge, source: Seat, destination: Seat) -> float:
        return self.link_s

    def crossing_s(self, source: Seat, sampler: Seat) -> float:
        return self.weights_s

    def _rows(self, stage: Stage) -> int:
        return self.workload.prompts if stage.endpoint == "greedy" else self.workload.rows


class _Seconds(dict[int, float]):
    """A unit's stages by index; the fake is told seconds by the stage's name."""

    def __init__(self, stage_s: Mapping[str, float], unit: Unit) -> None:
        names = {stage.index: stage.name for stage in GRAPH.stages if stage.index in unit.stages}
        super().__init__({index: stage_s.get(name, 0.0) for index, name in names.items()})


def _stage(index: int, name: str, writes: tuple[str, ...] = ()) -> Stage:
    role, endpoint = name.split(".")
    return Stage(index=index, role=role, endpoint=endpoint, reads=(), writes=writes)


GRAPH = Graph(
    name="toy",
    stages=(
        _stage(0, "policy.generate", ("tokens",)),
        _stage(1, "reward.score", ("rewards",)),
        _stage(2, "reference.logprobs", ("reference_logprobs",)),
        _stage(3, "critic.values", ("values",)),
        _stage(4, "controller.advantages", ("advantages",)),
        _stage(5, "critic.update"),
        _stage(6, "policy.update"),
        _stage(7, "policy.publish"),
    ),
    edges=tuple(
        Edge(source=source, destination=destination, fields=("tokens",))
        for source, destination in (
            (-1, 0),
            (0, 1),
            (0, 2),
            (0, 3),
            (1, 4),
            (2, 4),
            (3, 4),
            (0, 5),
            (4, 5),
            (0, 6),
            (4, 6),
        )
    ),
)
"""A step with a critic and a reference; the reward is a function."""

STAGE_S = {
    "reward.score": 0.3,
    "reference.logprobs": 0.5,
    "critic.values": 0.4,
    "critic.update": 1.0,
    "policy.update": 1.5,
    "policy.publish": 0.2,
}


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A problem, its costs and a plan."""

    problem: Problem
    costs: FakeCosts
    plan: Plan


def fixed(tokens: int) -> Lengths:
    """Rows of one length."""
    return Lengths(kind="fixed", limit=tokens)


def toy(
    pools: Mapping[str, str],
    *,
    prompts: int = 4,
    samples: int = 4,
    prompt: Lengths | None = None,
    response: Lengths | None = None,
    stage_s: Mapping[str, float] = STAGE_S,
    replica: FakeDecoder | None = None,
    link_s: float = 0.0,
    weights_s: float = 0.0,
    step_s: float = 0.0,
    freshness: int = 0,
    interrupts: bool = True,
    counts: bool = False,
    **planned: float | str,
) -> Toy:
    """The toy step, each unit on the pool it is given: ``policy``, ``critic``, ``reference``, ``sampler``."""
    names = tuple(dict.fromkeys(pools.values()))
    fleet = Fleet(name="toy", device=DEVICE, devices=4 * len(names), per_machine=4, between_bandwidth=1.0)
    workload = Workload(
        prompts=prompts,
        samples=samples,
        prompt=prompt or fixed(8),
        response=response or fixed(32),
        shares_prompts=False,
    )
    problem = Problem(
        graph=GRAPH,
        shapes=dict.fromkeys(("policy", "critic", "reference"), SHAPE),
        workload=workload,
        hardware=Hardware(
            name="toys",
            fleets=(fleet,),
            factors=replace(Factors(), step_s=step_s),
            engine=EngineFactors(interrupts=interrupts, counts=counts),
        ),
    )
    if SAMPLER in pools:
        problem = problem.apart(freshness)
    generates = SAMPLER if SAMPLER in pools else "policy"
    plan = Plan(
        name="toy",
        pools=tuple(PlannedPool(name=name, machine_type="toy", devices=4) for name in names),
        units={
            unit: PlannedUnit(pool=pool, grid=Grid(dp=4), generate_tp=int(unit == generates))
            for unit, pool in pools.items()
        },
        freshness=freshness,
        **planned,
    )
    costs = FakeCosts(
        workload=workload,
        stage_s=stage_s,
        replica=replica or FakeDecoder(),
        link_s=link_s,
        weights_s=weights_s,
    )
    return Toy(problem=problem, costs=costs, plan=plan)


TOGETHER = dict.fromkeys(("policy", "critic", "reference"), "main")
SPLIT = {"policy": "left", "reference": "left", "critic": "right"}
APART = {"policy": "train", "critic": "train", "reference": "score", SAMPLER: "sample"}
STREAMED = {"policy": "train", "critic": "train", "reference": "train", SAMPLER: "sample"}
