"""Evaluate: what one plan costs, by the cost model's terms and the schedule; nothing is simulated.

Plan ─ seating ─> units on pools ─┬─ seconds of stages ─┬─ schedule ─> step, latency ─┐
                                  ├─ seconds of edges ──┘                             ├─> Evaluation
                                  └─ memory, loads of pools ──────────────────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rillflow.graph.graph import Edge, Stage
from rillflow.planner.option import Costs
from rillflow.planner.plan import SAMPLER, Plan, PlannedPool
from rillflow.planner.problem import Problem
from rillflow.planner.schedule import BESIDE, Schedule, period_s, schedule
from rillflow.planner.seating import Seated, seated
from rillflow.planner.work import Work


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """What a pool does with its time and memory; bytes are those of its fullest device."""

    name: str
    """The pool."""
    busy_s: float
    """Seconds of a step in which it computes; its replicas on average, and as if they never ran dry if they
    stream."""
    idle_share: float
    """The share of a step in which it does not."""
    resident_bytes: float
    """Kept from step to step by all its units together."""
    working_bytes: float
    """The most a stage of one of its units needs beside."""
    room_bytes: float
    """What is left for a cache."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A plan in seconds and bytes."""

    step_s: float
    """Seconds of a step: of one after another, or from update to update where generation runs ahead."""
    latency_s: float
    """Seconds from the beginning of a step's generation until weights made of it are published; ahead the
    mean."""
    seconds: Mapping[int, float]
    """By stage; of generation until the last row has ended."""
    transfers_s: tuple[float, ...]
    """Of every edge, in the order of the graph's."""
    schedule: Schedule
    """One step by itself."""
    pools: tuple[PoolUse, ...]
    """In the order of the plan's."""
    units: Mapping[str, Seated]
    """Where and how each unit lies, with a replica of what generates."""
    devices: int
    """Of all pools."""
    names: Mapping[int, str]
    """Of the stages."""
    crossing_s: float
    """Of the seconds, those in which weights travel to a sampler apart."""

    @property
    def idle_share(self) -> float:
        """The share of device-seconds in which nothing is computed."""
        sizes = {unit.seat.pool: unit.seat.devices for unit in self.units.values()}
        return sum(sizes[pool.name] * pool.idle_share for pool in self.pools) / self.devices


def evaluate(problem: Problem, costs: Costs, plan: Plan) -> Evaluation:
    """What a plan costs.

    Raises:
        PlanError: it places other units than the problem has, more devices than there are, or more than fits
            into their memory.
    """
    units = seated(problem, costs, plan)
    owners = {index: units[unit.name] for unit in problem.units for index in unit.stages}
    devices = sum(pool.devices for pool in plan.pools)
    stages = problem.graph.stages
    seconds = {
        stage.index: stage_s(problem, costs, stage, owners.get(stage.index), units, devices)
        for stage in stages
    }
    transfers = tuple(
        edge_s(costs, edge, owners.get(edge.source), owners.get(edge.destination))
        for edge in problem.graph.edges
    )
    times = schedule(
        problem.graph,
        seconds=[seconds[stage.index] for stage in stages],
        pools=[owners[stage.index].seat.pool if stage.index in owners else BESIDE for stage in stages],
        transfers=transfers,
    )
    loads = [
        load_s(problem, costs, [unit for unit in units.values() if unit.seat.pool == pool.name], seconds)
        for pool in plan.pools
    ]
    latency, step = latency_s(problem, times), times.step_s
    if plan.freshness:
        latencies = latency + _longer_s(problem, costs, units[SAMPLER], seconds)
        latency, step = (
            float(latencies.mean()),
            period_s(loads, latencies_s=latencies.tolist(), freshness=plan.freshness),
        )
    step += problem.overhead_s
    return Evaluation(
        step_s=step,
        latency_s=latency,
        seconds=seconds,
        transfers_s=transfers,
        schedule=times,
        pools=tuple(_use(pool, load, step, units) for pool, load in zip(plan.pools, loads, strict=True)),
        units=units,
        devices=devices,
        names={stage.index: stage.name for stage in stages},
        crossing_s=sum(seconds[stage.index] for stage in published(problem)) if SAMPLER in units else 0.0,
    )


def stage_s(
    problem: Problem,
    costs: Costs,
    stage: Stage,
    owner: Seated | None,
    units: Mapping[str, Seated],
    devices: int,
) -> float:
    """Seconds of a stage: of generation until the last row has ended; of publishing apart, the crossing.

    Args:
        problem: the step.
        costs: its cost model.
        stage: one of its graph's.
        owner: who computes it; none of a formula or a function, which run beside ``devices``.
        units: where all units lie.
        devices: of all pools.
    """
    if owner is None:
        return costs.function_s(stage, devices)
    match problem.work(stage):
        case Work.GENERATE if owner.decoder is not None:
            return costs.generate_s(stage, owner.decoder)
        case Work.PUBLISH if SAMPLER in units:
            sampler = units[SAMPLER]
            return costs.crossing_s(owner.seat, sampler.seat, sampler.option.generate_tp)
        case _:
            return owner.option.seconds[stage.index]


def edge_s(costs: Costs, edge: Edge, source: Seated | None, destination: Seated | None) -> float:
    """Seconds of an edge between two pools; 0 within one, and for what the controller reads or writes."""
    if source is None or destination is None or source.seat.pool == destination.seat.pool:
        return 0.0
    return costs.transfer_s(edge, source.seat, destination.seat)


def load_s(problem: Problem, costs: Costs, units: Sequence[Seated], seconds: Mapping[int, float]) -> float:
    """Seconds of a step in which the pool of these units computes.

    With freshness k > 0, generation counts with ``steady_s``, and a sampler stands still while weights come.
    """
    total = 0.0
    for unit in units:
        for index in unit.unit.stages:
            stage = problem.graph.stages[index]
            if unit.decoder is not None and problem.work(stage) is Work.GENERATE:
                total += (costs.steady_s if problem.freshness else costs.worked_s)(stage, unit.decoder)
            else:
                total += seconds[index]
        if unit.unit.name == SAMPLER and problem.freshness:
            total += sum(seconds[stage.index] for stage in published(problem))
    return total


def published(problem: Problem) -> tuple[Stage, ...]:
    """The stages that bring weights to generation."""
    return tuple(stage for stage in problem.graph.stages if problem.work(stage) is Work.PUBLISH)


def latency_s(problem: Problem, times: Schedule) -> float:
    """Seconds until the weights are published; of a step without that, until it ends."""
    return max((times.timings[stage.index].end_s for stage in published(problem)), default=times.step_s)


def _longer_s(
    problem: Problem, costs: Costs, sampler: Seated, seconds: Mapping[int, float]
) -> NDArray[np.float64]:
    """By how much longer than by itself a step generates beside those that are on their way with it."""
    assert sampler.decoder is not None, "a sampler is seated with a decoder"
    found = [
        costs.longest_s(problem.graph.stages[index], sampler.decoder) - seconds[index]
        for index in sampler.unit.stages
    ]
    return np.asarray(sum(found[1:], found[0]))


def stages_by_name(problem: Problem, evaluation: Evaluation) -> Mapping[str, float]:
    """Predicted seconds of a step's stages, those of one name in sum, as a run's spans are."""
    found: dict[str, float] = defaultdict(float)
    for stage in problem.graph.stages:
        found[stage.name] += evaluation.seconds[stage.index]
    return dict(found)


def _use(pool: PlannedPool, load: float, step: float, units: Mapping[str, Seated]) -> PoolUse:
    own = [unit for unit in units.values() if unit.seat.pool == pool.name]
    return PoolUse(
        name=pool.name,
        busy_s=load,
        idle_share=max(0.0, 1 - load / step) if step else 0.0,
        resident_bytes=sum(unit.option.resident_bytes for unit in own),
        working_bytes=max(unit.option.working_bytes for unit in own),
        room_bytes=own[0].room_bytes,
    )
