"""Run: make the steps of a plan, and write them into the run directory.

    checkpoint ─> learners, buffers ─┐
    reset(seed, step) ─> actors ─────┴─ plan ─ an item, a step ─> metrics, evaluation ─ checkpoint ─┐
        ^                                                                                           │
        └───────────────────────────────────────────────────────────────────────────────────────────┘

After a checkpoint, every environment begins a new episode with a seed from the run's seed and the step, and
a plan is built anew, in runs that never stop too. So a resumed run makes the steps of an undisturbed one.
Plans that take fragments as they come depend on time: their episodes go on after a checkpoint.

Loop (in the main thread)
    consumes      items of the plan
    waits for     the plan
    produces      lines and checkpoints of the run directory
    shuts down    first signal: after the present step. Plans that take fragments as they come write a
                  checkpoint; others do not, because one outside the cadence would change the steps that
                  follow. Second signal: at once. Error: the same, if the learners are as after the last step
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rillflow.app.plugin_recipe import OpenRun
from rillflow.controller.cadence import is_due
from rillflow.controller.interrupt import RunStage
from rillflow.controller.run_checkpoint import save_in
from rillflow.errors import Interrupted
from rillflow.records.metrics import Mean
from rillflow.runs.reader import RankSpan, SpanRecord
from rillflow_classic.build import Parts, open_system
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.run_evaluations import RunEvaluations
from rillflow_classic.running_plan import RunningPlan
from rillflow_classic.schedule import spent
from rillflow_classic.seeds import seed_of
from rillflow_classic.sizes import require_sizes
from rillflow_classic.workers.population import PopulationSystem, open_population

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.graph.graph import Graph
    from rillflow_classic.recipe import LoadedClassicRecipe


def look_at_environment(loaded: LoadedClassicRecipe, report: Report) -> None:
    """Make one environment and the learners, and compare the sizes of what holds fragments.

    Raises:
        RillflowError: an environment cannot be made, the network does not fit it, or a buffer, a batch or a
            minibatch does not fit the fragments.
    """
    parts = Parts.of(loaded)
    require_sizes(parts)
    spaces = {"observations": parts.observation_space, "actions": parts.action_space}
    report.say("environment", [f"{name}: {space}" for name, space in spaces.items()])
    parts.learners()


def drawn(loaded: LoadedClassicRecipe) -> Graph:
    """Return the plan of a recipe as a graph; actors are made, and nothing runs."""
    with ExitStack() as stack:
        plan: Any = loaded.algorithm.plan(open_system(Parts.of(loaded), stack), loaded.settings)
        plan.check()
        found: Graph = plan.graph(loaded.phase)
        return found


class ClassicLoop:
    """The steps of a run.

    Args:
        loaded: the recipe.
        run: the open run.
    """

    def __init__(self, loaded: LoadedClassicRecipe, run: OpenRun) -> None:
        self._recipe, self._run, self._directory = loaded.recipe, run, run.directory
        self._name, self._steps = loaded.phase, loaded.steps
        self._is_in_step = loaded.algorithm.is_in_step
        self._seed, self._evaluation = self._recipe.run.seed, self._recipe.evaluate
        if self._recipe.run.threads:
            torch.set_num_threads(self._recipe.run.threads)
        self._parts = parts = Parts.of(loaded)
        population = self._recipe.population
        self._plan: RunningPlan | PopulationSystem = (
            open_population(parts, population, run.stack) if population else RunningPlan(parts, run.stack)
        )
        self._is_spent = False
        self._evaluations = RunEvaluations(loaded, run, parts, self._plan)
        self._has_episodes: bool | None = None

    def run(self) -> None:
        """Make the remaining steps.

        Raises:
            Interrupted: the user asked to stop.
        """
        step = 0
        if self._run.checkpoint is not None:
            self._plan.kept.read(self._run.checkpoint)
            step = self._run.checkpoint.step
        if step == 0 or (step < self._steps and is_due(step, self._evaluation.every)):
            self._evaluations.evaluate(step)
        self._run.interruption.stage, self._run.interruption.end = RunStage.TRAINING, ""
        self._plan.reset(seed_of(self._seed, step))
        with self._rescued(step):
            while step < self._steps:
                step = self._until_checkpoint(step)
        if self._has_episodes is False:
            self._run.progress.note(
                "no episode has ended in training: environment.time_limit cuts episodes, and all begin anew "
                f"after each checkpoint (run.checkpoint_every is {self._recipe.run.checkpoint_every})"
            )
        self._evaluations.close_environments()
        if not self._evaluations.evaluate(step):
            raise self._stopped(step, step)
        if self._evaluation.video:
            self._evaluations.record(step)

    def _until_checkpoint(self, kept: int) -> int:
        """Make the steps from one checkpoint to the next, and return its step."""
        every, asked = self._recipe.run.checkpoint_every, self._run.interruption
        last = min(self._steps, kept - kept % every + every)
        for step in range(kept + 1, last + 1):
            self._step(step)
            self._made, self._versions = step, self._learned()
            self._note_spent(step)
            if is_due(step, self._evaluation.every) and step < self._steps:
                self._evaluations.evaluate(step)
            if asked.requested and step < last:
                if not self._is_in_step:
                    self._save(step)
                raise self._stopped(step, kept if self._is_in_step else step)
        self._save(last)
        if asked.requested and last < self._steps:
            raise self._stopped(last, last)
        if self._is_in_step and last < self._steps:
            self._plan.reset(seed_of(self._seed, last))
        return last

    @contextmanager
    def _rescued(self, kept: int) -> Iterator[None]:
        """Save the last step of a plan without cadence when an error ends the run, before any message."""
        self._made = self._saved = kept
        try:
            yield
        except Interrupted:
            raise
        except Exception:
            if not self._is_in_step and self._made > self._saved and self._versions == self._learned():
                with suppress(Exception):  # the first error ends the run
                    self._save(self._made)
            raise

    def _learned(self) -> dict[str, int]:
        """Return the version of each learner's weights."""
        return {name: learner.version for name, learner in self._plan.learners.items()}

    def _step(self, step: int) -> None:
        began_s, elapsed_s = time.perf_counter(), self._directory.elapsed_s()
        found, context = self._plan.step(), self._plan.context
        took_s = time.perf_counter() - began_s
        # no mean of nothing, such as the return in a step in which no episode ended
        metrics = {name: each for name, each in found.items() if not isinstance(each, Mean) or each.count}
        self._has_episodes = self._has_episodes or any("episode/return" in name for name in metrics)
        self._directory.log_metrics(step, self._name, metrics)
        for span in spans_of(context, step, began_s, took_s, elapsed_s):
            self._directory.log_span(span)
        self._run.progress.step(self._name, step, metrics, took_s)
        for note in context.notes:
            self._run.progress.note(f"step {step}: {note}")
        context.notes.clear()
        for judged in self._plan.evaluations():
            self._directory.log_evaluation(step, judged)
            self._run.progress.note(f"step {step}: version {judged.more['version']}, {judged.text}")

    def _note_spent(self, step: int) -> None:
        """Say once that the learning rate is 0 while steps remain."""
        if not self._is_spent and (note := spent(self._parts.settings, self._versions, step, self._steps)):
            self._is_spent = True
            self._run.progress.note(f"step {step}: {note}")

    def _save(self, step: int) -> None:
        states = dict[str, Any]()

        def write(folder: Path) -> Mapping[str, Any]:
            states.update(self._plan.kept.write(folder))
            return {}

        state = {"step": step, "objects": states}
        save_in(self._directory, step, write, state, self._recipe.run.keep_checkpoints)
        self._saved = step

    def _stopped(self, step: int, kept: int) -> Interrupted:
        again = f"; steps {kept + 1} to {step} are repeated" if kept < step else ""
        return Interrupted(
            f"stopped after step {step}, as requested{self._run.interruption.by}",
            why=f"everything up to step {kept} is saved{again} (run.checkpoint_every)",
            fix="run the same command to resume",
        )


def spans_of(
    context: PlanContext, step: int, began_s: float, took_s: float, elapsed_s: float
) -> Iterator[SpanRecord]:
    """Yield the spans of a step: the wait for the actors, and a stage for each operator of the plan.

    Args:
        context: the plan's; it has the work of the operators.
        step: number of the step.
        began_s: start of the step on the operators' clock.
        took_s: duration of the step.
        elapsed_s: start of the step in seconds of the run.
    """
    work = {f"plan.{label}": (each.began_s, each.spent_s) for label, each in context.take_work().items()}
    waited_s = max(0.0, took_s - sum(spent_s for _, spent_s in work.values()))
    for stage, (start_s, spent_s) in {"actors.wait": (began_s, waited_s), **work}.items():
        from_s = elapsed_s + max(0.0, start_s - began_s)
        rank = RankSpan(rank=0, start_s=from_s, duration_s=spent_s, rows=0, tokens=0)
        yield SpanRecord.of_ranks([rank], 1, step=step, stage=stage, pool="controller", after=())
