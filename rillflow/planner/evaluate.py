"""Evaluate: what one plan costs, by the cost model's terms and the schedule; nothing is simulated.

Plan ─ seating ─> units on pools ─┬─ seconds of stages ─┬─ schedule ─> step, latency ─┐
                                  ├─ seconds of edges ──┘                             ├─> StepEvaluation
                                  └─ memory, loads of pools ──────────────────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rillflow.graph.graph import Edge, Stage
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.plan import SAMPLER, Plan, PlannedPool
from rillflow.planner.problem import Problem, Work
from rillflow.planner.schedule import BESIDE, Timing, in_turn, last_s, period_s, tasks_of
from rillflow.planner.seating import Seated, seated


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
class StepEvaluation:
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
    timings: tuple[Timing, ...]
    """One step by itself, by stage, in the order of the program."""
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


def evaluate(problem: Problem, costs: CostModel, plan: Plan) -> StepEvaluation:
    """What a plan costs.

    Raises:
        PlanError: it places other units than the problem has, more devices than there are, or more than fits
            into their memory.
    """
    terms = _Terms(problem, costs, plan)
    stages, edges = problem.graph.stages, problem.graph.edges
    seconds = {stage.index: terms.stage_s(stage) for stage in stages}
    transfers = tuple(terms.edge_s(edge) for edge in edges)
    homes = [terms.pool_of(stage.index) for stage in stages]
    timings = in_turn(
        tasks_of(problem.graph, seconds=list(seconds.values()), pools=homes, transfers=transfers)
    )
    step, crossing = last_s(timings), sum(seconds[stage.index] for stage in problem.published)
    loads = [terms.load_s(pool, seconds, crossing) for pool in plan.pools]
    latency = max((timings[stage.index].end_s for stage in problem.published), default=step)
    if plan.freshness:
        latencies = latency + terms.longer_s(seconds)
        latency = float(latencies.mean())
        step = period_s(loads, latencies_s=latencies.tolist(), freshness=plan.freshness)
    step += problem.overhead_s
    return StepEvaluation(
        step_s=step,
        latency_s=latency,
        seconds=seconds,
        transfers_s=transfers,
        timings=timings,
        pools=tuple(terms.use(pool, load, step) for pool, load in zip(plan.pools, loads, strict=True)),
        units=terms.units,
        devices=terms.devices,
        names={stage.index: stage.name for stage in stages},
        crossing_s=crossing if SAMPLER in terms.units else 0.0,
    )


class _Terms:
    """The seconds of a plan's stages, edges and pools."""

    def __init__(self, problem: Problem, costs: CostModel, plan: Plan) -> None:
        self.units = seated(problem, costs, plan)
        self.devices = sum(pool.devices for pool in plan.pools)
        self._problem = problem
        self._costs = costs
        self._owners = {index: unit for unit in self.units.values() for index in unit.unit.stages}

    def pool_of(self, stage: int) -> str:
        """Whose devices a stage holds."""
        return self._owners[stage].seat.pool if stage in self._owners else BESIDE

    def stage_s(self, stage: Stage) -> float:
        """Seconds of a stage: of generation until the last row has ended; of publishing apart, the crossing.

        A formula or a function runs beside all devices.
        """
        owner = self._owners.get(stage.index)
        if owner is None:
            return self._costs.function_s(stage, self.devices)
        match self._problem.work(stage):
            case Work.GENERATE if owner.decoder is not None:
                return self._costs.generate_s(stage, owner.decoder)
            case Work.PUBLISH if SAMPLER in self.units:
                sampler = self.units[SAMPLER]
                return self._costs.crossing_s(owner.seat, sampler.seat, sampler.option.generate_tp)
            case _:
                return owner.option.seconds[stage.index]

    def edge_s(self, edge: Edge) -> float:
        """Seconds of an edge between two pools; 0 within one, and for what the controller reads or writes."""
        source, destination = self._owners.get(edge.source), self._owners.get(edge.destination)
        if source is None or destination is None or source.seat.pool == destination.seat.pool:
            return 0.0
        return self._costs.transfer_s(edge, source.seat, destination.seat)

    def load_s(self, pool: PlannedPool, seconds: Mapping[int, float], crossing_s: float) -> float:
        """Seconds of a step in which a pool computes.

        With freshness k > 0, generation counts with ``steady_s``, and a sampler stands still while weights
        come.
        """
        total, ahead = 0.0, self._problem.freshness > 0
        worked_s = self._costs.steady_s if ahead else self._costs.worked_s
        for unit in self._on(pool):
            for index in unit.unit.stages:
                stage = self._problem.graph.stages[index]
                if unit.decoder is not None and self._problem.work(stage) is Work.GENERATE:
                    total += worked_s(stage, unit.decoder)
                else:
                    total += seconds[index]
            total += crossing_s if ahead and unit.unit.name == SAMPLER else 0.0
        return total

    def longer_s(self, seconds: Mapping[int, float]) -> NDArray[np.float64]:
        """By how much longer than by itself a step generates beside those on their way with it."""
        sampler = self.units[SAMPLER]
        assert sampler.decoder is not None, "a sampler is seated with a decoder"
        stages = [self._problem.graph.stages[index] for index in sampler.unit.stages]
        longer = [self._costs.longest_s(stage, sampler.decoder) - seconds[stage.index] for stage in stages]
        return np.asarray(np.sum(longer, axis=0))

    def use(self, pool: PlannedPool, load: float, step: float) -> PoolUse:
        """What a pool does with its time and memory."""
        own = self._on(pool)
        return PoolUse(
            name=pool.name,
            busy_s=load,
            idle_share=max(0.0, 1 - load / step) if step else 0.0,
            resident_bytes=sum(unit.option.resident_bytes for unit in own),
            working_bytes=max(unit.option.working_bytes for unit in own),
            room_bytes=own[0].room_bytes,
        )

    def _on(self, pool: PlannedPool) -> list[Seated]:
        return [unit for unit in self.units.values() if unit.seat.pool == pool.name]


def stages_by_name(problem: Problem, evaluation: StepEvaluation) -> Mapping[str, float]:
    """Predicted seconds of a step's stages, those of one name in sum, as a run's spans are."""
    found: dict[str, float] = defaultdict(float)
    for stage in problem.graph.stages:
        found[stage.name] += evaluation.seconds[stage.index]
    return dict(found)
