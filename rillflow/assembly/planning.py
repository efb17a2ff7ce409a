"""Planning: a recipe as the problem the planner solves; what it does not say is assumed, and named.

recipe ─┬─ last phase ─ drawing ──────────────> graph
        ├─ models: new or config.json ────────> shapes
        ├─ prompts, samples, passes, lengths ─> workload     lengths: the data's, a run's, or assumed
        └─ with the cluster's hardware ───────> Statement: Problem and the assumptions in it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rillflow.algorithms.algorithm import Data
from rillflow.algorithms.config import OnlineConfig
from rillflow.assembly.meshes import model_roles
from rillflow.assembly.preflight import model_source, open_rows, prompt_length, scorer_sources
from rillflow.assembly.recipe import LoadedRecipe, Recipe
from rillflow.config.load import read_toml
from rillflow.errors import ModelError, PlanError
from rillflow.graph.graph import Graph
from rillflow.models.config import NewModel
from rillflow.observe import layout
from rillflow.observe.reader import RolloutRecord, read_rollouts, read_spans, require_run
from rillflow.planner.calibration import stages_by_name
from rillflow.planner.hardware import Hardware, read_hardware
from rillflow.planner.mapping.ranking import Ranked
from rillflow.planner.model_shape import ModelShape, read_shape
from rillflow.planner.plan import Plan
from rillflow.planner.problem import SAMPLER, Problem
from rillflow.planner.workload import Lengths, Workload
from rillflow.tasks.example import Example
from rillflow.tasks.preference import Preference

CHARACTERS_PER_TOKEN = 4
"""Of a text whose tokeniser is not at hand; a new model's tokens are characters."""
ASSUMED_SHARE, ASSUMED_SIGMA = 0.25, 0.6
"""The median response as a share of the longest, and its spread, where nothing was measured."""
READ_STEPS = 6
"""Steps of a run whose rollouts are read: its last ones."""
KEPT_LENGTHS = 512
"""Measured lengths that stand for all of them: evenly taken from the sorted ones."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What is to be planned, and what the recipe left open."""

    problem: Problem
    """The step, its models and the devices."""
    assumptions: tuple[str, ...]
    """A sentence for each number that was assumed, with what would replace it."""


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
    rows = measured_rows(measured, cuts) if measured is not None else _assumed_rows(loaded)
    problem = Problem(
        graph=graph,
        shapes=shapes_of(loaded, graph),
        workload=workload_of(loaded.recipe, rows),
        hardware=hardware,
        recomputes=loaded.recipe.policy.gradient_checkpointing,
    )
    return Statement(problem=problem, assumptions=tuple(_assumptions(problem, rows)))


def problem_of_plan(problem: Problem, plan: Plan) -> Problem:
    """The problem as a plan solves it: with a sampler where it has one, and its freshness bound."""
    return replace(problem, samples_apart=SAMPLER in plan.units, freshness=plan.freshness)


def told(problem: Problem, best: Ranked) -> Plan:
    """The best plan, with what is expected of its stages and what its devices are, as its file keeps them."""
    plan = best.plan
    pools = tuple(replace(pool, device=problem.hardware.fleet(pool.fleet).device.name) for pool in plan.pools)
    return replace(
        plan,
        pools=pools,
        predicted_step_s=best.evaluation.step_s,
        predicted_stages_s=stages_by_name(problem, best.evaluation),
    )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What rows are like."""

    prompt: Lengths
    """Tokens of a prompt."""
    response: Lengths
    """Tokens of a response."""
    function_s: float = 0.0
    """Seconds a reward's function takes for a row; 0 where nobody measured it."""
    computed_share: float = 1.0
    """Of their tokens, those that are computed in training: rows that begin alike share some."""
    gradient_share: float = 1.0
    """Of them, those with a gradient."""
    assumptions: tuple[str, ...] = ()
    """What was assumed of them."""


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
        computed_share=rows.computed_share,
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
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read", why=str(error)) from error
    return read_shape(config, folder.name)


def learnt_rows(loaded: LoadedRecipe) -> Rows:
    """Rows that are learnt from, as the data has them: prompt, answer and the token that ends it."""
    examples, per_token = open_rows(loaded.recipe, loaded.base).train, _per_token(loaded.recipe)
    answers = [len(text) for one in examples for text in _answers(one)]
    return Rows(
        prompt=_lengths(_tokens(map(prompt_length, examples), per_token)),
        response=_lengths([tokens + 1 for tokens in _tokens(answers, per_token)]),
        assumptions=_by_characters(per_token),
    )


def _assumed_rows(loaded: LoadedRecipe) -> Rows:
    """Rows learnt from as the data has them; of sampled ones the prompts, and responses assumed."""
    recipe = loaded.recipe
    if recipe.chosen.data is not Data.PROMPTS:
        return learnt_rows(loaded)
    examples, per_token = open_rows(recipe, loaded.base).train, _per_token(recipe)
    limit = recipe.rollout.max_tokens
    middle = min(float(limit), max(4.0, ASSUMED_SHARE * limit))
    assumed = (
        f"responses: log-normal, median {middle:g} tokens, sigma {ASSUMED_SIGMA}, clipped at {limit:,}; "
        "--lengths RUN measures"
    )
    return Rows(
        prompt=_lengths(_tokens(map(prompt_length, examples), per_token)),
        response=Lengths(kind="lognormal", limit=limit, median=middle, sigma=ASSUMED_SIGMA),
        assumptions=(*_by_characters(per_token), assumed),
    )


def _per_token(recipe: Recipe) -> int:
    return 1 if recipe.policy.model.new is not None else CHARACTERS_PER_TOKEN


def _by_characters(per_token: int) -> tuple[str, ...]:
    return () if per_token == 1 else (f"prompts: {per_token} characters a token; --lengths RUN measures",)


def measured_rows(run: Path, minibatches: int = 1) -> Rows:
    """What the rows of a run's last steps were like, and its functions' seconds a row.

    Args:
        run: its directory.
        minibatches: optimiser steps of a pass; rows of two share no beginning.

    Raises:
        RunDirectoryError: it is no run directory.
        PlanError: it sampled no rows.
    """
    require_run(run)
    steps = [read_rollouts(run, step) for step in list(layout.rollout_files(run))[-READ_STEPS:]]
    records = [record for step in steps for record in step]
    if not records:
        raise PlanError(
            f"{run} has no rollouts",
            why="lengths are measured from the rows a run sampled",
            fix="name a run of an algorithm that samples, or leave --lengths out",
        )
    responses = [len(record.sampled) for record in records]
    prompts = [len(record.tokens) - count for record, count in zip(records, responses, strict=True)]
    scored = [span for span in read_spans(run) if span.stage in ("reward.score", "cost.score") and span.rows]
    parts = [step[place::minibatches] for step in steps for place in range(minibatches)]
    judged = [record.advantage for record in records if record.advantage is not None]
    return Rows(
        prompt=_lengths(prompts),
        response=_lengths(responses),
        function_s=median(span.duration_s / span.rows for span in scored) if scored else 0.0,
        computed_share=sum(map(_distinct, parts)) / sum(len(record.tokens) for record in records),
        gradient_share=sum(map(bool, judged)) / len(judged) if judged else 1.0,
    )


def _distinct(records: Sequence[RolloutRecord]) -> int:
    """Tokens of rows, each beginning that several share counted once."""
    ordered = sorted(record.tokens for record in records)
    return sum(map(len, ordered)) - sum(_common(one, other) for one, other in pairwise(ordered))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _assumptions(problem: Problem, rows: Rows) -> Iterator[str]:
    yield from rows.assumptions
    functions = [role for role in problem.graph.roles if role not in problem.shapes]
    if functions and not rows.function_s:
        yield f"{' and '.join(functions)}: a function that takes no time; --lengths RUN measures"


def _answers(example: Example) -> Iterable[str]:
    if isinstance(example, Preference):
        return str(example.completion), example.rejected
    return (str(example.completion),)


def _tokens(characters: Iterable[int], per_token: int) -> list[int]:
    return [max(1, -(-count // per_token)) for count in characters]


def _lengths(found: Sequence[int]) -> Lengths:
    """Lengths that were seen, thinned to so many that their quantiles stay."""
    ordered = sorted(found)
    count = min(len(ordered), KEPT_LENGTHS)
    kept = tuple(ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count))
    return Lengths(kind="measured", limit=ordered[-1], values=kept)
