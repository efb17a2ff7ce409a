"""Evaluate: compute the cost of one plan from the cost model and the schedule, without simulation.

Plan ─ seated ─> units on pools ─┬─ seconds of stages ─┬─ schedule ─> step, latency ─┐
                                 ├─ seconds of edges ──┘                             ├─> StepEvaluation
                                 └─ memory, loads of pools ──────────────────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rillflow.errors import PlanError, nearest
from rillflow.graph.graph import Stage
from rillflow.placement.plan import SAMPLER, Plan, require_possible
from rillflow.runs.formatting import size
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.misfit import least_text, recomputation
from rillflow_planner.problem import Problem
from rillflow_planner.schedule import BESIDE, Timing, counted_s, in_turn, last_s, period_s, tasks_of


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """Time and memory of a pool; bytes are those of its fullest device."""

    name: str
    """Name of the pool."""
    busy_s: float
    """Seconds of a step in which the pool computes: mean over its replicas, without idle gaps if they stream.
    """
    idle_share: float
    """Share of a step in which the pool does not compute."""
    resident_bytes: float
    """Bytes that all its units together keep from step to step."""
    working_bytes: float
    """Largest additional bytes of a stage of one of its units."""
    room_bytes: float
    """Bytes left for a KV cache."""


@dataclass(frozen=True, kw_only=True)
class StepEvaluation:
    """Cost of a plan in seconds and bytes."""

    step_s: float
    """Seconds of a step; with freshness above 0, seconds from update to update."""
    seconds: Mapping[int, float]
    """Seconds by stage; for generation, until the last row has ended."""
    transfers_s: tuple[float, ...]
    """Seconds of every edge, in the graph's order."""
    timings: tuple[Timing, ...]
    """Timing of one isolated step by stage, in program order."""
    pools: tuple[PoolUse, ...]
    """Use of the pools, in the plan's order."""
    units: Mapping[str, Seat]
    """Placement of each unit, with a replica for units that generate."""
    devices: int
    """Number of devices of all pools."""
    crossing_s: float
    """Seconds of the step that transfer weights to a separate sampler."""

    @property
    def idle_share(self) -> float:
        """Share of device-seconds without computation."""
        sizes = {seat.pool.name: seat.pool.devices for seat in self.units.values()}
        return sum(sizes[pool.name] * pool.idle_share for pool in self.pools) / self.devices


def evaluate(problem: Problem, costs: CostModel, plan: Plan) -> StepEvaluation:
    """Return the cost of a plan.

    Formulas and functions use no devices. Transfers within a pool and from or to the controller take no time.
    With freshness k > 0, generation adds ``steady_s`` to its pool's load, and weights make a sampler pause.

    Raises:
        PlanError: the plan places other units than the problem has, or needs more devices or memory than
            there are.
    """
    units, devices = seated(problem, costs, plan), sum(pool.devices for pool in plan.pools)
    owners = {index: seat for seat in units.values() for index in seat.unit.stages}
    stages, sampler = problem.graph.stages, units.get(SAMPLER)

    def stage_s(stage: Stage) -> float:
        seat = owners.get(stage.index)
        if seat is None:
            return costs.function_s(stage, devices)
        if seat.decoder is not None and stage.index in problem.generating:
            return costs.generate_s(stage, seat.decoder)
        if sampler is not None and stage.index in problem.publishing:
            return costs.crossing_s(seat, sampler)
        return seat.option.seconds[stage.index]

    seconds = {stage.index: stage_s(stage) for stage in stages}
    transfers = []
    for edge in problem.graph.edges:
        source, destination = owners.get(edge.source), owners.get(edge.destination)
        if source is None or destination is None or source.pool is destination.pool:
            transfers.append(0.0)
        else:
            transfers.append(costs.transfer_s(edge, source, destination))
    homes = [owners[stage.index].pool.name if stage.index in owners else BESIDE for stage in stages]
    tasks = tasks_of(problem.graph, seconds=list(seconds.values()), pools=homes, transfers=transfers)
    timings = in_turn(tasks)
    step, crossing = last_s(timings), sum(seconds[index] for index in sorted(problem.publishing))
    on = {pool.name: [seat for seat in units.values() if seat.pool is pool] for pool in plan.pools}
    loads = [_load_s(problem, costs, seats, seconds, crossing) for seats in on.values()]
    latency = max((timings[index].end_s for index in problem.publishing), default=step)
    counts = problem.hardware.engine.counts
    if sampler is not None and sampler.decoder is not None and (plan.freshness or (counts and plan.streams)):
        ends = np.add.reduce([costs.longest_s(stages[one], sampler.decoder) for one in sampler.unit.stages])
        rest = latency - sum(seconds[index] for index in sampler.unit.stages)
        if counts:
            busy = crossing + (rest - crossing) * (plan.streams / problem.workload.minibatches or 1.0)
            made = sum(costs.steady_s(stages[one], sampler.decoder) for one in sampler.unit.stages)
            step = max(*loads, counted_s(ends, made_s=made, busy_s=busy, freshness=plan.freshness))
        else:
            step = period_s(loads, latencies_s=(rest + ends).tolist(), freshness=plan.freshness)
    step += problem.overhead_s
    return StepEvaluation(
        step_s=step,
        seconds=seconds,
        transfers_s=tuple(transfers),
        timings=timings,
        pools=tuple(_use(costs, seats, load, step) for seats, load in zip(on.values(), loads, strict=True)),
        units=units,
        devices=devices,
        crossing_s=crossing if sampler is not None else 0.0,
    )


def predicted(problem: Problem, costs: CostModel, plan: Plan) -> tuple[Plan, StepEvaluation]:
    """Return the plan with its predicted seconds, and its complete cost."""
    found = evaluate(problem, costs, plan)
    stages_s = stages_by_name(problem, found)
    return replace(plan, predicted_step_s=found.step_s, predicted_stages_s=stages_s), found


def stages_by_name(problem: Problem, evaluation: StepEvaluation) -> Mapping[str, float]:
    """Return predicted seconds of a step's stages, summed by name like a run's spans."""
    found: dict[str, float] = defaultdict(float)
    for stage in problem.graph.stages:
        found[stage.name] += evaluation.seconds[stage.index]
    return dict(found)


def _load_s(
    problem: Problem,
    costs: CostModel,
    seats: Sequence[Seat],
    seconds: Mapping[int, float],
    crossing_s: float,
) -> float:
    """Return the seconds of a step in which a pool computes."""
    total = 0.0
    for seat in seats:
        for index in seat.unit.stages:
            if seat.decoder is None or index not in problem.generating:
                total += seconds[index]
            else:
                worked_s = costs.steady_s if problem.freshness else costs.worked_s
                total += worked_s(problem.graph.stages[index], seat.decoder)
        total += crossing_s if problem.freshness and seat.unit.name == SAMPLER else 0.0
    return total


def _use(costs: CostModel, seats: Sequence[Seat], load: float, step: float) -> PoolUse:
    pool = seats[0].pool
    return PoolUse(
        name=pool.name,
        busy_s=load,
        idle_share=max(0.0, 1 - load / step) if step else 0.0,
        resident_bytes=sum(seat.option.resident_bytes for seat in seats),
        working_bytes=max(seat.option.working_bytes for seat in seats),
        room_bytes=costs.room_bytes(pool.machine_type, {seat.unit.name: seat.option for seat in seats}),
    )


def seated(problem: Problem, costs: CostModel, plan: Plan) -> Mapping[str, Seat]:
    """Return the placed units of a plan by name, in the problem's order.

    Raises:
        PlanError: the plan places other units than the problem has, or needs more devices or memory than
            there are.
    """
    require_possible(plan)
    for what, why in _unfit(problem, plan):
        raise PlanError(what, why=why)
    found = {}
    for pool in plan.pools:
        units = [unit for unit in problem.units if plan.units[unit.name].pool == pool.name]
        options = {}
        for unit in units:
            grid, generate_tp = plan.units[unit.name].grid, plan.units[unit.name].generate_tp
            options[unit.name] = costs.option(unit, pool.machine_type, pool.devices, grid, generate_tp)
        if plan.fused and plan.units[plan.fused[0]].pool == pool.name:
            pair = [unit for name in plan.fused for unit in units if unit.name == name]
            options = dict(costs.fused(pool.machine_type, options, pair))
        room = costs.room_bytes(pool.machine_type, options)
        if room < 0:
            fleet = problem.hardware.fleet(pool.machine_type)
            largest = max(options, key=lambda name: options[name].bytes)
            raise PlanError(
                f"{' + '.join(options)} on {pool.devices} {fleet.device.name} of {fleet.name} need "
                f"{size(-room)} more memory on every device",
                why=f"a device has {size(fleet.device.memory_bytes)}, and {largest} needs the largest part",
                fix="; or ".join([*recomputation(problem), least_text(costs, units, fleet)]),
            )
        for unit in units:
            option, decoder = options[unit.name], None
            if problem.generating.intersection(unit.stages):
                decoder = costs.decoder(unit, option, pool.machine_type, pool.devices, room)
                if decoder is None:
                    raise PlanError(
                        f"{unit.name} on device group {pool.name} has no memory to generate a single row",
                        why=f"{', '.join(options)} leave {size(room)} per device for the KV cache",
                        fix="give it more devices, move a model to another group, or raise generate_tp",
                    )
            found[unit.name] = Seat(unit=unit, pool=pool, option=option, decoder=decoder)
    return {unit.name: found[unit.name] for unit in problem.units}


def _unfit(problem: Problem, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield how a plan contradicts the problem (other units or missing machines), and why."""
    names = {unit.name for unit in problem.units}
    for name in sorted(names ^ set(plan.units)):
        does = "does not place" if name in names else "places"
        yield f"the plan {does} {name!r}", f"the units of {problem.graph.name} are {', '.join(sorted(names))}"
    if plan.freshness % 1 and not problem.hardware.engine.counts:
        why = "the age of a row is bounded in whole versions, unless admission counts rows ([engine] counts)"
        yield f"the plan's freshness is {plan.freshness:g}", why
    if plan.freshness != problem.freshness:
        why = f"the problem's is {problem.freshness}; problem.of_plan(plan) returns the matching problem"
        yield f"the plan's freshness is {plan.freshness}", why
    if plan.fused and not any({*plan.fused} == {one.name, two.name} for one, two in problem.fusable):
        pairs = " or ".join(f"{one.name} and {two.name}" for one, two in problem.fusable)
        why = "both must update once, and neither update may need the other's result"
        yield f"fused is {list(plan.fused)}", f"{why}; {problem.graph.name} can fuse {pairs or 'nothing'}"
    fleets = {fleet.name: fleet for fleet in problem.hardware.fleets}
    for name in dict.fromkeys(pool.machine_type for pool in plan.pools):
        if name not in fleets:
            yield f"a pool is on machine type {name!r}", f"there is no such type; {nearest(name, fleets)}"
        sizes = [pool.devices for pool in plan.pools if pool.machine_type == name]
        if fleets[name].machines_needed(sizes) > fleets[name].machines:
            what = f"device groups of {', '.join(map(str, sizes))} devices on machine type {name}"
            yield what, f"it has only {fleets[name].machines} machines of {fleets[name].per_machine} devices"
