"""Evaluate: compute the cost of one plan from the cost model and the schedule, without simulation.

Plan ─ seated ─> units on pools ─┬─ seconds of stages ─┬─ schedule ─> step, latency ─┐
                                 ├─ seconds of edges ──┘                             ├─> StepEvaluation
                                 └─ memory, loads of pools ──────────────────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError, nearest
from rillflow.graph.graph import Graph, Stage
from rillflow.placement.grid import Numbers
from rillflow.placement.plan import SAMPLER, Plan, require_possible
from rillflow.runs.formatting import size
from rillflow_parts.fusion.alignment import fused_of, require_fusable
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.misfit import least_text, recomputation
from rillflow_planner.problem import Problem

BESIDE = ""
"""Pool name of formulas and functions, which use no devices and never wait for a pool."""
_SETTLED, _COUNTED = 64, 256
"""Steps before the averaged period, and steps in its average."""


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """A stage for scheduling; numbers may be arrays over many plans."""

    stage: int
    """Index of the stage in the graph."""
    name: str
    """Name of the stage in the graph."""
    pool: str
    """Pool that the stage occupies; empty for stages without devices."""
    seconds: Any
    """Seconds of the stage."""
    inputs: Mapping[int, float]
    """Transfer seconds of its inputs by producing stage; inputs of the step are already available."""


@dataclass(frozen=True, kw_only=True)
class Timing(StageTask):
    """A stage with its times, relative to the start of its step."""

    start_s: Any
    """Time when its inputs have arrived and its pool is free."""
    end_s: Any
    """Time when its result is available."""


def tasks_of(
    graph: Graph, *, seconds: Sequence[Numbers], pools: Sequence[str], transfers: Sequence[float]
) -> tuple[StageTask, ...]:
    """Return a step's stages as tasks, in program order.

    Args:
        graph: the step.
        seconds: duration of every stage, in the order of ``graph.stages``.
        pools: pool that every stage occupies; ``BESIDE`` for none.
        transfers: seconds of every edge, in the order of ``graph.edges``.
    """
    inputs: list[dict[int, float]] = [{} for _ in graph.stages]
    for edge, spent in zip(graph.edges, transfers, strict=True):
        known = inputs[edge.destination]
        known[edge.source] = max(spent, known.get(edge.source, 0.0))
    return tuple(
        StageTask(stage=stage.index, name=stage.name, pool=pool, seconds=spent, inputs=known)
        for stage, pool, spent, known in zip(graph.stages, pools, seconds, inputs, strict=True)
    )


def in_turn(
    tasks: Iterable[StageTask],
    *,
    begin_s: float = 0.0,
    free_s: dict[str, Any] | None = None,
    latest: Callable[[Any, Any], Any] = max,
) -> tuple[Timing, ...]:
    """Return the times of tasks that may all begin at the same time.

    Args:
        tasks: tasks in program order.
        begin_s: earliest start.
        free_s: time when each pool is free; updated in place.
        latest: ``np.maximum`` for arrays over many plans whose stages use the same pools.
    """
    free_s = {} if free_s is None else free_s
    ends: dict[int, Any] = {}
    found = []
    for task in tasks:
        start = latest(begin_s, free_s.get(task.pool, begin_s))
        for source, spent in task.inputs.items():
            start = latest(start, ends.get(source, begin_s) + spent)
        ends[task.stage] = start + task.seconds
        if task.pool != BESIDE:
            free_s[task.pool] = ends[task.stage]
        found.append(Timing(**vars(task), start_s=start, end_s=ends[task.stage]))
    return tuple(found)


def last_s(timings: Iterable[Timing]) -> float:
    """Return the end of the last timing."""
    return max((timing.end_s for timing in timings), default=0.0)


def period_s(loads: Iterable[float], *, latencies_s: Sequence[float], freshness: float) -> float:
    """Return the average seconds between two updates when generation runs ahead of training.

    Step b begins when step b - (k + 1) has ended, and steps end in order:

        end(b) = max(end(b - 1) + busiest pool, end(b - k - 1) + latency(b))

    With one latency, the result is ``max(loads, latency / (k + 1))``. With several latencies it is larger: a
    slow step delays the next ones, which then begin together.

    Args:
        loads: seconds of a step in which each pool computes.
        latencies_s: equally likely seconds from a step's first generation to the publish of its weights.
        freshness: k, the largest age of a trained token in policy versions.
    """
    load, ahead = max(loads, default=0.0), int(freshness) + 1
    if max(latencies_s) <= ahead * load:
        return load
    generator = np.random.Generator(np.random.Philox(key=np.array([0, 0], dtype=np.uint64)))
    settled, counted = -(-_SETTLED // ahead) * ahead, -(-_COUNTED // ahead) * ahead
    order = generator.permutation(np.resize(np.asarray(latencies_s), settled + counted))
    ends = [0.0] * ahead
    for latency in order.tolist():
        ends.append(max(ends[-1] + load, ends[-ahead] + latency))
    return (ends[-1] - ends[-1 - counted]) / counted


def counted_s(ends_s: NDArray[np.float64], *, made_s: float = 0.0, busy_s: float, freshness: float) -> float:
    """Return the seconds of a step when admission counts rows, as in verl and AReaL.

    A row begins when weights arrive. The next batch is formed w seconds later, of the rows that end first,
    and new weights arrive after ``busy_s``, so a step takes T = w + busy. A row of d seconds is passed over
    by ``ceil((d - w) / T)`` batches. w is the smallest wait with which that mean is at most k:
    then k steps' rows are left when a batch is formed. With k = 0 a batch waits for the longest row. Below
    k = 1, 1 - k of a step's rows begin after its weights have arrived: w is at least the time to make them.

    Args:
        ends_s: equally likely seconds from the start of a row to its end.
        made_s: seconds to make a step's rows if replicas never run out of rows.
        busy_s: seconds from the last batch of a step until its weights have arrived.
        freshness: k, the steps' rows that may have begun in advance; may be a fraction.
    """
    low = max(1.0 - freshness, 0.0) * made_s
    high = max(low, float(ends_s.max()))
    for _ in range(40):
        wait = (low + high) / 2
        passed = float(np.mean(np.ceil((ends_s - wait).clip(0.0) / max(wait + busy_s, 1e-9))))
        low, high = (wait, high) if passed > freshness else (low, wait)
    return high + busy_s


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
    require_fusable(plan)
    for what, why in _unfit(problem, plan):
        raise PlanError(what, why=why)
    found, fused = {}, fused_of(plan)
    for pool in plan.pools:
        units = [unit for unit in problem.units if plan.units[unit.name].pool == pool.name]
        options = {}
        for unit in units:
            grid, generate_tp = plan.units[unit.name].grid, plan.units[unit.name].generate_tp
            options[unit.name] = costs.option(unit, pool.machine_type, pool.devices, grid, generate_tp)
        if fused and plan.units[fused[0]].pool == pool.name:
            pair = [unit for name in fused for unit in units if unit.name == name]
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
        why = "the age of a row is bounded in whole versions, unless the engine counts rows (its key counts)"
        yield f"the plan's freshness is {plan.freshness:g}", why
    if plan.freshness != problem.freshness:
        why = f"the problem's is {problem.freshness}; problem.of_plan(plan) returns the matching problem"
        yield f"the plan's freshness is {plan.freshness}", why
    fused = fused_of(plan)
    if fused and not any({*fused} == {one.name, two.name} for one, two in problem.fusable):
        pairs = " or ".join(f"{one.name} and {two.name}" for one, two in problem.fusable)
        why = "both must update once, and neither update may need the other's result"
        yield f"fused is {list(fused)}", f"{why}; {problem.graph.name} can fuse {pairs or 'nothing'}"
    fleets = {fleet.name: fleet for fleet in problem.hardware.fleets}
    for name in dict.fromkeys(pool.machine_type for pool in plan.pools):
        if name not in fleets:
            yield f"a pool is on machine type {name!r}", f"there is no such type; {nearest(name, fleets)}"
        sizes = [pool.devices for pool in plan.pools if pool.machine_type == name]
        if fleets[name].machines_needed(sizes) > fleets[name].machines:
            what = f"device groups of {', '.join(map(str, sizes))} devices on machine type {name}"
            yield what, f"it has only {fleets[name].machines} machines of {fleets[name].per_machine} devices"
