"""Check: everything about a recipe that can be known before it runs.

    LoadedRecipe ─┬─ settings, batch arithmetic ─── from the recipe alone
                  ├─ data, model, memory ────────── from the disk
                  ├─ reward on two rows ─────────── from a child that can be killed
                  └─ run directory ──────────────── new, resumes, finished
                            └─> Report: topics to read, notes to think about, problems that stop a run

Imports no torch: the answer is there in a second or two. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rillflow.assembly.arithmetic import batch_lines
from rillflow.assembly.doctor import available_memory
from rillflow.assembly.launch import FREE_TO_CHANGE, resolved
from rillflow.assembly.memory import ModelSizes, estimate, rank_lines, sizes_of_directory, sizes_of_new
from rillflow.assembly.meshes import model_roles, unfit
from rillflow.assembly.preflight import (
    longest_of,
    model_source,
    open_rows,
    prompt_length,
    require_answers,
    require_room,
    reward_function,
    scorer_sources,
)
from rillflow.assembly.recipe import LoadedRecipe, Recipe, leaves
from rillflow.config.problems import shown
from rillflow.errors import ConfigError, RillflowError, RunDirectoryError
from rillflow.observe import layout
from rillflow.observe.run_directory import require_same_config
from rillflow.observe.wording import size
from rillflow.rewards.columns import Text
from rillflow.rewards.outcome import Score
from rillflow.rewards.workers import check_function
from rillflow.tasks.example import Example
from rillflow.tasks.task import Task

_CHECKPOINT = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One subject of a report."""

    title: str
    """What it is about."""
    lines: Sequence[str]
    """What there is to say."""


@dataclass(kw_only=True)
class Report:
    """What a check found."""

    topics: list[Topic] = field(default_factory=list)
    """Facts, by subject."""
    notes: list[str] = field(default_factory=list)
    """What a run would do and its author may not expect."""
    problems: list[RillflowError] = field(default_factory=list)
    """What would stop a run."""

    def say(self, title: str, lines: Sequence[str]) -> None:
        """Add a topic."""
        self.topics.append(Topic(title=title, lines=lines))

    def attempt(self, look: Callable[[], None]) -> None:
        """Look at one thing; what stops it is a problem, and the next thing is looked at all the same."""
        try:
            look()
        except RillflowError as error:
            self.problems.append(error)


def check(loaded: LoadedRecipe) -> Report:
    """Look at everything."""
    report = Report()
    report.say("settings", setting_lines(loaded))
    report.say("batch", batch_lines(loaded.recipe))
    report.say("placement", placement_lines(loaded.recipe))
    task: Task[Example] | None = None
    try:
        task = open_rows(loaded.recipe, loaded.base)
        report.say("data", _data_lines(loaded, task, report))
        require_answers(loaded.recipe, task)
        require_room(loaded.recipe, task)
    except RillflowError as error:
        report.problems.append(error)
    report.attempt(lambda: _look_at_model(loaded, report))
    report.attempt(lambda: _look_at_reward(loaded, task, report))
    report.attempt(lambda: _look_at_run(loaded, task, report))
    return report


def setting_lines(loaded: LoadedRecipe) -> list[str]:
    """Every resolved setting, and where it came from."""
    data: dict[str, Any] = loaded.recipe.model_dump(exclude_none=True)
    lines = []
    for dotted in leaves(data):
        value: Any = data
        for name in dotted.split("."):
            value = value[name]
        origin = loaded.given.get(dotted, "default")
        lines.append(f"{dotted} = {shown(value)}  ({origin})")
    return lines


def placement_lines(recipe: Recipe) -> list[str]:
    """Which role is on which ranks, and what runs them."""
    placement = recipe.placement
    device = "cuda" if recipe.run.device.startswith("cuda") else recipe.run.device
    ranks = sum(placement.pools.values())
    where = "in this process" if placement.is_inline else f"on Ray, {ranks} processes"
    lines, models = [f"{where}; device {device}"], model_roles(recipe, recipe.roles)
    for role in recipe.roles:
        pool = placement.pool_of(role)
        size = placement.pools[pool]
        last = f" to {size - 1}" if size > 1 else ""
        grid = f", {placement.mesh_of(role)}" if role in models and size > 1 else ""
        lines.append(f"{role}: pool {pool}, rank 0{last}{grid}")
    return lines


def _data_lines(loaded: LoadedRecipe, task: Task[Example], report: Report) -> list[str]:
    recipe = loaded.recipe
    longest = longest_of(task)
    judged = min(recipe.evaluate.problems, len(task.held_out))
    word = "prompts" if recipe.has_policy else "pairs"
    temperature = recipe.evaluate.temperature
    how = f", answered at temperature {temperature:g}" if recipe.has_policy else ""
    prompts = recipe.algorithm.steps * recipe.algorithm.prompts_per_step
    if recipe.algorithm.prompts_per_step > len(task.train):
        report.notes.append(
            f"a step draws {recipe.algorithm.prompts_per_step:,} {word} and there are {len(task.train):,}: "
            f"within a step, {word} repeat"
        )
    if not judged:
        report.notes.append("nothing is held out, so accuracy will not be measured")
    elif judged < recipe.evaluate.problems:
        report.notes.append(
            f"of evaluate.problems = {recipe.evaluate.problems:,} only {judged:,} are held out"
        )
    return [
        f"{task.name}: {len(task.train):,} {word} to train on, {len(task.held_out):,} held out, "
        f"{task.left_out:,} left out because they are among those",
        f"the algorithm draws {prompts:,} {word}: {prompts / len(task.train):.1f} passes over them",
        f"judged by {judged:,} {word}{how}",
        f"longest prompt: {prompt_length(longest):,} characters: {shown(longest.key)}",
    ]


def _look_at_model(loaded: LoadedRecipe, report: Report) -> None:
    recipe = loaded.recipe
    new, source = recipe.policy.model.new, model_source(recipe, loaded.base)
    if new is not None:
        sizes: ModelSizes | None = sizes_of_new(new)
        name = f"a new {new.architecture}"
    else:
        name = str(source)
        sizes = sizes_of_directory(Path(name)) if Path(name).is_dir() else None
    if sizes is None:
        report.say("model", [f"{name}: its size is known when it is loaded"])
        return
    if recipe.has_policy and recipe.rollout.max_tokens >= sizes.context:
        raise ConfigError(
            f"rollout.max_tokens is {recipe.rollout.max_tokens} and the model's context is {sizes.context}",
            why="the context holds prompt and answer",
            fix=f"fewer than {sizes.context}",
        )
    placement = recipe.placement
    for problem in unfit(
        placement.mesh_of("policy"), placement.generate_tp, sizes.heads, sizes.kv_heads, sizes.layers
    ):
        raise problem
    parts = estimate(recipe, sizes)
    total, free = sum(parts.values()), available_memory()
    terms = " + ".join(f"{what} {size(amount)}" for what, amount in parts.items())
    report.say(
        "model",
        [
            f"{name}: {sizes.parameters:,} parameters, context {sizes.context:,} tokens",
            f"memory: {terms} = {size(total)}, and activations",
            *rank_lines(recipe, sizes),
        ],
    )
    if free is not None and total > free and not recipe.run.device.startswith("cuda"):
        report.notes.append(f"about {size(total)} are needed and {size(free)} are free in main memory")


def _look_at_reward(loaded: LoadedRecipe, task: Task[Example] | None, report: Report) -> None:
    for setting, source in scorer_sources(loaded.recipe, loaded.base).items():
        report.say(setting, [source])
    function = reward_function(loaded.recipe, loaded.base, task)
    if function is None or task is None or not loaded.recipe.has_policy:
        return
    rows = task.train[:2]
    answers = [rows[0].completion or "", *("" for _ in rows[1:])]
    prompts: list[Text] = [row.prompt if isinstance(row.prompt, str) else list(row.prompt) for row in rows]
    replies: list[Text] = [
        answer if isinstance(row.prompt, str) else [{"role": "assistant", "content": answer}]
        for row, answer in zip(rows, answers, strict=True)
    ]
    names = sorted(set[str]().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    scores = check_function(function, loaded.recipe.reward, prompts, replies, columns)
    report.say("reward", [f"{function}", *map(_scored, rows, answers, scores)])


def _scored(row: Example, answer: str, score: Score) -> str:
    value = f"{score.value:g}" if score.value is not None else score.outcome
    return f"{shown(row.key)} answered with {shown(answer)}: {value}"


def _look_at_run(loaded: LoadedRecipe, task: Task[Example] | None, report: Report) -> None:
    path = Path(loaded.recipe.run.dir or ".")
    report.say("run directory", [run_state(path)])
    if task is not None and (path / layout.CONFIG).is_file():
        require_same_config(path, resolved(loaded.recipe, task), FREE_TO_CHANGE)


def run_state(path: Path) -> str:
    """What a run would find in its directory.

    Raises:
        RunDirectoryError: something else is there.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return f"{path}: new"
    if not layout.is_run_directory(path):
        raise RunDirectoryError(
            f"{path} exists and is not a run directory",
            why="a run mixes with nothing that it did not make",
            fix="choose another one with --dir",
        )
    if (path / layout.FINISHED).is_file():
        return f"{path}: finished; --fresh sets it aside and begins anew"
    folder = path / layout.CHECKPOINTS
    found = [_CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    steps = [int(match[1]) for match in found if match]
    if not steps:
        return f"{path}: begun and without a checkpoint; begins again"
    return f"{path}: resumes after step {max(steps)}"
