"""Plugin recipe: a recipe of a plugin's kind; its run has the same directory, resume and report as others.

recipe ─ check ─> run directory ─ newest checkpoint ─> PluginRecipe.train(OpenRun) ─> summary, report

A plugin derives a class with its settings, its steps and the function that trains. ``rillflow.app.plugins``
finds the function that loads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rillflow.app.any_recipe import AnyRecipe
from rillflow.config.problems import together
from rillflow.errors import RunDirectoryError
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

    @property
    def may_change(self) -> Sequence[str]:
        """Settings, or sections, that a resumed run may change."""
        return ()

    @property
    def suggested(self) -> Mapping[str, str]:
        """Commands to suggest at the end of a run by their purpose, such as ``play it``."""
        return {}

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
        from rillflow.app.preflight_checks import look_with_plugins

        report = Report()
        self.look(report, runs_code=runs_code)
        look_with_plugins(self, report)
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
        from rillflow.app.launch import carry_out, observers_of, restarted, say_summary
        from rillflow.app.plugin_sections import as_kept, plugin_changes
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
            may_change = (*self.may_change, *plugin_changes())
            directory = stack.enter_context(
                RunDirectory.open(path, as_kept(settings, path), may_change=may_change)
            )
            self._require_no_fewer_steps()
            shown = stack.enter_context(
                Progress(
                    total_steps={self.phase: self.steps},
                    quiet=quiet,
                    told=told,
                    log=path / layout.OUTPUT_LOG,
                )
            )

            def train() -> None:
                once = partial(self._train, directory, shown, asked, command)
                restarted(once, self.recipe.run.restarts, directory, shown, asked)

            watched = observers_of(self.recipe, self.base, directory, shown)
            carry_out(None if is_finished else train, directory, shown, asked, watched)
            summary = summarise(path)
        if not quiet:
            say_summary(summary, path, self.suggested)
        return summary

    def _require_no_fewer_steps(self) -> None:
        made = max(layout.kept_steps(self.directory / layout.CHECKPOINTS), default=0)
        if made > self.steps:
            raise RunDirectoryError(
                f"the recipe has {self.steps} steps, but {self.directory} has already made {made}",
                why="a resume cannot undo steps",
                fix="raise the number of steps, or choose another run directory",
            )

    def _train(
        self,
        directory: RunDirectory,
        progress: Progress,
        asked: Interruption,
        command: Sequence[str],
        stack: ExitStack,
    ) -> None:
        from rillflow.app.launch import at_newest_checkpoint, underway
        from rillflow.runs.environment import environment

        checkpoint = at_newest_checkpoint(directory, progress)
        after = checkpoint.step if checkpoint else 0
        start = environment(device="cpu", command=command)
        directory.log_start({**start, "base": str(self.base.absolute()), "after_step": after})
        directory.observers.start()
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
