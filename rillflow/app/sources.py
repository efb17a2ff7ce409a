"""Preflight: find the rows, models and functions that a recipe names.

recipe ─ open_rows, model_source, scorer_sources, reward_functions, cost_functions ─> rows, models, functions
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

from rillflow.app.recipe import Recipe
from rillflow.app.trained import model_directory
from rillflow.errors import ConfigError, DataError, ModelError
from rillflow.models.locate import base_of, locate
from rillflow.rewards.config import JudgeConfig
from rillflow.rewards.function import FunctionPath, parse_files, parse_function
from rillflow.rewards.judge_prompt import KEPT, no_frame
from rillflow.runs import layout
from rillflow.tasks.example import Example, shown
from rillflow.tasks.files import Rows
from rillflow.tasks.task import Task, open_task, read_sets


@dataclass(frozen=True, kw_only=True)
class Given:
    """Rows and rewards that a Python program passes in place of the recipe's."""

    rows: Rows | None = None
    """Prompts, or rows as in a file."""
    reward: tuple[FunctionPath, ...] = ()
    """Reward functions with their source text; their weighted sum is the reward."""


NOTHING = Given()
JUDGE = "reward.judge.model"
"""Setting that names a judge."""


def open_rows(recipe: Recipe, base: Path, drawn: int | None = None, given: Given = NOTHING) -> Task:
    """Return the recipe's or the given rows, of the kind of data that the algorithm trains on.

    See ``open_task`` for ``drawn``.

    Raises:
        DataError: the source is unknown or its data cannot be used.
    """
    kind = recipe.chosen.data
    task = open_task(recipe.task, kind, base=base, seed=recipe.run.seed, drawn=drawn, rows=given.rows)
    task = replace(task, sets=read_sets(recipe.evaluate.sets, base, kind))
    _require_numbers(task, recipe.algorithm.columns)
    return replace(task, reward=given.reward) if given.reward else task


def _require_numbers(task: Task, columns: Sequence[str]) -> None:
    """Refuse rows without a finite number in a column that the algorithm reads as a number."""
    for row, name in ((row, name) for row in (*task.train, *task.held_out) for name in columns):
        value = row.columns.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            has = f"has {shown(value)}" if name in row.columns else "is missing"
            raise DataError(
                f"the column {name!r} of {row} {has}",
                why=f"algorithm.{name} reads a number in every row",
                fix=f"write it, 0 where nothing is known, or algorithm.{name} = false",
            )


def model_source(recipe: Recipe, base: Path) -> str | None:
    """Return the directory or hub name of an existing model, or of an adapter's base; None for a new model.

    Raises:
        ModelError: there is no such model.
    """
    path = recipe.policy.model.path
    return None if path is None else base_of(_existing("policy.model.path", path, base))


def scorer_sources(recipe: Recipe, base: Path) -> dict[str, str]:
    """Return the directories or hub names of the models that score, by setting; see ``scorer_source``."""
    named = {"reward.model": recipe.reward.model, "cost.model": recipe.cost.model}
    found = {
        setting: scorer_source(setting, path, base) for setting, path in named.items() if path is not None
    }
    if recipe.reward.judge is not None:
        found[JUDGE] = judge_source(recipe.reward.judge, base)
    return found


def critic_source(recipe: Recipe, base: Path) -> str | None:
    """Return the directory or hub name that the critic starts from; None to start from the policy.

    Raises:
        ModelError: there is no such model.
    """
    path = recipe.critic.path
    return None if path is None else _existing("critic.path", path, base)


def judge_source(judge: JudgeConfig, base: Path) -> str:
    """Return the directory or hub name of a judge; for a run, its newest judge.

    Raises:
        ModelError: there is no such model.
        RunDirectoryError: the run has no judge yet.
        ConfigError: neither the recipe nor the judge's directory has a frame.
    """
    source = scorer_source(JUDGE, judge.model, base, role="judge")
    settings = Path(base_of(source)) / "config.json"
    if judge.frame is None and settings.is_file() and KEPT not in json.loads(settings.read_bytes()):
        raise no_frame(judge.model)
    return source


def scorer_source(setting: str, path: str, base: Path, role: str = "reward_model") -> str:
    """Return the directory or hub name of a model that scores; for a run, the newest model of a role.

    Raises:
        ModelError: there is no such model.
        RunDirectoryError: the run has no model of this role yet.
    """
    folder = base / Path(path).expanduser()
    if layout.is_run_directory(folder):
        return str(model_directory(folder, role).resolve())
    return _existing(setting, path, base)


def _existing(setting: str, path: str, base: Path) -> str:
    """Return the location of an existing model."""
    try:
        source = locate(path, base)
    except ModelError as error:
        if Path(path).exists():
            hint = f"paths are relative to the recipe's folder; the one you mean is {Path(path).resolve()}"
            raise ModelError(error.what, why=error.why, fix=hint) from error
        raise
    model = base_of(source)
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ModelError(
            f"{setting} is {path!r}",
            why=f"{model} has no config.json",
            fix="name the directory of a Hugging Face model",
        )
    return source


def reward_functions(recipe: Recipe, base: Path, task: Task | None) -> tuple[FunctionPath, ...]:
    """Return the reward functions: the recipe's, or else the task's own; empty if there are none.

    Raises:
        RewardError: there is no such function.
        ConfigError: neither the recipe nor the task names one.
    """
    files = parse_files(recipe.reward.files, base, "reward.files")
    if recipe.reward.function is not None:
        return (replace(parse_function(recipe.reward.function, base), files=files),)
    is_model = recipe.reward.model is not None or recipe.reward.judge is not None
    if task is not None and not task.reward and not is_model and "reward" in recipe.roles:
        raise ConfigError(
            "reward.function is missing",
            why=f"{task.name} has no scorer of its own",
            fix='write [reward] function = "reward.py:name"',
        )
    return () if task is None else tuple(replace(function, files=files) for function in task.reward)


def cost_functions(recipe: Recipe, base: Path) -> tuple[FunctionPath, ...]:
    """Return the function that computes a row's cost; empty if a model does, or if no cost is used.

    Raises:
        RewardError: there is no such function.
        ConfigError: the algorithm bounds a cost, and the recipe names neither function nor model.
    """
    text = recipe.cost.function
    if text is None and recipe.cost.model is None and "cost" in recipe.roles:
        raise ConfigError(
            "cost.function and cost.model are not set",
            why=f"{recipe.algorithm.name} bounds a cost, and nothing says what a row costs",
            fix='write cost.function = "cost.py:name", relative to the recipe',
        )
    if text is None or recipe.cost.model is not None:
        return ()
    files = parse_files(recipe.reward.files, base, "reward.files")
    return (replace(parse_function(text, base), files=files),)


def agent_function(recipe: Recipe, base: Path) -> FunctionPath | None:
    """Return the agent function that writes rows; None if the recipe names none.

    Raises:
        RewardError: there is no such function.
        ConfigError: a package that serves the policy to the agent is not installed.
    """
    agent = recipe.rollout.agent
    if agent is None:
        return None
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        raise ConfigError(
            f"rollout.agent.function is {agent.function!r}, and starlette or uvicorn is not installed",
            why="an agent asks the policy over HTTP",
            fix="pip install 'rillflow[service]'",
        )
    files = parse_files(agent.files, base, "rollout.agent.files")
    return replace(parse_function(agent.function, base, "agent"), files=files)


def prompt_length(example: Example) -> int:
    """Return the characters of a prompt; for a conversation, of all its messages."""
    if isinstance(example.prompt, str):
        return len(example.prompt)
    return sum(len(turn.get("content", "")) for turn in example.turns)
