"""Planning: answer the commands that predict what a step will cost; arguments in, lines and data out.

plan       recipe, cluster ─ search ─> tables, plan.toml, a picture
simulate   recipe, plan, cluster ─ events ─> tables, a timeline
calibrate  run directory ─ fit ─> a cluster file with its factors

What reads recipes is imported where it is needed: the short form of ``plan`` needs no pydantic.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rillflow.cli.commands import load
from rillflow.errors import PlanError
from rillflow.placement.plan import Plan, plan_text, require_possible
from rillflow_parts.fusion.alignment import require_fusable
from rillflow_planner import plan_report, request
from rillflow_planner.calibration import calibrate as fit
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.fusion import with_fusion
from rillflow_planner.gathering import proposed
from rillflow_planner.hardware import Hardware
from rillflow_planner.plan_report import Decision
from rillflow_planner.problem import Problem, Statement
from rillflow_planner.ranking import Goal, Ranking, SearchObjective, order_as_shown
from rillflow_planner.search import ranked_as_placed, search, variations
from rillflow_planner.simulator.result import Simulation
from rillflow_planner.simulator.simulate import enough_steps
from rillflow_planner.simulator.simulate import simulate as simulate_steps

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved

SIZES = (Fraction(1, 4), Fraction(1, 2), 1, 2)
"""Sizes of the clusters that throughput is shown for, relative to the given one."""
SIMULATED, VARIED = 3, 5
"""Numbers of best plans that are simulated, and that are evaluated with other lengths."""
MOST_SIMULATED = 300_000
"""Largest number of rows that a command simulates, which takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class CommandOutput:
    """What a command shows and writes."""

    lines: Sequence[str]
    """The answer as text."""
    data: object
    """The answer as JSON data."""
    files: Mapping[str, Callable[[], str]]
    """Texts of the files that options name, by option."""


def plan(arguments: Namespace) -> CommandOutput:
    """``rillflow plan``: find the best placements of a recipe on a cluster, and rank the others."""
    deadline_s = math.inf if arguments.deadline is None else arguments.deadline
    objective = SearchObjective(goal=Goal(arguments.objective or "step"), deadline_s=deadline_s)
    found = decide(stated(arguments), objective, arguments)
    lines, title = plan_report.decision_lines(found), found.statement.title
    heading = f"{title}, freshness {found.best.plan.freshness}"
    return CommandOutput(
        lines=[title, *lines],
        data=plan_report.decision_data(found),
        files={
            "out": lambda: plan_text(found.best.plan),
            "plot": lambda: plan_report.plan_page(heading, found.simulated[0], lines),
        },
    )


def decide(statement: Statement, objective: SearchObjective, arguments: Namespace) -> Decision:
    """Return the best plans of a question, and what is shown of them."""
    bound, each = max(arguments.freshness), statement.problem.workload.rows
    rows = each * enough_steps(statement.problem, Plan(name="", pools=(), units={}, freshness=bound))
    most = max(0, MOST_SIMULATED // (2 * each) - 1)
    _require_simulable(
        f"--freshness is {bound:g}, with {each:,} rows a step",
        rows,
        f"set --freshness to at most {most}, or fewer rows",
    )
    ranking = _ranked(statement, objective, arguments)
    best = ranking.best[: SIMULATED if rows * SIMULATED <= MOST_SIMULATED else 1]
    simulated = [_simulated(one.problem, one.plan) for one in best]
    if objective.goal is Goal.STEP:
        shown = [plan_report.shown_s(statement, *pair) for pair in zip(best, simulated, strict=True)]
        ranking, order = order_as_shown(ranking, shown)
        simulated = [simulated[place] for place in order]
    first = ranking.best[0]
    gathering = proposed(first.problem, first.evaluation) if not statement.stack else None
    if gathering is not None and not gathering.is_assumed:
        rows, replicas, by = gathering.rows, gathering.replicas, gathering.by
        plan = replace(first.plan, gather_rows=rows, gather_replicas=replicas, gather_by=by)
        ranking = replace(ranking, best=(replace(first, plan=plan), *ranking.best[1:]))
    told = f"activations are {'' if first.problem.recomputes else 'not '}recomputed"
    change = f"--set {request.CHECKPOINTING}={str(not first.problem.recomputes).lower()} to change it"
    said = (f"{told}; {change}",) if statement.may_recompute else ()
    problem = replace(statement.problem, recomputes=first.problem.recomputes)
    return Decision(
        statement=replace(statement, problem=problem, assumptions=(*statement.assumptions, *said)),
        objective=objective,
        ranking=ranking,
        gathering=gathering,
        simulated=simulated,
        variations=variations(CostModel, ranking.best[:VARIED]),
    )


def _ranked(statement: Statement, objective: SearchObjective, arguments: Namespace) -> Ranking:
    """Rank the plans; if the statement leaves it open, each with or without recomputed activations.

    Several models with several freshness bounds are only planned with recomputation, to answer in time.
    """
    problem = statement.problem
    is_small = len(problem.shapes) == 1 or len(arguments.freshness) == 1
    choices = (False, True) if statement.may_recompute and is_small else (problem.recomputes,)
    if statement.placed is not None:
        return ranked_as_placed(problem, CostModel, statement.placed, choices, SIZES)
    ranking = search(
        problem,
        CostModel,
        objective=objective,
        freshness=arguments.freshness,
        separate_in_step=arguments.separate_in_step,
        recomputes=choices,
        times=SIZES,
    )
    return with_fusion(problem, ranking, objective, choices)


def stated(arguments: Namespace) -> Statement:
    """Return the question that the options of ``plan`` ask, about a recipe or a step that they describe.

    Raises:
        PlanError: options are missing, or one would be ignored.
    """
    request.require_compatible(arguments)
    prompt, response = (
        None if text is None else request.lengths(text, where)
        for where, text in (("--prompt", arguments.prompt), ("--response", arguments.response))
    )
    file = None
    if arguments.cluster is not None:
        from rillflow.config.load import read_toml

        file = read_toml(arguments.cluster, "cluster file")
    hardware = request.hardware_of(arguments, file)
    if arguments.recipe is None:
        return request.ask(request.describe(arguments, hardware, response, prompt), arguments)
    from rillflow_planner.recipe_problem import state_recipe

    loaded = load(arguments)
    there = _on(hardware, loaded)
    step = state_recipe(there, hardware, arguments.lengths, prompt=prompt, response=response)
    is_open = there is not loaded and request.CHECKPOINTING not in step.named
    return request.ask(replace(step, may_recompute=is_open), arguments)


def _on(hardware: Hardware, loaded: Resolved) -> Resolved:
    """Return the recipe with the defaults of accelerators, if the cluster has no others."""
    from rillflow.app.defaults import on_cuda

    if loaded.recipe.run.device == "cpu" or any(fleet.device.name == "cpu" for fleet in hardware.fleets):
        return loaded
    return on_cuda(loaded)


def _require_simulable(what: str, rows: float, fix: str) -> None:
    """Raise an error for more rows than a command simulates within seconds, or none."""
    if not 1 <= rows <= MOST_SIMULATED:
        why = f"a simulation has 1 step or more, and at most {MOST_SIMULATED:,} rows"
        raise PlanError(what, why=why, fix=fix)


def _simulated(problem: Problem, plan: Plan, steps: int = 0, **how: Any) -> Simulation:
    """Simulate a number of steps; 0 takes as many as are enough to know one."""
    planned = problem.of_plan(plan)
    steps = steps or enough_steps(planned, plan)
    return simulate_steps(planned, CostModel(planned), plan, steps=steps, **how)


def simulate(arguments: Namespace) -> CommandOutput:
    """``rillflow simulate``: simulate a plan, event by event."""
    from rillflow.app.planned import open_plan
    from rillflow_planner.recipe_problem import open_cluster, state_problem

    plan, steps, seed = open_plan(arguments.plan), arguments.steps, arguments.seed
    require_fusable(plan, str(arguments.plan))
    prompts, samples = arguments.oversample or (plan.oversample_prompts, plan.oversample_samples)
    freshness = plan.freshness if arguments.freshness is None else arguments.freshness
    plan = replace(plan, freshness=freshness, oversample_prompts=prompts, oversample_samples=samples)
    require_possible(plan)
    hardware = open_cluster(arguments.cluster)
    statement = state_problem(_on(hardware, load(arguments)), hardware, arguments.lengths)
    begun = prompts * samples * statement.problem.workload.rows
    most = int(MOST_SIMULATED // begun)
    _require_simulable(
        f"--steps is {steps:,}, of {begun:,.0f} rows each",
        steps * begun,
        f"set --steps from 1 to {most:,}" if most else "begin fewer rows with --oversample",
    )
    found = _simulated(statement.problem, plan, steps, seed=seed, parts=arguments.parts)
    title = f"{plan.name} on {statement.problem.hardware.name}, freshness {plan.freshness:g}, seed {seed}"
    lines = plan_report.simulation_lines(plan, found, statement)
    return CommandOutput(
        lines=[f"{title}: {steps} steps simulated", *lines],
        data=plan_report.simulation_data(plan, found, statement),
        files={"plot": lambda: plan_report.plan_page(title, found, lines)},
    )


def calibrate(arguments: Namespace) -> CommandOutput:
    """``rillflow calibrate``: fit the factors with which predictions match a run."""
    from rillflow_planner.recipe_problem import cluster_text, observe, open_cluster

    hardware = None if arguments.cluster is None else open_cluster(arguments.cluster)
    observations = observe(arguments.run, hardware, arguments.algorithms)
    found = fit(observations)
    return CommandOutput(
        lines=plan_report.calibration_lines(found),
        data=plan_report.calibration_data(found),
        files={"out": lambda: cluster_text(found.factors, observations, arguments.cluster, arguments.run)},
    )
