"""Plugin recipe: a recipe of a plugin's kind; its run has the same directory, resume and report as others.

recipe ─ check ─> run directory ─ newest checkpoint ─> PluginRecipe.train(OpenRun) ─> summary, report

A plugin derives a class with its settings, its steps and the function that trains. ``rillflow.app.plugins``
finds the function that loads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rillflow.app.any_recipe import AnyRecipe
from rillflow.config.problems import together
from rillflow.runs import layout
from rillflow.runs.json_lines import read_json

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.controller.checkpoint import Checkpoint
    from rillflow.controller.interrupt import Interruption
    from rillflow.graph.graph import Graph
    from rillflow.records.metrics import Metrics
    from rillflow.runs.progress import Progress
    from rillflow.runs.run_directory import RunDirectory
    from rillflow.runs.summary import Summary
    from rillflow.runs.trackers.process import Trackers


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that makes its steps now."""

    directory: RunDirectory
    """Receives metrics, spans, evaluations and checkpoints."""
    checkpoint: Checkpoint | None
    """The checkpoint to go on from; None at the start."""
    progress: Progress
    """The display for the user."""
    interruption: Interruption
    """Tells whether the user wants to stop. Set its stage before the first step."""
    stack: ExitStack
    """Ends what is entered into it after the last step, or after an error."""


@dataclass(frozen=True, kw_only=True)
class PluginRecipe(AnyRecipe, ABC):
    """A checked recipe of a plugin's kind; the commands treat it like a recipe of a language model."""

    may_change: ClassVar[Sequence[str]] = ()
    """Settings, or sections, that a resumed run may change."""

    @property
    @abstractmethod
    def phase(self) -> str:
        """Name of the run's phase: its algorithm."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of the run."""

    @abstractmethod
    def look(self, report: Report, *, runs_code: bool) -> None:
        """Add facts and problems to a report: everything that can be known before it runs.

        Args:
            report: the report.
            runs_code: whether code that the recipe names may run.
        """

    @abstractmethod
    def graphs(self) -> list[Graph]:
        """Return its dataflow, one graph for each phase."""

    @abstractmethod
    def train(self, run: OpenRun) -> None:
        """Make the remaining steps.

        Raises:
            Interrupted: the user asked to stop.
        """

    def check(self, *, every_setting: bool = False, runs_code: bool = True) -> Report:
        """Report everything that can be known before it runs."""
        from rillflow.app.check_report import Report
        from rillflow.app.tracker_checks import look_at_trackers

        report = Report()
        self.look(report, runs_code=runs_code)
        report.attempt(look_at_trackers, self)
        report.say("settings", self.setting_lines(every=every_setting))
        return report

    @property
    def is_finished(self) -> bool:
        """Whether the run in ``directory`` has made the last step of this recipe."""
        mark = self.directory / layout.FINISHED
        return mark.is_file() and bool(read_json(mark)["steps"] == self.steps)

    def run(
        self,
        *,
        fresh: bool = False,
        quiet: bool = False,
        command: Sequence[str] = (),
        told: Callable[[str, int, Metrics], None] | None = None,
        interruption: Interruption | None = None,
    ) -> Summary:
        """Run it to its end, from the newest checkpoint if there is one; see ``rillflow.app.launch``."""
        from rillflow.app.launch import carry_out, restarted, say_summary
        from rillflow.controller.interrupt import Interruption
        from rillflow.runs.progress import Progress
        from rillflow.runs.run_directory import RunDirectory, set_aside
        from rillflow.runs.summary import summarise

        path, settings = self.directory, self.recipe.model_dump(mode="json")
        with interruption or Interruption() as asked, asked.orderly(), ExitStack() as stack:
            is_finished = self.is_finished and not fresh
            problems = () if is_finished else self.check().problems
            if problems:
                raise together(problems, str(self.path))
            if fresh:
                set_aside(path)
            directory = stack.enter_context(RunDirectory.open(path, settings, may_change=self.may_change))
            shown = stack.enter_context(
                Progress(
                    total_steps={self.phase: self.steps},
                    quiet=quiet,
                    told=told,
                    log=path / layout.OUTPUT_LOG,
                )
            )

            def train(trackers: Trackers) -> None:
                once = partial(self._train, directory, shown, asked, command, trackers)
                restarted(once, self.recipe.run.restarts, directory, shown, asked)

            trackers = self.recipe.run.trackers
            carry_out(None if is_finished else train, directory, shown, asked, trackers, self.base)
            summary = summarise(path)
        if not quiet:
            say_summary(summary, path)
        return summary

    def _train(
        self,
        directory: RunDirectory,
        progress: Progress,
        asked: Interruption,
        command: Sequence[str],
        trackers: Trackers,
        stack: ExitStack,
    ) -> None:
        from rillflow.app.launch import at_newest_checkpoint, underway
        from rillflow.runs.environment import environment

        checkpoint = at_newest_checkpoint(directory, progress)
        after = checkpoint.step if checkpoint else 0
        start = environment(device="cpu", command=command)
        directory.log_start({**start, "base": str(self.base.absolute()), "after_step": after})
        trackers.start()
        opened = OpenRun(
            directory=directory,
            checkpoint=checkpoint,
            progress=progress,
            interruption=asked,
            stack=stack,
        )
        with underway():
            self.train(opened)
        directory.write_json(layout.FINISHED, {"steps": self.steps})
