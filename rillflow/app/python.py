"""Python: start a run from a program or a notebook, with the same code as the command line.

recipe, settings ─ open_recipe ─> Resolved ──┐
prompts, reward ─> Given ────────────────────┼─ launch ─> run directory ─> Run
callbacks <─ StepResult, after every step ───┘
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.any_recipe import leaves
from rillflow.app.facts import Given
from rillflow.app.launch import launch
from rillflow.app.plugin_run import run_plugin_recipe
from rillflow.app.plugins import KIND
from rillflow.app.recipe import RecipeSource, load_recipe, open_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.run import Run
from rillflow.controller.interrupt import Interruption
from rillflow.errors import CallbackError, ConfigError, Interrupted, RewardError
from rillflow.records.metrics import Metrics
from rillflow.rewards.function import FunctionPath, is_url
from rillflow.rewards.source import shipped
from rillflow.runs.busy_machine import share_cores
from rillflow.runs.error_lines import innermost_line
from rillflow.runs.standard_streams import guarded_streams
from rillflow.tasks.files import ENDINGS, GIVEN, Rows
from rillflow.tasks.huggingface import HUB, relative_source

Reward: TypeAlias = Callable[..., Any] | str | Path
"""A function, or a text as in ``reward.function`` or ``reward.url``."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, which callbacks receive."""

    step: int
    """Number of the step, from 1 over all phases."""
    phase: str
    """Phase of the step."""
    metrics: Mapping[str, float]
    """Values of all metrics, by name."""
    run: Run
    """The run; ``run.stop()`` ends it after this step."""


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    prompts: str | Path | Rows | None = None,
    reward: Reward | Sequence[Reward | tuple[Reward, float]] | None = None,
    settings: Mapping[str, Any] | None = None,
    dir: str | Path | None = None,
    callbacks: Sequence[Callable[[StepResult], object]] = (),
    algorithms: Sequence[Algorithm] = (),
    fresh: bool = False,
    quiet: bool = False,
) -> Run:
    """Run a recipe to its end, or resume the run in its directory.

    Args:
        recipe: a recipe's TOML file, or its sections as a dict.
        prompts: texts, conversations, rows with a column ``prompt``, a Hugging Face data set, or a file or
            task as in ``task.source``; None for the recipe's. Given rows are held out only if ``settings``
            says so, or a recipe dict without a source of its own. The held-out settings of other recipes
            apply to their own source.
        reward: a function ``reward(prompts, completions, **columns)``, also one from a notebook cell. A list
            of functions, or of pairs with a weight, is summed. A text names one in a file, a built-in
            one, or a server's URL. None takes the recipe's.
        settings: values by dotted keys that override the recipe's, such as ``{"policy.lr": 1e-5}``.
        dir: the run directory; overrides ``run.dir``.
        callbacks: called after every step.
        algorithms: your own algorithms, which the recipe may name.
        fresh: move an older run of the directory aside instead of resuming it.
        quiet: show nothing.

    Raises:
        RillflowError: an error that a user can fix; it states the problem, the reason and the fix.
        CallbackError: a callback raised; the last whole step is saved.
        Interrupted: Ctrl-C; the same call resumes.
    """
    share_cores()
    over, rows = dict(settings or {}), None if isinstance(prompts, str | Path) else prompts
    base = Path() if isinstance(recipe, Mapping) else Path(recipe).parent
    _refuse(recipe, {"prompts": prompts, "reward": reward, "algorithms": algorithms or None})
    if prompts is not None:
        over["task.source"] = GIVEN if rows is not None else _relative(str(prompts), base)
    named, functions = _rewards(reward, base)
    over |= named if dir is None else {**named, "run.dir": str(dir)}
    opened, asked = open_recipe(recipe, over, algorithms), Interruption()
    if isinstance(opened, Resolved) and rows is not None and not _holds_out(opened, recipe):
        over |= {"task.held_out": 0, "task.held_out_source": None}
        opened = load_recipe(recipe, over, algorithms)
    run = Run(opened.directory, asked)
    how: Any = {"fresh": fresh, "quiet": quiet, "told": _Callbacks(callbacks, run), "interruption": asked}
    try:
        with guarded_streams(goes_on=True):
            if isinstance(opened, Resolved):
                launch(opened, given=Given(rows=rows, reward=functions), **how)
            else:
                run_plugin_recipe(opened, **how)
    except Interrupted:
        if not run.is_stopped:
            raise
    return run


def _refuse(recipe: str | Path | Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Refuse arguments about a language model for a recipe of another kind."""
    name = next((name for name, value in given.items() if value is not None), "")
    if name and KIND in RecipeSource.of(recipe, ()).data:
        raise ConfigError(
            f"{name} is given for {'a recipe' if isinstance(recipe, Mapping) else recipe} with a {KIND}",
            why="it is for recipes of language models",
            fix="leave it out",
        )


def _require_callable(callbacks: Sequence[object]) -> None:
    for number, callback in enumerate(callbacks, 1):
        if not callable(callback):
            raise ConfigError(
                f"callback {number} is {callback!r}",
                why="callbacks are called after every step with a StepResult",
                fix="give functions: callbacks=[my_function]",
            )


def _holds_out(loaded: Resolved, recipe: object) -> bool:
    """Return whether a setting for held-out rows applies to rows given in Python.

    It does in ``settings``, and in a dict that names no source. Others apply to the recipe's own source.
    """
    is_bare = isinstance(recipe, Mapping) and "task.source" not in dict(leaves(recipe))
    origins = {loaded.given.get(name) for name in ("task.held_out", "task.held_out_source")} - {None}
    return bool(origins) if is_bare else "--set" in origins


def _relative(named: str, base: Path) -> str:
    """Return a file relative to the recipe's folder, not the current one; a task's name stays unchanged."""
    if named.startswith(HUB):
        return relative_source(named, base)
    is_file = not is_url(named) and Path(named.rpartition(":")[0] or named).suffix in (*ENDINGS, ".py")
    return os.path.relpath(named, base) if is_file else named


def _rewards(reward: Any, base: Path) -> tuple[dict[str, Any], tuple[FunctionPath, ...]]:
    """Return the settings of the rewards that a recipe can name, and the functions."""
    if reward is None:
        return {}, ()
    several = reward if isinstance(reward, list | tuple) else [reward]
    if not several:
        raise RewardError(
            "the rewards have the names []", why="a run needs at least one reward", fix="give a function"
        )
    named, functions = dict[str, float](), list[FunctionPath]()
    for each in several:
        function, weight = each if isinstance(each, tuple) else (each, 1.0)
        if isinstance(function, str | Path):
            named[_relative(str(function), base)] = weight
        else:
            functions.append(shipped(function, weight))
    settings: dict[str, Any] = {"reward.function": None, "reward.functions": None, "reward.url": None}
    if len(several) == 1 and list(named.values()) == [1.0]:
        (one,) = named
        settings["reward.url" if is_url(one) else "reward.function"] = one
    elif named:
        settings["reward.functions"] = named
    return settings, tuple(functions)


class _Callbacks:
    """Caller of all callbacks after a step; an error in one does not skip the others."""

    def __init__(self, callbacks: Sequence[Callable[[StepResult], object]], run: Run) -> None:
        _require_callable(callbacks)
        self._callbacks, self._run = callbacks, run

    def __call__(self, phase: str, step: int, metrics: Metrics) -> None:
        values = {name: metric.value for name, metric in metrics.items()}
        result = StepResult(step=step, phase=phase, metrics=values, run=self._run)
        errors: list[CallbackError] = []
        for callback in self._callbacks:
            try:
                callback(result)
            except Exception as error:  # noqa: BLE001  a supervision boundary: callbacks may raise anything
                errors.append(_failure(callback, step, error))
        for later in errors[1:]:
            errors[0].add_note(f"and {later}")
        if errors:
            raise errors[0]


def _failure(callback: object, step: int, error: Exception) -> CallbackError:
    """Return the error for an exception in a callback, with its line."""
    name = callback.__qualname__ if inspect.isroutine(callback) else repr(callback)
    failure = CallbackError(
        f"the callback {name} failed after step {step}: {type(error).__name__}: {error}",
        why=innermost_line(error),
        fix="correct the callback and repeat the call; it resumes from the last saved step",
    )
    failure.__cause__ = error
    return failure
