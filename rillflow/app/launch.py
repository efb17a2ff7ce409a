"""Launch: run a checked recipe to its end, and write the run directory.

    recipe ─> task, run directory ─> build: model, roles, phases ─ loop ─> summary, report

It checks the data and the run directory before it imports anything heavy.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.facts import NOTHING, Given, RecipeFacts
from rillflow.app.planned import keep_plan
from rillflow.app.plugin_sections import as_kept, plugin_changes
from rillflow.app.plugins import installed, service
from rillflow.app.preflight_checks import require_sound
from rillflow.app.resolved import Resolved
from rillflow.app.resume import (
    MAY_CHANGE,
    after,
    drawn_from,
    fresher_steps,
    is_finished,
    keep_data,
    keep_sources,
    require_possible,
    run_config,
    shorter_phase,
    with_choices_of_run,
)
from rillflow.app.row_names import rows_named
from rillflow.app.standing import former_runs, kept_bases, standing_of
from rillflow.config.schema import Section
from rillflow.controller.checkpoint import Checkpoint, latest_checkpoint
from rillflow.controller.decisions import RecordedDecisions
from rillflow.controller.interrupt import Interruption, RunStage, stopped
from rillflow.errors import ConfigError, Interrupted, RillflowError, RunDirectoryError
from rillflow.placement.plan import Plan
from rillflow.records.metrics import Metrics
from rillflow.runs import layout
from rillflow.runs.bases import run_id
from rillflow.runs.core_share import CoreShare
from rillflow.runs.environment import environment, usable_cores
from rillflow.runs.json_lines import JSON, read_json
from rillflow.runs.layout import kept_steps
from rillflow.runs.observers import ObservedRun, Observer, Observers
from rillflow.runs.pins import Pins, pin_notes
from rillflow.runs.progress import Progress
from rillflow.runs.reader import read_metrics
from rillflow.runs.run_data import load
from rillflow.runs.run_directory import RunDirectory, holds_step, new_identity, set_aside
from rillflow.runs.summary import NO_SUGGESTIONS, Summary, render_text, summarise, warnings_of
from rillflow.workers.fork_server import ForkServer

if TYPE_CHECKING:
    from rillflow.app.build import Build
    from rillflow.app.reports import RunReports


def launch(
    resolved: Resolved,
    *,
    fresh: bool = False,
    quiet: bool = False,
    plan: Plan | None = None,
    command: Sequence[str] = (),
    given: Given = NOTHING,
    told: Callable[[str, int, Metrics], None] | None = None,
    interruption: Interruption | None = None,
    repeat: RecordedDecisions | None = None,
) -> Summary:
    """Run a recipe to its end, from the newest checkpoint if there is one, and return a summary.

    Args:
        resolved: the recipe.
        fresh: move an older run of the same directory aside instead of resuming it.
        quiet: show errors only.
        plan: the plan that placed the recipe, or the one to compare the run with; the run directory keeps it.
            None uses the plan of an earlier start, if the placement still matches it.
        command: the typed command, for the commands that the summary suggests; empty in a Python program.
        given: rows and rewards that are Python objects instead of files.
        told: is called after every whole step with its phase, number and metrics; its errors end the run.
        interruption: requests to stop the run; it also handles signals while this runs.
        repeat: decisions that ready-first phases repeat, for a replay.

    Raises:
        RillflowError: an error that a user can fix; it states the problem, the reason and the fix.
        Interrupted: the user asked to stop; the same command resumes.
    """
    path = resolved.directory
    resolved = resolved if fresh else with_choices_of_run(resolved, path)
    with interruption or Interruption() as asked, asked.orderly(), ExitStack() as stack:
        asked.stop_s = resolved.recipe.run.stop_s
        start = _Start(path=path, is_fresh=fresh, is_replay=repeat is not None)
        pins = stack.enter_context(Pins(path, start.identity))
        former, facts = start.former, start.facts(resolved, given, pins, quiet)
        notes = require_sound(facts)
        run = stack.enter_context(start.opened(facts))
        pins.settle(former)
        require_possible(resolved, path, run.changes, facts.task)
        progress = stack.enter_context(
            Progress(total_steps=_steps(resolved), quiet=quiet, told=told, log=path / layout.OUTPUT_LOG)
        )
        notes = [*notes, *pins.notes, *pin_notes(path)]
        _run(facts, notes, run, progress, plan, command, asked, repeat)
        summary = summarise(path)
    if not quiet:
        say_summary(summary, path)
    return summary


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Start of a run in a directory, before it is opened."""

    path: Path
    """The run directory."""
    is_fresh: bool
    """Whether an older run in the directory is set aside."""
    is_replay: bool
    """Whether the directory is temporary."""

    @property
    def goes_on(self) -> bool:
        """Whether the run has made a step."""
        return not self.is_fresh and holds_step(self.path)

    @cached_property
    def identity(self) -> str:
        """Id of the run: a new one for a new run."""
        is_known = not self.is_fresh and (self.path / layout.ENVIRONMENT).exists()
        return run_id(self.path) if is_known else new_identity()

    @property
    def former(self) -> Sequence[Path]:
        """Runs that this run stood on at its last start."""
        return former_runs(self.path) if self.goes_on else ()

    def facts(self, resolved: Resolved, given: Given, pins: Pins, quiet: bool) -> RecipeFacts:
        """Return the facts of the recipe with the models that the run stands on; pin them, if it lasts."""
        kept = self.path if self.goes_on else None
        standing = standing_of(resolved, kept, None if self.is_replay else pins)
        return RecipeFacts(
            resolved=resolved.changed(standing.places),
            given=given,
            drawn=None if self.is_fresh else drawn_from(self.path),
            say=(lambda _: None) if quiet else Progress.say,
            standing=standing,
        )

    def opened(self, facts: RecipeFacts) -> RunDirectory:
        """Open the run directory, and record where models are now."""
        if self.is_fresh:
            set_aside(self.path)
        settings = run_config(facts.resolved, facts.task, facts.standing)
        moved = facts.standing.moved(self.path) if self.goes_on else ()
        settings = as_kept(settings, facts.recipe, self.path) if self.goes_on else settings
        may_change = (*MAY_CHANGE, *plugin_changes(), *moved)
        run = RunDirectory.open(self.path, settings, may_change=may_change, identity=self.identity)
        if any(change.key.startswith(f"{layout.BASES}.") for change in run.changes):  # also of a finished run
            run.write_json(layout.CONFIG, {**read_json(self.path / layout.CONFIG), **kept_bases(settings)})
        return run


def _run(
    facts: RecipeFacts,
    notes: Sequence[str],
    run: RunDirectory,
    progress: Progress,
    plan: Plan | None,
    command: Sequence[str],
    asked: Interruption,
    repeat: RecordedDecisions | None,
) -> None:
    """Run the remaining steps, from the newest checkpoint again after a rank has died."""
    recipe = facts.recipe

    def train() -> None:
        with _forks_of(facts) as forks:
            once = partial(_train, facts, run, progress, plan, command, asked, repeat, forks)
            restarted(once, recipe.run.restarts, run, progress, asked)

    finished = is_finished(facts.resolved, run.path)
    watched = () if repeat is not None else observers_of(recipe, facts.base, run, progress)
    carry_out(None if finished else train, run, progress, asked, watched, notes)


def observers_of(recipe: Section, base: Path, run: RunDirectory, progress: Progress) -> Sequence[Observer]:
    """Return the observers that plugins bring for a run; one that cannot be made is noted and left out.

    Args:
        recipe: the settings.
        base: the recipe's folder.
        run: the run directory.
        progress: the display for the user.
    """
    watched, every = ObservedRun(path=run.path, recipe=recipe, base=base, say=progress.note), list[Observer]()
    for name, plugin in installed().items():
        try:
            every += plugin.observers(watched) if plugin.observers is not None else ()
        except Exception as error:  # noqa: BLE001  a plugin may raise anything, and the run must not end
            what = f"{type(error).__name__}: {error}"
            progress.note(f"the plugin {name} does not watch the run, which goes on without it: {what}")
    return every


def _forks_of(facts: RecipeFacts) -> AbstractContextManager[ForkServer | None]:
    """Return the fork server of local ranks, which begins its imports; None if no rank is a fork."""
    placement, device = facts.recipe.placement, facts.recipe.run.device
    is_local = placement.backend == "process" and not placement.is_inline and facts.given.backend is None
    if not is_local or device.startswith("cuda"):
        return nullcontext()
    roles = facts.resolved.roles.values()
    forks = ForkServer([role.module for role in roles if role.module is not None])
    forks.prepare()
    return forks


def carry_out(
    train: Callable[[], None] | None,
    run: RunDirectory,
    progress: Progress,
    asked: Interruption,
    observers: Sequence[Observer],
    notes: Sequence[str] = (),
) -> None:
    """Train with observers, then write the summary and the report, also if the run ends early.

    Args:
        train: makes the remaining steps; None if the run is finished.
        run: the run directory.
        progress: the display for the user.
        asked: tells whether the user wants to stop.
        observers: what watches the run.
        notes: what the user should know before the start.
    """
    for note in run.notes:
        progress.note(f"damaged: {note}")
    if train is None:
        progress.note(f"{run.path} is finished; --fresh sets it aside and starts again")
    else:
        for note in (*notes, *warnings_of(load(run.path))):
            progress.note(f"note: {note}")
        asked.say = progress.note
        try:
            with Observers(observers, progress.note) as run.observers:
                try:
                    with asked.orderly(), CoreShare(progress.note, usable_cores()):
                        train()
                finally:
                    asked.stage = RunStage.ENDING
        except Exception:
            _leave_report(run, progress)
            raise
    try:
        _write_report(run)
    except (ConfigError, RunDirectoryError) as error:  # the run is complete without it
        progress.note(f"the run is finished, but its report is not; the same command writes it: {error}")


def say_summary(summary: Summary, path: Path, suggested: Mapping[str, str] = NO_SUGGESTIONS) -> None:
    """Show a run's summary with suggested commands, and its plan's seconds next to the measured ones."""
    Progress.say(render_text(summary, suggested))
    if not (path / layout.PLAN).is_file():
        return
    try:
        reports: RunReports = service("reports", "the comparison with the plan")
        if compared := reports.comparison(path):
            Progress.say(compared)
    except ConfigError as error:  # the run is complete without it
        Progress.say(f"note: {error}")


def _leave_report(run: RunDirectory, progress: Progress) -> None:
    """Write the report of a run that an error or the user ended; a second error must not hide the first."""
    if not holds_step(run.path):
        return
    try:
        progress.note(f"report so far: {_write_report(run)}")
    except Exception as second:  # noqa: BLE001  the first error ended the run
        progress.note(f"the report could not be written: {second}")


def _write_report(run: RunDirectory) -> Path:
    """Write the summary and the report; return the report's path."""
    run.write_json(layout.SUMMARY, summarise(run.path).as_json())
    reports: RunReports = service("reports", "the report")
    return reports.write(run.path)


def _steps(resolved: Resolved) -> dict[str, int]:
    """Return the steps of every phase, by name."""
    return {phase.name: phase.config.steps for phase in resolved.phases}


def restarted(
    train: Callable[[ExitStack], None], most: int, run: RunDirectory, progress: Progress, asked: Interruption
) -> None:
    """Train to the end; if a rank dies and is not replaced, start all ranks again from the newest checkpoint.

    Args:
        train: starts ranks, which the stack ends, and trains from the newest checkpoint.
        most: restarts in a row without a new checkpoint in between (``run.restarts``).
        run: the run directory.
        progress: the display for the user.
        asked: tells whether the user wants to stop.

    Raises:
        ClusterError: the last restarts brought no new checkpoint; it is the first death of them.
        Interrupted: the user asked to stop before a step of the restarted run began.
    """
    from rillflow.workers.backend import RankDied, RankLost

    first: RankDied | RankLost | None = None
    made, before = 0, -1
    while True:
        try:
            with ExitStack() as ranks:
                train(ranks)
            return
        except (RankDied, RankLost) as died:
            step = max(kept_steps(run.checkpoints), default=0)
            if first is None or step > before:
                first, made, before = died, 0, step
            if made == most or asked.requested:
                raise first from None
            made += 1
            what = f"{'a worker ' if isinstance(died, RankLost) else ''}{died.what}"
            progress.note(f"{what}; all ranks start again from step {step} (restart {made} of {most})")
            asked.stage = RunStage.STARTING  # Ctrl-C ends the start of the ranks at once
        except RillflowError as error:
            error.is_underway |= first is not None  # the recipe was right when the run began
            raise
        except KeyboardInterrupt:
            if first is None or asked.stage is not RunStage.STARTING:
                raise
            path = run.checkpoints / f"step-{before:06d}"
            raise stopped(before, path if before else None) from None


def _train_steps(
    build: Build, resolved: Resolved, run: RunDirectory, progress: Progress, interruption: Interruption
) -> None:
    """Run the steps, to the last one or until ``evaluate.patience`` ends them, and mark the run finished."""
    mark: dict[str, JSON] = {"steps": resolved.total_steps}
    try:
        build.train(progress, interruption)
    except Interrupted:
        if not interruption.early:
            raise
        progress.note(f"stopped early: {interruption.early}")
        mark |= {"early": interruption.early, "patience": resolved.recipe.evaluate.patience}
    run.write_json(layout.FINISHED, mark)


def _train(
    facts: RecipeFacts,
    run: RunDirectory,
    progress: Progress,
    plan: Plan | None,
    command: Sequence[str],
    interruption: Interruption,
    repeat: RecordedDecisions | None,
    forks: ForkServer | None,
    stack: ExitStack,
) -> None:
    from rillflow.app.build import Build

    recipe, task = facts.recipe, facts.task
    keep_sources(recipe, task, facts.base, run.path)
    keep_data(task, run.path)
    checkpoint = at_newest_checkpoint(
        run, progress, lambda kept: fresher_steps(facts.resolved, kept) + shorter_phase(recipe, run.changes)
    )
    if checkpoint is None:
        shutil.rmtree(run.path / layout.REFERENCE, ignore_errors=True)
    shutil.rmtree(run.path / layout.BUNDLES / layout.DRAFT, ignore_errors=True)
    build = Build(facts, run, checkpoint, stack, repeat, forks)
    encoding_notes = build.encoded.notes if build.encoded is not facts.encoded else ()
    for note in (*encoding_notes, *build.notes):
        progress.note(f"note: {note}")
    is_planned = keep_plan(run.path, plan, recipe.placement)
    left = run.path / layout.PLAN
    if not is_planned and left.is_file():
        progress.note(f"{left} does not match the placement, so it is unused; --plan {left} applies it")
    run.log_start(
        {
            **environment(device=", ".join(sorted(set(build.devices.values()))), command=command),
            "base": str(facts.base.absolute()),
            "after_step": checkpoint.step if checkpoint else 0,
            "placement": recipe.placement.model_dump(mode="json"),
            "nodes": {f"{at.pool} {at.rank}": asdict(node) for at, node in build.nodes.items()},
            "is_planned": is_planned,
            "left_out": {str(use): count for use, count in build.encoded.left_out.items()},
        }
    )
    run.observers.start()
    with underway(), rows_named(task):
        _train_steps(build, facts.resolved, run, progress, interruption)


def at_newest_checkpoint(
    run: RunDirectory, progress: Progress, more: Callable[[Checkpoint], str] = lambda _: ""
) -> Checkpoint | None:
    """Set a run directory back to its newest checkpoint, tell the user, and return it.

    Args:
        run: the run directory; nothing marks it as finished any more.
        progress: shows where the run goes on, which steps are repeated, and what has changed.
        more: returns what else to tell of the checkpoint.
    """
    run.evidence.remove(layout.FINISHED)
    checkpoint = latest_checkpoint(run.checkpoints, run.id)
    kept = checkpoint.step if checkpoint else 0
    lost = max((record.step for record in read_metrics(run.path)), default=0) - kept
    run.rewind(checkpoint.step if checkpoint else -1)
    again = f"; {lost} steps without a checkpoint are repeated" if lost > 0 else ""
    if checkpoint:
        progress.note(f"resuming after step {kept} from {checkpoint.path}{again}{more(checkpoint)}")
    elif again:
        progress.note(f"starting again{again}")
    for change in run.changes:
        progress.note(f"changed: {after(kept, change)}")
    return checkpoint


@contextmanager
def underway() -> Iterator[None]:
    """Mark errors in the steps of a run: their exit code is that of a failure, not of a wrong setting."""
    try:
        yield
    except RillflowError as error:
        error.is_underway = True
        raise
