"""Run: make the steps of a plan, and write the run directory as for every other run.

    checkpoint ─> learners, buffers ─┐
    reset(seed, step) ─> actors ─────┴─ plan ─ an item, a step ─> metrics, evaluation ─ checkpoint ─┐
        ^                                                                                           │
        └───────────────────────────────────────────────────────────────────────────────────────────┘

After a checkpoint every environment begins anew with a seed of the run's seed and the step, and the plan is
built anew, also in a run that is never stopped. So a resumed run makes the steps of an uninterrupted one.

Loop (in the main thread)
    consumes      items of the plan
    waits for     the plan
    produces      lines and checkpoints of the run directory
    shuts down    first signal: after the present step, without a checkpoint of its own, because one outside
                  the cadence would change the steps that follow; second signal: at once
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rillflow.app.launch import carry_out, say_summary
from rillflow.config.problems import together
from rillflow.controller.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from rillflow.controller.interrupt import Interruption, RunStage
from rillflow.errors import Interrupted, RillflowError
from rillflow.records.metrics import Mean, Metrics
from rillflow.runs import layout
from rillflow.runs.environment import environment
from rillflow.runs.progress import Progress
from rillflow.runs.reader import RankSpan, SpanRecord, best_checkpoint, read_evaluations, read_metrics
from rillflow.runs.run_directory import RunDirectory, set_aside
from rillflow.runs.summary import Summary, summarise
from rillflow_classic.build import EnvironmentStatistics, Parts, open_system
from rillflow_classic.environments.make import make_environment, make_video_environment
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.evaluation import GreedyPlayer, judged_episodes, num_slots, play
from rillflow_classic.operators.context import OperatorWork, PlanContext
from rillflow_classic.video import record_video
from rillflow_classic.workers.population import PopulationSystem, open_population

if TYPE_CHECKING:
    from rillflow.graph.graph import Graph
    from rillflow.runs.trackers.process import Trackers
    from rillflow_classic.algorithm import System
    from rillflow_classic.recipe import LoadedClassicRecipe

MAY_CHANGE = (
    *("algorithm.steps", "environment.run", "environment.processes", "environment.step_timeout_s"),
    "workers.threads",
    *(f"run.{name}" for name in ("dir", "tags", "threads", "keep_checkpoints", "trackers")),
    *(f"evaluate.{name}" for name in ("every", "episodes", "success", "video")),
)
"""Settings that a resumed run may change: they do not change its steps."""
EVALUATED = 1
"""Added to the seed of an evaluation's episodes."""


def launch(
    loaded: LoadedClassicRecipe,
    *,
    fresh: bool = False,
    quiet: bool = False,
    command: Sequence[str] = (),
    told: Callable[[str, int, Metrics], None] | None = None,
    interruption: Interruption | None = None,
) -> Summary:
    """Run a recipe to its end, from the newest checkpoint if there is one; see ``rillflow.app.launch``.

    Raises:
        RillflowError: an error that a user can fix; it states the problem, the reason and the fix.
        Interrupted: the user asked to stop; the same command resumes.
    """
    path, recipe = loaded.directory, loaded.recipe
    with interruption or Interruption() as asked, asked.orderly(), ExitStack() as stack:
        if not loaded.is_finished or fresh:
            problems = loaded.check().problems
            if problems:
                raise together(problems, str(loaded.path))
        if fresh:
            set_aside(path)
        run = stack.enter_context(
            RunDirectory.open(path, recipe.model_dump(mode="json"), may_change=MAY_CHANGE)
        )
        steps = {loaded.algorithm.name: recipe.steps}
        progress = stack.enter_context(Progress(total_steps=steps, quiet=quiet, told=told))
        train = None if loaded.is_finished else partial(_train, loaded, run, progress, asked, command)
        carry_out(train, run, progress, asked, recipe.run.trackers, loaded.base)
        summary = summarise(path)
    if not quiet:
        say_summary(summary, path)
    return summary


def drawn(loaded: LoadedClassicRecipe) -> Graph:
    """Return the plan of a recipe as a graph; actors are made, and nothing runs."""
    with ExitStack() as stack:
        system = open_system(Parts.of(loaded), stack)
        plan: Any = loaded.algorithm.plan(system, loaded.settings)
        plan.check()
        found: Graph = plan.graph(loaded.algorithm.name)
        return found


def _train(
    loaded: LoadedClassicRecipe,
    run: RunDirectory,
    progress: Progress,
    asked: Interruption,
    command: Sequence[str],
    trackers: Trackers,
) -> None:
    run.evidence.remove(layout.FINISHED)
    checkpoint = latest_checkpoint(run.checkpoints, run.id)
    kept = checkpoint.step if checkpoint else 0
    lost = max((record.step for record in read_metrics(run.path)), default=0) - kept
    run.rewind(kept if checkpoint else -1)
    again = f"; {lost} steps without a checkpoint are repeated" if lost > 0 else ""
    if checkpoint:
        progress.note(f"resuming after step {kept} from {checkpoint.path}{again}")
    elif again:
        progress.note(f"starting again{again}")
    for change in run.changes:
        progress.note(f"changed: from step {kept + 1} on, {change.key}: {change.old!r} -> {change.new!r}")
    start: dict[str, Any] = {"base": str(loaded.base.absolute()), "after_step": kept}
    start["placement"] = loaded.recipe.workers.model_dump(mode="json")
    run.log_start({**environment(device="cpu", command=command), **start})
    trackers.start()
    try:
        with ExitStack() as stack:
            if loaded.recipe.run.threads:
                torch.set_num_threads(loaded.recipe.run.threads)
            parts = Parts.of(loaded)
            population = loaded.recipe.population
            system = open_population(parts, population, stack) if population else open_system(parts, stack)
            ClassicLoop(loaded, parts, run, progress, asked, system).run(checkpoint)
    except RillflowError as error:
        error.is_underway = True
        raise
    run.write_json(layout.FINISHED, {"steps": loaded.recipe.steps})


class ClassicLoop:
    """The steps of a run.

    Args:
        loaded: the recipe.
        parts: what workers are made from.
        run: the open run directory.
        progress: the display for the user.
        asked: tells whether the user wants to stop.
        system: the workers.
    """

    def __init__(
        self,
        loaded: LoadedClassicRecipe,
        parts: Parts,
        run: RunDirectory,
        progress: Progress,
        asked: Interruption,
        system: System | PopulationSystem,
    ) -> None:
        self._loaded, self._recipe, self._run_directory = loaded, loaded.recipe, run
        self._progress, self._asked, self._system, self._parts = progress, asked, system, parts
        settings = parts.environment
        is_normalised = settings.normalise_observations or settings.normalise_rewards
        self._statistics = EnvironmentStatistics(system) if is_normalised else None
        self._name, self._steps = loaded.algorithm.name, self._recipe.steps
        self._evaluated = {record.step for record in read_evaluations(run.path)}

    def run(self, checkpoint: Checkpoint | None) -> None:
        """Make the remaining steps.

        Raises:
            Interrupted: the user asked to stop.
        """
        system, step = self._system, 0
        for name, learner in system.learners.items():
            system.kept.keep(name, lambda learner=learner: learner)  # type: ignore[misc]
        if self._statistics is not None:
            statistics = self._statistics
            system.kept.keep("environments", lambda: statistics)
        if checkpoint is not None:
            system.kept.read(checkpoint)
            step = checkpoint.step
        else:
            self._evaluate(0)
        self._asked.stage = RunStage.TRAINING
        while step < self._steps:
            step = self._until_checkpoint(step)
        self._evaluate(step)
        if self._recipe.evaluate.video:
            self._record(step)

    def _until_checkpoint(self, step: int) -> int:
        """Make steps up to the next checkpoint, and return its step."""
        every = self._recipe.run.checkpoint_every
        last = min(self._steps, step - step % every + every)
        self._system.reset(seed_of(self._recipe.run.seed, step))
        if isinstance(self._system, PopulationSystem):
            plan: Any = self._system.plan()
        else:
            plan = self._loaded.algorithm.plan(self._system, self._loaded.settings)
        context = PlanContext()
        items = plan.run(context)
        while step < last:
            began_s, elapsed_s = time.perf_counter(), self._run_directory.elapsed_s()
            metrics, step = counted({**next(items), **context.take_metrics()}), step + 1
            took_s = time.perf_counter() - began_s
            self._run_directory.log_metrics(step, self._name, metrics)
            for span in spans_of(context.take_work(), step, began_s, took_s, elapsed_s):
                self._run_directory.log_span(span)
            self._progress.step(self._name, step, metrics, took_s)
            for note in context.notes:
                self._progress.note(f"step {step}: {note}")
            context.notes.clear()
            for found in self._system.evaluations() if self._recipe.evaluate.from_training else ():  # type: ignore[union-attr]
                self._run_directory.log_evaluation(step, found)
                self._progress.note(f"step {step}: version {found.more['version']}, {found.text}")
            evaluate_every = self._recipe.evaluate.every
            if evaluate_every and step % evaluate_every == 0:
                self._evaluate(step)
            if self._asked.requested and step < last:
                raise self._stopped(step)
        del items
        self._save(step)
        if self._asked.requested and step < self._steps:
            raise self._stopped(step)
        return step

    def _save(self, step: int) -> None:
        run, states = self._run_directory, dict[str, Any]()
        run.require_lock()
        run.evidence.flush()  # a resume from this checkpoint goes on after these lines
        best = best_checkpoint(run.path)

        def write(folder: Path) -> Mapping[str, Any]:
            states.update(self._system.kept.write(folder))
            return {}

        state = {"step": step, "objects": states}
        spared = None if best is None else best.step
        keep = self._recipe.run.keep_checkpoints
        save_checkpoint(run.checkpoints, step, write, state, keep, run=run.id, spare=spared)
        run.evidence.of_checkpoint(step)

    def _stopped(self, step: int) -> Interrupted:
        kept = max(layout.kept_steps(self._run_directory.checkpoints), default=0)
        again = f"; steps {kept + 1} to {step} are repeated" if kept < step else ""
        return Interrupted(
            f"stopped after step {step}, as requested",
            why=f"everything up to step {kept} is saved{again} (run.checkpoint_every)",
            fix="run the same command to resume",
        )

    def _evaluate(self, step: int) -> None:
        settings = self._recipe.evaluate
        if not settings.episodes or step in self._evaluated:
            return
        slots = num_slots(settings.episodes)
        with self._player(slots, step) as (player, environment):
            played = play(player, environment.num_slots, settings.episodes // slots)
        found = judged_episodes(played, settings.success)
        self._run_directory.log_evaluation(step, found)
        self._evaluated.add(step)
        self._progress.note(f"step {step}: {found.text}")

    def _record(self, step: int) -> None:
        with self._player(1, step, show=True) as (player, environment):
            file = record_video(player, environment, self._run_directory.path, f"episode-after-step-{step}")
        if file is None:
            self._progress.note(f"{self._recipe.environment.id} shows no pictures, so there is no video")

    @contextmanager
    def _player(
        self, slots: int, step: int, *, show: bool = False
    ) -> Iterator[tuple[GreedyPlayer, VectorEnvironment]]:
        """Yield a player of the present weights, with its environment."""
        seed = seed_of(self._recipe.run.seed, step, EVALUATED)
        settings = self._parts.environment
        if show:
            environment = make_video_environment(settings, seed=seed)
        else:
            environment = make_environment(settings, slots, seed=seed)
        if self._statistics is not None:
            environment.restore(self._statistics.newest(), frozen=True)
        policies = {name: learner.policy for name, learner in self._system.learners.items()}
        try:
            yield GreedyPlayer(environment, policies, self._parts.routes, seed), environment
        finally:
            environment.close()


def spans_of(
    work: Mapping[str, OperatorWork], step: int, began_s: float, took_s: float, elapsed_s: float
) -> list[SpanRecord]:
    """Return the spans of a step: a stage for each operator, and the wait for the actors between them.

    Args:
        work: work of the operators.
        step: number of the step.
        began_s: start of the step on the operators' clock.
        took_s: duration of the step.
        elapsed_s: start of the step in seconds of the run.
    """
    waited_s = max(0.0, took_s - sum(each.spent_s for each in work.values()))
    found = {"actors.wait": OperatorWork(began_s=began_s, spent_s=waited_s)}
    found |= {f"plan.{label}": each for label, each in work.items()}
    spans = []
    for stage, each in found.items():
        start_s = elapsed_s + max(0.0, each.began_s - began_s)
        rank = RankSpan(rank=0, start_s=start_s, duration_s=each.spent_s, rows=0, tokens=0)
        spans.append(SpanRecord.of_ranks([rank], 1, step=step, stage=stage, pool="controller", after=()))
    return spans


def counted(metrics: Metrics) -> Metrics:
    """Leave out the means of nothing, such as the return in a step in which no episode ended."""
    return {name: each for name, each in metrics.items() if not (isinstance(each, Mean) and not each.count)}


def seed_of(*parts: int) -> int:
    """Return a seed below 2^31 made of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)
