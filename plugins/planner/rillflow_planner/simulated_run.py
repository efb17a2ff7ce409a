"""Simulated: simulate the steps of a run, with measured or known seconds of its stages.

run ─┬─ recipe ─> graph, placement, bound, parts ──────┐
     ├─ rollouts ─> rows of its steps, in order ───────┼─ simulate ─> steps next to the measured steps
     └─ spans ─> seconds in which ranks worked ────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import SampledConfig, is_ready_first
from rillflow.app.phases import PhasePlan, phase_plans
from rillflow.app.recipe import LoadedRecipe, Recipe
from rillflow.app.resume import recipe_of
from rillflow.errors import PlanError, RillflowError
from rillflow.runs import layout
from rillflow.runs.reader import SpanRecord, read_rollouts
from rillflow.runs.run_data import RunData
from rillflow_planner.cost_model.given import GivenCosts
from rillflow_planner.hardware import Device, Factors, Fleet, Hardware
from rillflow_planner.problem import Problem
from rillflow_planner.recipe_problem import plan_of, shapes_of
from rillflow_planner.simulated_report import MOST_STEPS, NotSimulated, SimulatedSteps
from rillflow_planner.simulator.layout import Settings
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import simulate
from rillflow_planner.workload import Lengths, Workload

PUBLISH, SENT, RECEIVED = "policy.publish", "policy.send", ("sampler.receive", "sampler.serve")
"""Stages that deliver a version: the step's own, and further spans of ranks that train and that sample."""
_ENDLESS = 1e18
"""Bytes, bytes per second and FLOP/s of a device without limits."""


def simulate_steps(
    data: RunData, first: int, last: int, *, algorithms: Sequence[Algorithm] = ()
) -> SimulatedSteps | NotSimulated:
    """Simulate the last steps of a range, or return the reason why that is impossible.

    Args:
        data: the run.
        first, last: the range of steps, which belong to one phase.
        algorithms: custom algorithms that the recipe may name.
    """
    try:
        return _simulated(recipe_of(data, algorithms), data, max(first, last - MOST_STEPS + 1), last)
    except RillflowError as error:
        return NotSimulated(reason=str(error))


def _simulated(loaded: LoadedRecipe, data: RunData, first: int, last: int) -> SimulatedSteps:
    from rillflow.app.graphs import graphs

    made = next((phase.name for phase in data.phases if phase.first <= first and last <= phase.last), "")
    phases = {
        phase.name: (phase, graph)
        for phase, graph in zip(phase_plans(loaded.recipe), graphs(loaded.recipe), strict=True)
    }
    if made not in phases:
        raise PlanError(f"steps {first} to {last} are of no one phase", why="each has steps of another kind")
    phase, graph = phases[made]
    spans = data.stages.of_steps(first, last)
    problem = Problem(
        graph=graph,
        shapes=shapes_of(loaded, graph),
        workload=_rows(loaded.recipe, phase, data, first, last),
        hardware=endless(sum(loaded.recipe.placement.pools.values())),
    )
    count = last - first + 1
    before = phase.freshness + 1 if phase.freshness else 0
    worked = worked_s(spans, count, fused=loaded.recipe.placement.fused)
    found = simulate_as_run(loaded.recipe, phase, problem, worked, steps=before + count)
    return SimulatedSteps(first=first, steps_s=found.step_s[before:], simulation=found, before=before)


def simulate_as_run(
    recipe: Recipe, phase: PhasePlan, problem: Problem, stages_s: Mapping[str, float], *, steps: int
) -> Simulation:
    """Simulate steps of a phase as a run makes them: freshness + 1 in flight, rows in order or ready first.

    Args:
        recipe: gives the placement of roles, and the parts that rows are passed on in.
        phase: one of its phases.
        problem: the planning problem of its step.
        stages_s: seconds of its stages by name; the others are computed.
        steps: number of steps, from the first one on.
    """
    parts, placement, config = recipe.rollout.stream_chunks, recipe.placement, phase.config
    is_in_order = not is_ready_first(config)
    plan = replace(
        plan_of(recipe, problem.graph, problem.hardware.fleets[0]),
        fused=(),  # the seconds of their stages are known
        freshness=phase.freshness,
        streams=int(is_in_order and placement.samples_apart and parts > 1 and config.goes_by(parts)),
    )
    planned = problem.of_plan(plan)
    functions = {role: placement.pool_of(role) for role in problem.graph.roles if role not in problem.shapes}
    settings = Settings(parts=parts if is_in_order else 0, functions=functions)
    return simulate(planned, GivenCosts(planned, stages_s), plan, steps=steps, settings=settings)


def worked_s(spans: Sequence[SpanRecord], steps: int, fused: Sequence[str] = ()) -> dict[str, float]:
    """Return the mean seconds per step that the busiest rank of each stage worked, over all parts.

    Publishing counts everything that delivers a version. If the sampler serves a version later, the two sides
    overlap, and only the side that is busy longer counts. Two updates that are fused share the seconds in
    which both ran.
    """
    worked: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        for each in span.ranks:
            worked[span.step, span.stage][each.rank] += each.duration_s
        if not span.ranks:
            worked[span.step, span.stage][0] += span.duration_s
    for step, stage, rank, seconds in _overlaps(spans, fused):
        worked[step, stage][rank] -= seconds
    found: dict[str, float] = defaultdict(float)
    for (_, stage), ranks in worked.items():
        found[stage] += max(ranks.values()) / steps
    sides = [sum(found[name] for name in names) for names in ((PUBLISH, SENT), RECEIVED)]
    found[PUBLISH] = max(sides) if found[RECEIVED[-1]] else sum(sides) + found["policy.digest"]
    return dict(found)


def _overlaps(spans: Sequence[SpanRecord], fused: Sequence[str]) -> Iterator[tuple[int, str, int, float]]:
    """Yield step, stage, rank and seconds that the other fused update's spans count already."""
    one, other = ([span for span in spans if span.stage == f"{role}.update"] for role in fused or ("", ""))
    for first, second in ((a, b) for a in one for b in other if a.step == b.step):
        for x, y in ((x, y) for x in first.ranks for y in second.ranks if x.rank == y.rank):
            both = min(x.start_s + x.duration_s, y.start_s + y.duration_s) - max(x.start_s, y.start_s)
            if both > 0:
                share = x.duration_s / (x.duration_s + y.duration_s)
                yield first.step, first.stage, x.rank, both * (1 - share)
                yield first.step, second.stage, x.rank, both * share


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


def _rows(recipe: Recipe, phase: PhasePlan, data: RunData, first: int, last: int) -> Workload:
    """Return the workload of some steps: sampled rows as recorded, other rows by number only."""
    config = phase.config
    files = layout.rollout_files(data.path)
    found = [read_rollouts(data.path, step) for step in range(first, last + 1) if step in files]
    records = [record for step in found for record in step]
    prompts, responses = [
        Lengths(
            kind="measured", limit=max(1, *lengths), values=tuple(sorted(lengths)), in_order=tuple(lengths)
        )
        if lengths
        else Lengths(kind="fixed", limit=1)
        for lengths in (
            [len(record.tokens) - len(record.sampled) for record in records],
            [len(record.sampled) for record in records],
        )
    ]
    samples = config.samples_per_prompt if isinstance(config, SampledConfig) else 1
    if any(len(step) != config.prompts_per_step * samples for step in found):
        responses = replace(responses, in_order=())
    return Workload(
        prompts=config.prompts_per_step,
        samples=samples,
        prompt=replace(prompts, in_order=()),
        response=responses,
        epochs=config.epochs,
        minibatches=min(config.minibatches, config.prompts_per_step * samples),
        rows_at_once=recipe.rollout.max_rows,
    )
