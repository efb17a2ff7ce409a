"""Preflight: what a recipe names and must be there, looked at before anything heavy is imported.

recipe ─ require_ready ──> model and reward function are there
+ task ─ require_usable ─> its rows can be scored, learnt from, and fit into the context
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rillflow.algorithms.algorithm import Data
from rillflow.assembly.recipe import LoadedRecipe, Recipe
from rillflow.config.problems import shown, together
from rillflow.errors import ConfigError, DataError, ModelError, RillflowError
from rillflow.models.locate import locate
from rillflow.rewards.function import FunctionPath, parse_function
from rillflow.tasks.example import Example
from rillflow.tasks.task import Task


def require_ready(loaded: LoadedRecipe) -> None:
    """Raise ConfigError with everything the recipe names that is not there."""
    recipe, base = loaded.recipe, loaded.base
    _require([lambda: model_source(recipe, base), lambda: reward_function(recipe, base)], str(loaded.path))


def require_usable(recipe: Recipe, base: Path, task: Task[Example]) -> None:
    """Raise ConfigError with every reason why the recipe cannot use its task's rows."""
    looks = [
        lambda: reward_function(recipe, base, task),
        lambda: require_answers(recipe, task),
        lambda: require_room(recipe, task),
    ]
    _require(looks, f"the task {task.name}")


def _require(looks: Sequence[Callable[[], object]], title: str) -> None:
    problems: list[RillflowError] = []
    for look in looks:
        try:
            look()
        except RillflowError as error:
            problems.append(error)
    if problems:
        raise together(problems, title)


def model_source(recipe: Recipe, base: Path) -> str | None:
    """The directory or hub name of an existing model; None for a new one.

    Raises:
        ModelError: there is no such model.
    """
    path = recipe.policy.model.path
    if path is None:
        return None
    try:
        source = locate(path, base)
    except ModelError as error:
        if Path(path).exists():
            hint = f"paths are relative to the recipe's folder; the one you mean is {Path(path).resolve()}"
            raise ModelError(error.what, why=error.why, fix=hint) from error
        raise
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ModelError(
            f"policy.model.path is {path!r}",
            why=f"{source} has no config.json",
            fix="name the directory of a Hugging Face model",
        )
    return source


def reward_function(recipe: Recipe, base: Path, task: Task[Example] | None = None) -> FunctionPath | None:
    """The function that scores: the recipe's, or else the task's own; None where only the task could tell.

    Raises:
        RewardError: there is no such function.
        ConfigError: neither the recipe nor the task names one.
    """
    text = recipe.reward.function
    if text is None and task is not None:
        text = task.reward
        if text is None:
            raise ConfigError(
                "reward.function is missing",
                why=f"{task.name} has no scorer of its own",
                fix='write [reward] function = "reward.py:name"',
            )
    return None if text is None else parse_function(text, base)


def require_answers(recipe: Recipe, task: Task[Example]) -> None:
    """Where there are supervised steps, every row to train on has an answer to learn."""
    algorithm, config = recipe.chosen, recipe.algorithm
    asking = ["warm_start"] if recipe.warm_start is not None else []
    if algorithm.data is Data.DEMONSTRATIONS:
        asking.append(f"algorithm.name = {config.name}")
    if algorithm.beside(config) is Data.DEMONSTRATIONS:
        asking.append(f"{config.name} with demonstrations beside its prompts (algorithm.pretrain_weight)")
    if not asking:
        return
    silent = [example for example in task.train if example.completion is None]
    if silent:
        raise DataError(
            f"{len(silent):,} of {len(task.train):,} prompts of {task.name} have no answer to learn from; "
            f"the first is {named(silent[0])}",
            why=f"{' and '.join(asking)} would learn the column 'completion', or else 'answer'",
            fix="add the column, or leave that out: --set warm_start=none, --set algorithm.pretrain_weight=0",
        )


def require_room(recipe: Recipe, task: Task[Example]) -> None:
    """A new model has a token for a character, so whether the longest prompt leaves room is known."""
    new, limit = recipe.policy.model.new, recipe.rollout.max_tokens
    longest = longest_of(task)
    if new is None or recipe.task.too_long == "drop" or prompt_length(longest) + limit <= new.context:
        return
    raise ConfigError(
        f"{named(longest)} has {prompt_length(longest)} characters",
        why=f"with rollout.max_tokens = {limit} it exceeds policy.model.new.context = {new.context}",
        fix='raise the context, lower rollout.max_tokens, or set task.too_long = "drop"',
    )


def longest_of(task: Task[Example]) -> Example:
    """The row with the longest prompt."""
    return max((*task.train, *task.held_out), key=prompt_length)


def prompt_length(example: Example) -> int:
    """Characters of a prompt; of a conversation, of all its messages."""
    if isinstance(example.prompt, str):
        return len(example.prompt)
    return sum(len(message["content"]) for message in example.prompt)


def named(example: Example) -> str:
    """A row for a message. Example: ``prompt 3 (from 0), "17+25="``."""
    return f"prompt {example.index} (from 0), {shown(example.key)}"
