"""Planning: state a recipe, or a run of a recipe, as a problem for the planner.

recipe ─┬─ a phase ─ drawing ─────────────────> graph
        ├─ models: new or config.json ────────> shapes
        ├─ prompts, samples, passes, lengths ─> workload     lengths: the data's, a run's, or assumed
        ├─ with the cluster's hardware ───────> Statement: Problem and the assumptions in it
        └─ its own placement ─ evaluate ──────> Plan to compare a run with; nothing is searched
run ─ recipe, placement, medians of its spans ─> one Observation per phase, for fitting factors
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.facts import RecipeFacts
from rillflow.app.recorded_recipe import recipe_of
from rillflow.app.resolved import Resolved
from rillflow.config.load import read_toml
from rillflow.config.toml_text import toml_text
from rillflow.errors import ModelError, PlanError
from rillflow.graph.graph import Graph
from rillflow.models.config import NewModel
from rillflow.placement.grid import Grid
from rillflow.placement.plan import Plan, PlannedUnit
from rillflow.runs.run_data import load
from rillflow.workers.config import SAMPLER
from rillflow_parts.fusion.alignment import FUSED
from rillflow_parts.fusion.config import fused_roles
from rillflow_parts.report.predicted import stage_medians, steps_s
from rillflow_planner.calibration import Observation
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.hardware import Factors, Fleet, Hardware, read_hardware
from rillflow_planner.model_shape import ModelShape
from rillflow_planner.problem import ENDPOINTS, Problem, Statement, Work, assumed
from rillflow_planner.ranking import SearchObjective, rank
from rillflow_planner.recipe_rows import characters_per_token, workload_of
from rillflow_planner.request import CHECKPOINTING, PACKED, ROWS_AT_ONCE, open_shape
from rillflow_planner.workload import Lengths, Workload

WARM_UP = 2
"""First steps of a phase that calibration ignores, because memory is first allocated in them."""


def open_cluster(file: Path) -> Hardware:
    """Read a cluster file.

    Raises:
        ConfigError: the file is missing, or is not TOML.
        PlanError: it describes an impossible cluster.
    """
    return read_hardware(read_toml(file, "cluster file"), str(file))


def this_machine(ranks: int) -> Hardware:
    """Return the cluster of a run without a cluster file: one rank per processor core."""
    return read_hardware(_cores(max(ranks, os.cpu_count() or 1)), "this machine")


def state_problem(loaded: Resolved, hardware: Hardware, run: Path | None = None) -> Statement:
    """Return the last phase of a recipe as a planning problem, with all assumptions; see ``state_recipe``."""
    stated, how = state_recipe(loaded, hardware, run), "measure with --lengths RUN"
    others = assumed(stated.problem, lengths=how, seconds=how)
    return replace(stated, assumptions=(*stated.assumptions, *others))


def state_recipe(
    loaded: Resolved,
    hardware: Hardware,
    run: Path | None = None,
    *,
    prompt: Lengths | None = None,
    response: Lengths | None = None,
) -> Statement:
    """Return the last phase of a recipe as a planning problem.

    Args:
        loaded: the recipe.
        hardware: the available devices.
        run: a run directory whose rollouts and spans give row lengths and the reward function's
            seconds; None: the lengths of the data's prompts, and assumed responses.
        prompt, response: lengths to plan with instead.

    Raises:
        PlanError: a model lacks a needed size, or the run measured nothing.
        ModelError: a model is missing.
    """
    recipe = loaded.recipe
    workload = workload_of(loaded, loaded.main, run, prompt=prompt, response=response)
    per_token = characters_per_token(recipe) if run is None and prompt is None else 1
    characters = f"prompts: {per_token} characters per token; measure with --lengths RUN"
    return Statement(
        problem=_problem(loaded, loaded.graphs[-1], workload, hardware),
        assumptions=(characters,) if per_token > 1 else (),
        steps=recipe.algorithm.steps,
        named=frozenset(name for name in (CHECKPOINTING, PACKED, ROWS_AT_ONCE) if not loaded.is_open(name)),
    )


def _problem(loaded: Resolved, graph: Graph, workload: Workload, hardware: Hardware) -> Problem:
    return Problem(
        graph=graph,
        shapes=shapes_of(loaded, graph),
        workload=workload,
        hardware=hardware,
        recomputes=loaded.recipe.policy.gradient_checkpointing,
    )


def plan_as_placed(loaded: Resolved, statement: Statement) -> Plan:
    """Return the placement of a recipe on the only machine type of a cluster, with its predicted seconds.

    Raises:
        PlanError: the cluster has several machine types, fewer devices than the recipe has
            ranks, or too little memory.
    """
    problem = statement.problem
    fleets = problem.hardware.fleets
    if len(fleets) > 1:
        raise PlanError(
            f"the cluster has the machine types {' and '.join(fleet.name for fleet in fleets)}",
            why="a recipe does not name the machine type of its ranks",
            fix="pass a cluster file with only the machine type of the run",
        )
    plan = plan_of(loaded, problem.graph, fleets[0])
    problem = problem.of_plan(plan)
    return rank(problem, CostModel(problem), plan, SearchObjective()).plan


def plan_of(loaded: Resolved, graph: Graph, fleet: Fleet) -> Plan:
    """Return the placement of a recipe as a plan for the models of a graph."""
    placement, roles = loaded.recipe.placement, loaded.models(graph.roles)
    units = {
        role: PlannedUnit(
            pool=placement.pool_of(role),
            grid=placement.mesh_of(role).grid,
            generate_tp=placement.generate_tp if role == "policy" and not placement.samples_apart else 0,
        )
        for role in roles
    }
    works = {ENDPOINTS.get(stage.endpoint) for stage in graph.stages if stage.role == "policy"}
    if placement.samples_apart and Work.GENERATE in works:
        pool = placement.pool_of(SAMPLER)
        grid = Grid(dp=placement.pools[pool])
        units[SAMPLER] = PlannedUnit(pool=pool, grid=grid, generate_tp=placement.generate_tp)
    pools = tuple(
        fleet.pool(pool, placement.pools[pool])
        for pool in dict.fromkeys(unit.pool for unit in units.values())
    )
    fused = fused_roles(loaded.recipe)
    settings = {FUSED: [*fused]} if fused and units.keys() >= {*fused} else {}
    return Plan(name=graph.name, pools=pools, units=units, settings=settings)


def shapes_of(loaded: Resolved, graph: Graph) -> Mapping[str, ModelShape]:
    """Return the shape of the model behind each role of the graph; a role that is a function has none."""
    facts, new = RecipeFacts(resolved=loaded), loaded.recipe.policy.model.new
    lead = shape_of_new(new) if new is not None else shape_of_directory(str(facts.source))
    found = {}
    for role in loaded.models(graph.roles):
        named = facts.named.get(loaded.table[role].section)
        shape = lead if named is None else shape_of_directory(named)
        found[role] = replace(shape, is_scalar=role not in ("policy", "reference"))
    return found


def shape_of_new(new: NewModel) -> ModelShape:
    """Return the shape of a new model: tied and gated like a Qwen2; other architectures differ little."""
    return ModelShape(
        name=f"new {new.architecture}",
        hidden=new.hidden,
        layers=new.layers,
        heads=new.heads,
        kv_heads=new.kv_heads,
        head_dim=new.hidden // new.heads,
        inner=new.intermediate,
        vocabulary=len(set(new.alphabet)) + 1,
        is_tied=True,
    )


def shape_of_directory(source: str) -> ModelShape:
    """Return the shape of a Hugging Face directory, or of a hub name that is in the cache.

    Raises:
        ModelError: its config cannot be read.
        PlanError: its config lacks a size.
    """
    folder = Path(source)
    if folder.is_dir():
        return open_shape(folder, folder.name)
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(source, "config.json")
    if not isinstance(file, str):
        raise ModelError(
            f"the sizes of {source} are not known",
            why="its config.json is not on this machine",
            fix="name a directory with a config.json; planning needs no weights",
        )
    return open_shape(Path(file), folder.name)


def observe(
    run: Path, hardware: Hardware | None = None, algorithms: Sequence[Algorithm] = ()
) -> list[Observation]:
    """Return an observation of every phase of a run with enough steps.

    Args:
        run: its directory.
        hardware: the devices that it ran on; None for this machine's processor.
        algorithms: custom algorithms that its recipe may name.

    Raises:
        RunDirectoryError: the path is not a run directory.
        PlanError: it made too few steps, ran on unknown hardware, or fused updates.
    """
    data = load(run)
    loaded = recipe_of(data, algorithms)
    recipe = loaded.recipe
    if fused_roles(recipe):
        raise PlanError(
            f"{run} fused the updates of {' and '.join(fused_roles(recipe))}",
            why="their stages overlap, so neither has seconds of its own to fit factors to",
            fix="calibrate from a run without placement.fused",
        )
    if hardware is None:
        device = str(data.starts[-1].get("device", "cpu")) if data.starts else "cpu"
        if device.split(":")[0] != "cpu":
            raise PlanError(
                f"{run} ran on {device}",
                why="a run directory does not describe its devices and their network",
                fix="pass the run's cluster file with --cluster",
            )
        hardware = this_machine(sum(recipe.placement.pools.values()))
    made, found = {phase.name: phase for phase in data.phases}, []
    for phase, graph in zip(loaded.phases, loaded.graphs, strict=True):
        if phase.name not in made:
            continue
        is_sampled = not phase.algorithm.data.answers
        first, last = max(made[phase.name].first, data.placed_from) + WARM_UP, made[phase.name].last
        if first <= last:
            rows = workload_of(loaded, phase, run if is_sampled else None)
            one = Observation(
                name=phase.name,
                problem=_problem(loaded, graph, rows, hardware),
                plan=plan_of(loaded, graph, hardware.fleets[0]),
                stages_s=stage_medians(data, first, last),
                step_s=median(steps_s(data, first, last)),
                is_recorded=is_sampled,
            )
            found.append(one)
    if not found:
        raise PlanError(
            f"{run} has no phase of more than {WARM_UP} steps",
            why="calibration ignores the first steps, in which memory is first allocated",
            fix=f"name a run of {WARM_UP + 3} steps or more",
        )
    return found


def cluster_text(
    factors: Factors, observations: Sequence[Observation], cluster: Path | None, run: Path
) -> str:
    """Return a cluster file with these factors, from the given file or the cores of the run's machine.

    Args:
        factors: the fitted factors.
        observations: the observations that the factors were fitted to.
        cluster: the cluster file of the run; None for this machine.
        run: the run that the comment names.
    """
    values = {
        name: f"{value:.6g} s" if name.endswith("_s") else float(f"{value:.6g}")
        for name, value in asdict(factors).items()
        if value or not name.startswith("refit")
    }
    said = f"{run} by rillflow calibrate"
    data = (
        read_toml(cluster, "cluster file")
        if cluster is not None
        else _cores(observations[0].problem.hardware.devices)
    )
    return toml_text({**data, "calibrated": said, "factors": values}, comment=f"Factors fitted to {said}.")


def _cores(count: int) -> dict[str, Any]:
    fleet = {"name": "cores", "device": "cpu", "devices": count, "per_machine": count}
    return {"name": "this machine", "like": "rillflow", "machine_type": [fleet]}
