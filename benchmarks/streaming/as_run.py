"""A run's steps, simulated with known seconds of its stages, for studies that hold the simulator to runs.

recipe ─> graph, placement, bound, parts ──┬─ simulate_as_run ─> Simulation
seconds by stage name ─ GivenCosts ────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from rillflow.app.phases import PhasePlan
from rillflow.app.resolved import Resolved
from rillflow.graph.graph import Edge, Stage
from rillflow.placement.grid import Grid
from rillflow.runs.reader import SpanRecord
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.cost_model.generation import Decoder
from rillflow_planner.cost_model.options import Option
from rillflow_planner.cost_model.transfers import Seat
from rillflow_planner.hardware import Device, Factors, Fleet, Hardware
from rillflow_planner.problem import Problem, Unit
from rillflow_planner.recipe_problem import plan_of
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import simulate

PUBLISH, SENT, RECEIVED = "policy.publish", "policy.send", ("sampler.receive", "sampler.serve")
"""Stages that deliver a version: the step's own, and further spans of ranks that train and that sample."""
_ENDLESS = 1e18
"""Bytes, bytes per second and FLOP/s of a device without limits."""


class GivenCosts(CostModel):
    """Given seconds, and formulas for everything else.

    Args:
        problem: the step.
        stages_s: seconds of a step's stages by name, summed over equal names. Transfers take no time.
    """

    def __init__(self, problem: Problem, stages_s: Mapping[str, float]) -> None:
        super().__init__(problem)
        names = [stage.name for stage in problem.graph.stages]
        shares = {name: spent / max(names.count(name), 1) for name, spent in stages_s.items()}
        self._given = {index: shares[name] for index, name in enumerate(names) if name in shares}

    def option(self, unit: Unit, fleet: str, devices: int, grid: Grid, generate_tp: int) -> Option:
        """Return the unit on this grid, with the given seconds of its stages."""
        found = super().option(unit, fleet, devices, grid, generate_tp)
        seconds = {index: self._given.get(index, spent) for index, spent in found.seconds.items()}
        return replace(found, seconds=seconds)

    def fused(self, fleet: str, options: Mapping[str, Option], pair: Sequence[Unit]) -> Mapping[str, Option]:
        """Return the options with their given seconds; without those, of the fused stage."""
        updates = {index for unit in pair for index in self._problem.training.intersection(unit.stages)}
        return options if updates <= set(self._given) else super().fused(fleet, options, pair)

    def decoder(
        self, unit: Unit, option: Option, fleet: str, devices: int, room_bytes: float
    ) -> Decoder | None:
        """Return a replica whose pace gives the unit's stages their given seconds."""
        found = super().decoder(unit, option, fleet, devices, room_bytes)
        stages = [self._problem.graph.stages[index] for index in unit.stages if index in self._given]
        stages = [stage for stage in stages if stage.index in self._problem.generating]
        if found is None or not stages:
            return found
        found = replace(found, row_begin_s=0.0, begin_s=0.0)
        given = sum(self._given[stage.index] for stage in stages)
        pace = given / sum(self.generate_s(stage, found) for stage in stages)
        seconds = [field.name for field in fields(Decoder) if field.name.endswith("_s")]
        return replace(found, **{name: pace * vars(found)[name] for name in seconds})

    def function_s(self, stage: Stage, devices: int) -> float:
        """Return the given seconds of a function or formula."""
        return self._given.get(stage.index, super().function_s(stage, devices))

    def transfer_s(self, edge: Edge, source: Seat, destination: Seat) -> float:  # noqa: ARG002
        """Return 0: the given seconds of a stage include the transfer of its inputs."""
        return 0.0

    def crossing_s(self, source: Seat, sampler: Seat) -> float:
        """Return the seconds to send the weights to a separate sampler: those given for publishing, if
        any.
        """
        given = [self._given[index] for index in sorted(self._problem.publishing) if index in self._given]
        return sum(given) if given else super().crossing_s(source, sampler)


def simulate_as_run(
    loaded: Resolved, phase: PhasePlan, problem: Problem, stages_s: Mapping[str, float], *, steps: int
) -> Simulation:
    """Simulate steps of a phase as a run makes them: freshness + 1 in flight, rows in order or ready first.

    Args:
        loaded: the recipe; gives the placement of roles, and the parts that rows are passed on in.
        phase: one of its phases.
        problem: the planning problem of its step.
        stages_s: seconds of its stages by name; the others are computed.
        steps: number of steps, from the first one on.
    """
    parts, placement, config = phase.schedule.chunks, loaded.recipe.placement, phase.config
    is_in_order = not phase.schedule.is_by_group
    plan = replace(
        plan_of(loaded, problem.graph, problem.hardware.fleets[0]),
        settings={},  # fuses nothing: the seconds of their stages are known
        freshness=phase.schedule.lag,
        streams=int(is_in_order and placement.samples_apart and parts > 1 and config.goes_by(parts)),
    )
    planned = problem.of_plan(plan)
    functions = {role: placement.pool_of(role) for role in problem.graph.roles if role not in problem.shapes}
    how = {"parts": parts if is_in_order else 0, "functions": functions}
    return simulate(planned, GivenCosts(planned, stages_s), plan, steps=steps, **how)


def worked_s(spans: Sequence[SpanRecord], steps: int) -> dict[str, float]:
    """Return the mean seconds per step that the busiest rank of each stage worked, over all parts.

    Publishing counts everything that delivers a version. If the sampler serves a version later, the two sides
    overlap, and only the side that is busy longer counts.
    """
    worked: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        for each in span.ranks:
            worked[span.step, span.stage][each.rank] += each.duration_s
        if not span.ranks:
            worked[span.step, span.stage][0] += span.duration_s
    found: dict[str, float] = defaultdict(float)
    for (_, stage), ranks in worked.items():
        found[stage] += max(ranks.values()) / steps
    sides = [sum(found[name] for name in names) for names in ((PUBLISH, SENT), RECEIVED)]
    found[PUBLISH] = max(sides) if found[RECEIVED[-1]] else sum(sides) + found["policy.digest"]
    return dict(found)


def endless(devices: int, **factors: float) -> Hardware:
    """Return a machine without limits, for steps whose stages' seconds are known, with these factors."""
    device = Device(
        name="endless",
        memory_bytes=_ENDLESS,
        flops=dict.fromkeys(("float8", "bfloat16", "float32"), _ENDLESS),
        memory_bandwidth=_ENDLESS,
        inside_bandwidth=_ENDLESS,
        host_bandwidth=_ENDLESS,
    )
    fleet = Fleet(
        name="here", device=device, devices=devices, per_machine=devices, between_bandwidth=_ENDLESS
    )
    return Hardware(name="here", fleets=(fleet,), factors=Factors(**factors))
