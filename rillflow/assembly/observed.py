"""Observed: a run directory as the observations that factors are fitted to.

config.json ─> recipe ─> graph, workload, placement of each phase ─┐
rollouts ─> lengths; spans ─> medians of stages ───────────────────┴─> Observation a phase
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.assembly.phases import PhasePlan, phase_plans
from rillflow.assembly.planning import plan_of, shapes_of, workload_of
from rillflow.assembly.recipe import LoadedRecipe, Recipe, recipe_class
from rillflow.assembly.resume import BESIDE_SETTINGS
from rillflow.assembly.rows import learnt_rows, measured_rows
from rillflow.config.load import read_toml, validate
from rillflow.config.toml_text import toml_text
from rillflow.errors import PlanError
from rillflow.graph.graph import Graph
from rillflow.planner.calibration import Observation
from rillflow.planner.factors import Factors
from rillflow.planner.hardware import Hardware, read_hardware
from rillflow.planner.problem import Problem
from rillflow.view.predicted import stage_medians, usual_step_s
from rillflow.view.run_data import PhaseSpan, RunData, load

WARM_UP = 2
"""Steps of a phase that are not looked at: memory is first taken in them."""


def this_machine(ranks: int) -> Hardware:
    """The cluster of a run without one: the processor's cores, a rank each."""
    return read_hardware(_cores(max(ranks, os.cpu_count() or 1)), "this machine")


def observe(
    run: Path, hardware: Hardware | None = None, algorithms: Sequence[Algorithm] = ()
) -> list[Observation]:
    """Every phase of a run that made steps enough.

    Args:
        run: its directory.
        hardware: what it ran on; this machine's processor if None.
        algorithms: what its recipe may name beside those that are shipped.

    Raises:
        RunDirectoryError: it is no run directory.
        PlanError: it made too few steps, or ran on something unknown.
    """
    from rillflow.assembly.drawing import graphs

    data = load(run)
    recipe = recipe_of(data, algorithms)
    if hardware is None:
        if data.starts and str(data.starts[-1].get("device", "cpu")).split(":")[0] != "cpu":
            raise PlanError(
                f"{run} ran on {data.starts[-1]['device']}",
                why="what that is and how it is linked stands in no run directory",
                fix="give the cluster's file with --cluster",
            )
        hardware = this_machine(sum(recipe.placement.pools.values()))
    loaded = LoadedRecipe(recipe=recipe, path=run, base=_base(data), given={})
    found = [
        _observation(data, loaded, plan, graph, hardware)
        for plan, graph in zip(phase_plans(recipe), graphs(recipe), strict=True)
        if any(phase.name == plan.name and phase.last - _first(data, phase) >= 0 for phase in data.phases)
    ]
    if not found:
        raise PlanError(
            f"{run} has no phase of more than {WARM_UP} steps",
            why="the first ones are not like the others",
            fix=f"name a run of {WARM_UP + 3} steps or more",
        )
    return found


def recipe_of(data: RunData, algorithms: Sequence[Algorithm] = ()) -> Recipe:
    """The recipe a run directory keeps."""
    kept = {name: value for name, value in data.config.items() if name not in BESIDE_SETTINGS}
    return validate(recipe_class(algorithms), kept, str(data.path))


def _observation(
    data: RunData, loaded: LoadedRecipe, plan: PhasePlan, graph: Graph, hardware: Hardware
) -> Observation:
    recipe = loaded.recipe
    phase = next(phase for phase in data.phases if phase.name == plan.name)
    first = _first(data, phase)
    is_sampled = plan.algorithm.data is Data.PROMPTS
    if is_sampled:
        rows = measured_rows(data.path, plan.config.minibatches)
    else:
        rows = learnt_rows(loaded, plan.config.prompts_per_step, plan.config.minibatches)
    workload = workload_of(recipe, rows)
    if not is_sampled and plan.name != recipe.algorithm.name:
        workload = replace(
            workload,
            prompts=plan.config.prompts_per_step,
            samples=1,
            epochs=plan.config.epochs,
            minibatches=plan.config.minibatches,
        )
    problem = Problem(
        graph=graph,
        shapes=shapes_of(loaded, graph),
        workload=workload,
        hardware=hardware,
        recomputes=recipe.policy.gradient_checkpointing,
    )
    return Observation(
        name=plan.name,
        problem=problem,
        plan=plan_of(recipe, graph, hardware.fleets[0]),
        stages_s=stage_medians(data, first, phase.last),
        step_s=usual_step_s(data, first, phase.last),
        is_recorded=is_sampled,
    )


def _first(data: RunData, phase: PhaseSpan) -> int:
    """The first step of a phase that is looked at: the run lies as now, and has warmed up."""
    return max(phase.first, data.placed_from) + WARM_UP


def _base(data: RunData) -> Path:
    """The folder of the recipe that a run was started with, where it says so."""
    base = data.starts[-1].get("base") if data.starts else None
    return Path(base) if isinstance(base, str) else Path()


def cluster_text(
    factors: Factors, observations: Sequence[Observation], cluster: Path | None, run: Path
) -> str:
    """A cluster file with these factors: the given one, or the cores of the run's machine.

    Args:
        factors: what was fitted.
        observations: what to.
        cluster: the file of what it ran on; None for this machine.
        run: what a comment names.
    """
    if cluster is not None:
        data = read_toml(cluster)
    else:
        data = _cores(observations[0].problem.hardware.fleets[0].devices)
    values = {
        name: f"{value:.6g} s" if name.endswith("_s") else float(f"{value:.6g}")
        for name, value in asdict(factors).items()
        if value or not name.startswith("refit")
    }
    data = {**data, "calibrated": f"{run} by rillflow calibrate", "factors": values}
    return toml_text(data, comment=f"Factors fitted to {run} by rillflow calibrate.")


def _cores(count: int) -> dict[str, Any]:
    fleet = {"name": "cores", "device": "cpu", "devices": count, "per_machine": count}
    return {"name": "this machine", "like": "rillflow", "fleet": [fleet]}
