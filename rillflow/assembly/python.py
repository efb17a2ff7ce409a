"""Python: a run from a program or a notebook, by the same way as the command's.

recipe, settings ─ load_recipe ─> Recipe ────┐
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
from rillflow.assembly.launch import launch
from rillflow.assembly.preflight import Given
from rillflow.assembly.recipe import LoadedRecipe, leaves, load_recipe
from rillflow.assembly.run import Run
from rillflow.errors import CallbackError, ConfigError, Interrupted, RewardError
from rillflow.observe.raised import innermost_line
from rillflow.pipeline.interrupt import Interruption
from rillflow.records.metrics import Metrics
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.source import shipped
from rillflow.tasks.files import ENDINGS, GIVEN, Rows

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a callback is given after a step."""

    step: int
    """The step, from 1 over all phases."""
    phase: str
    """The phase it belongs to."""
    metrics: Mapping[str, float]
    """Every metric's value by name."""
    run: Run
    """The run; ``run.stop()`` ends it after this step."""


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    prompts: str | Path | Rows | None = None,
    reward: str | Path | Function | Sequence[Function | tuple[Function, float]] | None = None,
    settings: Mapping[str, Any] | None = None,
    dir: str | Path | None = None,
    callbacks: Sequence[Callable[[StepResult], object]] = (),
    algorithms: Sequence[Algorithm] = (),
    fresh: bool = False,
    quiet: bool = False,
) -> Run:
    """Run a recipe to its end, or go on with the run that its directory holds.

    Args:
        recipe: a recipe's TOML file, or its sections as a dict.
        prompts: texts, conversations, rows with a column ``prompt``, a Hugging Face data set, or a file or
            task as ``task.source`` names them; without, the recipe's. Of rows none are held out unless
            ``settings`` asks for it, or a recipe that names no source of its own: what a recipe holds out
            belongs to its own source.
        reward: ``reward(prompts, completions, **columns)``, also one of a notebook's cell; several of them,
            or pairs with a weight, are summed; a text names one in a file. Without, the recipe's.
        settings: values by dotted keys over the recipe's, such as ``{"policy.lr": 1e-5}``.
        dir: the run directory, as ``run.dir``.
        callbacks: called after every step.
        algorithms: your own, which the recipe may name.
        fresh: move an older run of the directory aside instead of going on with it.
        quiet: show nothing.

    Raises:
        RillflowError: anything a user can mend, with what, why and what to do.
        CallbackError: a callback raised; the last whole step is saved.
        Interrupted: Ctrl-C; the same call goes on.
    """
    over, rows = dict(settings or {}), None if isinstance(prompts, str | Path) else prompts
    base = Path() if isinstance(recipe, Mapping) else Path(recipe).parent
    if prompts is not None:
        over["task.source"] = GIVEN if rows is not None else _relative(str(prompts), base)
    functions = () if reward is None or isinstance(reward, str | Path) else _functions(reward)
    if reward is not None:
        over["reward.function"] = None if functions else _relative(str(reward), base)
    _require_callable(callbacks)
    if dir is not None:
        over["run.dir"] = str(dir)
    loaded = load_recipe(recipe, over, algorithms)
    if rows is not None and not _holds_out(loaded, recipe):
        over |= {"task.held_out": 0, "task.held_out_source": None}
        loaded = load_recipe(recipe, over, algorithms)
    asked = Interruption()
    run = Run(Path(str(loaded.recipe.run.dir)), asked)
    try:
        given, told = Given(rows=rows, reward=functions), _Callbacks(callbacks, run)
        launch(
            loaded.recipe, loaded.base, fresh=fresh, quiet=quiet, given=given, told=told, interruption=asked
        )
    except Interrupted:
        if not run.is_stopped:
            raise
    return run


def _require_callable(callbacks: Sequence[object]) -> None:
    for number, callback in enumerate(callbacks, 1):
        if not callable(callback):
            raise ConfigError(
                f"callback {number} is {callback!r}",
                why="callbacks are called after every step with a StepResult",
                fix="give functions: callbacks=[my_function]",
            )


def _holds_out(loaded: LoadedRecipe, recipe: object) -> bool:
    """Whether a setting for held-out rows is meant for rows given in Python.

    One of ``settings`` is, and so is one of a dict that names no source. A recipe's others belong to its own.
    """
    is_bare = isinstance(recipe, Mapping) and "task.source" not in leaves(recipe)
    origins = {loaded.given.get(name) for name in ("task.held_out", "task.held_out_source")} - {None}
    return bool(origins) if is_bare else "--set" in origins


def _relative(named: str, base: Path) -> str:
    """A file that is named from the present folder, as a recipe in another one names it; a task as it is."""
    is_file = Path(named.rpartition(":")[0] or named).suffix in (*ENDINGS, ".py")
    return os.path.relpath(named, base) if is_file else named


def _functions(reward: Any) -> tuple[FunctionPath, ...]:
    several = reward if isinstance(reward, list | tuple) else [reward]
    pairs = [each if isinstance(each, tuple) else (each, 1.0) for each in several]
    found = tuple(shipped(function, weight) for function, weight in pairs)
    names = [each.name for each in found]
    if len(set(names)) < max(1, len(names)):
        why = "something has to score, and what each says is recorded by its name"
        raise RewardError(f"the rewards are called {names}", why, "give functions with names of their own")
    return found


class _Callbacks:
    """Calls every callback after every step, also those after one that raised."""

    def __init__(self, callbacks: Sequence[Callable[[StepResult], object]], run: Run) -> None:
        self._callbacks, self._run = callbacks, run

    def __call__(self, phase: str, step: int, metrics: Metrics) -> None:
        values = {name: metric.value for name, metric in metrics.items()}
        result = StepResult(step=step, phase=phase, metrics=values, run=self._run)
        errors: list[CallbackError] = []
        for callback in self._callbacks:
            try:
                callback(result)
            except Exception as error:  # noqa: BLE001  the supervision boundary: a callback may raise anything
                errors.append(_failure(callback, step, error))
        for later in errors[1:]:
            errors[0].add_note(f"and {later}")
        if errors:
            raise errors[0]


def _failure(callback: object, step: int, error: Exception) -> CallbackError:
    """What a callback raised, with its line."""
    name = callback.__qualname__ if inspect.isroutine(callback) else repr(callback)
    failure = CallbackError(
        f"the callback {name} failed after step {step}: {type(error).__name__}: {error}",
        why=innermost_line(error),
        fix="mend it, and give the same call again: it goes on from the last step that is saved",
    )
    failure.__cause__ = error
    return failure
