"""Plugin run: run a recipe of a plugin's kind; it has the same directory, resume and report as other runs.

PluginRecipe ─ check ─> run directory ─ newest checkpoint ─> PluginRecipe.train(OpenRun) ─> summary, report
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from rillflow.app import launch
from rillflow.app.check import check_plugin_recipe
from rillflow.app.plugin_recipe import OpenRun, PluginRecipe
from rillflow.app.plugin_sections import as_kept, plugin_changes
from rillflow.config.problems import together
from rillflow.controller.interrupt import Interruption
from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Metrics
from rillflow.runs import layout
from rillflow.runs.environment import environment
from rillflow.runs.progress import Progress
from rillflow.runs.run_directory import RunDirectory, set_aside
from rillflow.runs.summary import Summary, summarise


def run_plugin_recipe(
    recipe: PluginRecipe,
    *,
    fresh: bool = False,
    quiet: bool = False,
    command: Sequence[str] = (),
    told: Callable[[str, int, Metrics], None] | None = None,
    interruption: Interruption | None = None,
) -> Summary:
    """Run a recipe to its end, from the newest checkpoint if there is one; see ``rillflow.app.launch``."""
    path, settings = recipe.directory, recipe.recipe.model_dump(mode="json")
    with interruption or Interruption() as asked, asked.orderly(), ExitStack() as stack:
        is_finished = recipe.is_finished and not fresh
        problems = () if is_finished else check_plugin_recipe(recipe).problems
        if problems:
            raise together(problems, str(recipe.path))
        if fresh:
            set_aside(path)
        may_change = (*recipe.may_change, *plugin_changes())
        directory = stack.enter_context(
            RunDirectory.open(path, as_kept(settings, recipe.recipe, path), may_change=may_change)
        )
        _require_no_fewer_steps(recipe)
        steps, log = {recipe.phase: recipe.steps}, path / layout.OUTPUT_LOG
        shown = stack.enter_context(Progress(total_steps=steps, quiet=quiet, told=told, log=log))

        def train() -> None:
            once = partial(_train, recipe, directory, shown, asked, command)
            launch.restarted(once, recipe.recipe.run.restarts, directory, shown, asked)

        watched = launch.observers_of(recipe.recipe, recipe.base, directory, shown)
        launch.carry_out(None if is_finished else train, directory, shown, asked, watched)
        summary = summarise(path)
    if not quiet:
        launch.say_summary(summary, path, recipe.suggested)
    return summary


def _require_no_fewer_steps(recipe: PluginRecipe) -> None:
    made = max(layout.kept_steps(recipe.directory / layout.CHECKPOINTS), default=0)
    if made > recipe.steps:
        raise RunDirectoryError(
            f"the recipe has {recipe.steps} steps, but {recipe.directory} has already made {made}",
            why="a resume cannot undo steps",
            fix="raise the number of steps, or choose another run directory",
        )


def _train(
    recipe: PluginRecipe,
    directory: RunDirectory,
    progress: Progress,
    asked: Interruption,
    command: Sequence[str],
    stack: ExitStack,
) -> None:
    checkpoint = launch.at_newest_checkpoint(directory, progress)
    after = checkpoint.step if checkpoint else 0
    start = environment(device="cpu", command=command)
    directory.log_start({**start, "base": str(recipe.base.absolute()), "after_step": after})
    directory.observers.start()
    opened = OpenRun(
        directory=directory, checkpoint=checkpoint, progress=progress, interruption=asked, stack=stack
    )
    with launch.underway():
        recipe.train(opened)
    directory.write_json(layout.FINISHED, {"steps": recipe.steps})
