"""Planning: a recipe as the problem the planner solves; what it does not say is assumed, and named.

recipe ─┬─ last phase ─ drawing ──────────────> graph
        ├─ models: new or config.json ────────> shapes
        ├─ prompts, samples, passes, lengths ─> workload     lengths: the data's, a run's, or assumed
        ├─ with the cluster's hardware ───────> Statement: Problem and the assumptions in it
        └─ its own placement ─ evaluate ──────> Plan that a run is compared with; nothing is searched
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rillflow.algorithms.algorithm import Data
from rillflow.algorithms.config import OnlineConfig
from rillflow.assembly.meshes import model_roles
from rillflow.assembly.preflight import model_source, scorer_sources
from rillflow.assembly.recipe import LoadedRecipe, Recipe
from rillflow.assembly.rows import Rows, assumed_rows, measured_rows
from rillflow.cluster.config import MeshSizes
from rillflow.config.load import read_toml
from rillflow.errors import ModelError, PlanError
from rillflow.graph.graph import Graph
from rillflow.models.config import NewModel
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.evaluate import evaluate, stages_by_name
from rillflow.planner.grid import Grid
from rillflow.planner.hardware import Fleet, Hardware, read_hardware
from rillflow.planner.model_shape import ModelShape, read_shape
from rillflow.planner.plan import Plan, PlannedPool, PlannedUnit
from rillflow.planner.problem import Problem, Statement
from rillflow.planner.workload import Workload


def open_cluster(file: Path) -> Hardware:
    """The cluster of a file.

    Raises:
        ConfigError: it is not there, or no TOML.
        PlanError: what it says cannot be.
    """
    return read_hardware(read_toml(file), str(file))


def state_problem(loaded: LoadedRecipe, hardware: Hardware, measured: Path | None = None) -> Statement:
    """The last phase of a recipe as a problem.

    Args:
        loaded: the recipe.
        hardware: the devices there are.
        measured: a run directory whose rollouts and spans say how long rows are and what a reward's
            function takes; None: the data's prompts, and responses assumed.

    Raises:
        PlanError: a model without the needed sizes, or a run that measured nothing.
        ModelError: a model that is not there.
    """
    from rillflow.assembly.drawing import graphs

    graph = graphs(loaded.recipe)[-1]
    cuts = loaded.recipe.algorithm.minibatches
    rows = measured_rows(measured, cuts) if measured is not None else assumed_rows(loaded)
    problem = Problem(
        graph=graph,
        shapes=shapes_of(loaded, graph),
        workload=workload_of(loaded.recipe, rows),
        hardware=hardware,
        recomputes=loaded.recipe.policy.gradient_checkpointing,
    )
    steps = loaded.recipe.algorithm.steps
    return Statement(problem=problem, assumptions=tuple(_assumptions(problem, rows)), steps=steps)


def plan_as_placed(recipe: Recipe, statement: Statement) -> Plan:
    """The placement of a recipe on the one fleet of a cluster, with the seconds that are expected of it.

    Raises:
        PlanError: the cluster has several fleets, fewer devices than the recipe ranks, or too little memory.
    """
    problem = statement.problem
    fleets = problem.hardware.fleets
    if len(fleets) > 1:
        raise PlanError(
            f"the cluster has the fleets {' and '.join(fleet.name for fleet in fleets)}",
            why="a recipe does not say on which of them its ranks are",
            fix="give a cluster's file with the one that the run is on",
        )
    plan = plan_of(recipe, problem.graph, fleets[0])
    found = evaluate(problem, CostModel(problem), plan)
    stages = stages_by_name(problem, found)
    return replace(plan, predicted_step_s=found.step_s, predicted_stages_s=stages)


def plan_of(recipe: Recipe, graph: Graph, fleet: Fleet) -> Plan:
    """The placement of a recipe as a plan for the models of a graph."""
    placement, roles = recipe.placement, model_roles(recipe, graph.roles)
    units = {
        role: PlannedUnit(
            pool=placement.pool_of(role),
            grid=grid_of(placement.mesh_of(role)),
            generate_tp=placement.generate_tp if role == "policy" else 0,
        )
        for role in roles
    }
    pools = tuple(
        PlannedPool(name=pool, fleet=fleet.name, devices=placement.pools[pool], device=fleet.device.name)
        for pool in dict.fromkeys(unit.pool for unit in units.values())
    )
    return Plan(name=graph.name, pools=pools, units=units)


def grid_of(mesh: MeshSizes) -> Grid:
    """The grid of a recipe's mesh."""
    return Grid(dp=mesh.dp, pp=mesh.pp, tp=mesh.tp, is_sharded=mesh.is_sharded)


def workload_of(recipe: Recipe, rows: Rows) -> Workload:
    """A step's rows as the recipe has them; a pair of answers is two rows of one prompt."""
    config = recipe.algorithm
    samples = config.samples_per_prompt if isinstance(config, OnlineConfig) else 1
    return Workload(
        prompts=config.prompts_per_step,
        samples=2 if recipe.chosen.data is Data.PREFERENCES else samples,
        prompt=rows.prompt,
        response=rows.response,
        epochs=config.epochs,
        minibatches=config.minibatches,
        tokens_per_micro_batch=recipe.policy.tokens_per_micro_batch,
        function_s=rows.function_s,
        packing=rows.packing,
        gradient_share=rows.gradient_share,
        dtype=recipe.policy.model.dtype,
        rows_at_once=recipe.rollout.max_rows,
    )


def shapes_of(loaded: LoadedRecipe, graph: Graph) -> Mapping[str, ModelShape]:
    """The model behind each role of the graph; none of a role that is a function."""
    recipe, base = loaded.recipe, loaded.base
    new, source = recipe.policy.model.new, model_source(recipe, base)
    lead = shape_of_new(new) if new is not None else shape_of_directory(str(source))
    critic = lead if recipe.critic.path is None else shape_of_directory(str(base / recipe.critic.path))
    scorers = {key.split(".")[0]: path for key, path in scorer_sources(recipe, base).items()}
    shapes: dict[str, ModelShape] = {}
    for role in model_roles(recipe, graph.roles):
        match role:
            case "policy" | "reference":
                shapes[role] = lead
            case "critic" | "cost_critic":
                shapes[role] = replace(critic, is_scalar=True)
            case "reward" | "cost":
                shapes[role] = replace(shape_of_directory(scorers[role]), is_scalar=True)
            case _:
                shapes[role] = replace(lead, is_scalar=True)
    return shapes


def shape_of_new(new: NewModel) -> ModelShape:
    """The sizes of a model still to be made: tied, gated, as a Qwen2; others differ little."""
    return ModelShape(
        name=f"new {new.architecture}",
        hidden=new.hidden,
        layers=new.layers,
        heads=new.heads,
        kv_heads=new.kv_heads,
        head_dim=new.hidden // new.heads,
        inner=new.intermediate or 3 * new.hidden,
        vocabulary=len(set(new.alphabet)) + 1,
        is_tied=True,
    )


def shape_of_directory(source: str) -> ModelShape:
    """The sizes of a Hugging Face directory, or of a name of the hub that is in the cache.

    Raises:
        ModelError: its config cannot be read.
        PlanError: its config lacks a size.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    file = folder / "config.json" if folder.is_dir() else try_to_load_from_cache(source, "config.json")
    if not isinstance(file, str | Path):
        raise ModelError(
            f"the sizes of {source} are not known",
            why="its config.json is not on this machine",
            fix="give a directory that has one; weights are not needed to plan",
        )
    try:
        config: dict[str, Any] = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read", why=str(error)) from error
    return read_shape(config, folder.name)


def _assumptions(problem: Problem, rows: Rows) -> Iterator[str]:
    yield from rows.assumptions
    functions = [role for role in problem.graph.roles if role not in problem.shapes]
    if functions and not rows.function_s:
        yield f"{' and '.join(functions)}: a function that takes no time; --lengths RUN measures"
