"""Plugin recipe: a recipe of a plugin's kind.

A plugin derives a class with its settings, its steps and the function that trains. ``rillflow.app.plugins``
finds the function that loads it, ``rillflow.app.plugin_run`` runs it, ``rillflow.app.check`` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.app.any_recipe import AnyRecipe
from rillflow.runs import layout
from rillflow.runs.json_lines import read_json

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.controller.checkpoint import Checkpoint
    from rillflow.controller.interrupt import Interruption
    from rillflow.graph.graph import Graph
    from rillflow.runs.progress import Progress
    from rillflow.runs.run_directory import RunDirectory


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

    @property
    def is_finished(self) -> bool:
        """Whether the run in ``directory`` has made the last step of this recipe."""
        mark = self.directory / layout.FINISHED
        return mark.is_file() and bool(read_json(mark)["steps"] == self.steps)
