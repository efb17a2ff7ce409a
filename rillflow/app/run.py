"""Run: a run directory as an object: its metrics, rollouts and checkpoints, and its model to prompt.

run directory ─┬─ metrics, evaluations, rollouts, settings   read again at every access, also during the run
               └─ checkpoint ─> its folder ─ ask ─> an answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rillflow.app.plugins import service
from rillflow.app.trained import model_directory
from rillflow.controller.interrupt import Interruption
from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import JSON
from rillflow.runs.reader import (
    EvaluationRecord,
    best_step,
    read_config,
    read_evaluations,
    read_metrics,
    read_rollouts,
    require_run,
    rollout_columns,
)
from rillflow.runs.rollouts import RolloutRecord

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm
    from rillflow.app.reports import RunReports
    from rillflow.tasks.example import Message


class Run:
    """A run, finished or not; ``rillflow.train`` and ``rillflow.open_run`` return one.

    Example:
        run = rillflow.open_run("runs/first")
        pandas.DataFrame(run.metrics).plot(x="step", y="reward/score/mean")

    Args:
        path: the run directory.
        interruption: requests to stop, if this process trains the run.
    """

    def __init__(self, path: Path, interruption: Interruption | None = None) -> None:
        self.path = path
        """The run directory."""
        self.is_stopped = False
        """Whether ``stop`` was called."""
        self._interruption = interruption
        self._respondents: dict[str, Answers] = {}

    def __repr__(self) -> str:
        made = max((each["step"] for each in self.metrics), default=0)
        return f"<run {self.path}: {made} steps, {'finished' if self.is_finished else 'not finished'}>"

    def _repr_html_(self) -> str:
        """Return the report's first two curves, for notebooks."""
        reports: RunReports = service("reports", "a notebook")
        return reports.curves(self.path)

    @property
    def is_finished(self) -> bool:
        """Whether the run made its last step."""
        return (self.path / layout.FINISHED).is_file()

    @property
    def settings(self) -> Mapping[str, JSON]:
        """Every resolved setting, by section."""
        return read_config(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One flat row per step: ``step``, ``phase``, ``time_s`` and every metric's value by name."""
        return [
            {"step": each.step, "phase": each.phase, "time_s": each.time_s}
            | {name: metric.value for name, metric in each.metrics.items()}
            for each in read_metrics(self.path)
        ]

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """Every evaluation on held-out rows."""
        return read_evaluations(self.path)

    def rollouts(self, step: int | None = None) -> list[RolloutRecord]:
        """Return the rows sampled in a step, with prompt, answer, reward and tokens; None for the last step.

        Raises:
            RunDirectoryError: the step sampled nothing; the message names the steps that did.
        """
        made = max(layout.rollout_files(self.path), default=0)
        return read_rollouts(self.path, made if step is None else step)

    def columns(self, step: int | None = None) -> dict[str, list[Any]]:
        """Return a step's rollouts as columns, one entry per row: ``pandas.DataFrame(run.columns())``."""
        return rollout_columns(
            self.path, max(layout.rollout_files(self.path), default=0) if step is None else step
        )

    def checkpoint(self, step: int | None = None, *, best: bool = False, role: str = "policy") -> Path:
        """Return the Hugging Face directory of a role's model: the newest, a step's, or the best.

        Raises:
            RunDirectoryError: there is no such checkpoint, or the run trains no such role.
        """
        return model_directory(self.path, role, best_step(self.path) if best else step)

    def ask(
        self, question: str | Sequence[Message], *, step: int | None = None, best: bool = False, **how: Any
    ) -> str:
        """Return the policy's answer to a question, which is a text or a tuple of messages.

        Args:
            question: formatted like the run's own prompts; see ``rillflow ask``.
            step: step of the checkpoint; None for the newest.
            best: use the checkpoint with the highest held-out mean reward.
            how: ``temperature`` (0), ``max_tokens``, ``system`` and ``seed``; see ``Respondent``.
        """
        folder = self.checkpoint(step, best=best).parent
        chat = not isinstance(question, str)
        key = f"{folder} {chat} {sorted(how.items())}"
        if key not in self._respondents:  # keep one model: the next question is usually for the same
            step = int(folder.name.removeprefix("step-"))
            self._respondents = {key: service("answers", "Run.ask")(self.path, step=step, chat=chat, **how)}
        return self._respondents[key].answer(question if isinstance(question, str) else tuple(question))

    def replay(
        self, step: int | None = None, settings: Sequence[str] = (), algorithms: Sequence[Algorithm] = ()
    ) -> ReplayResult:
        """Re-run the step, or every step, and compare it with its record; see ``rillflow replay``.

        Args:
            step: the last step to re-run, from the newest checkpoint before it; None: all from the start.
            settings: ``KEY=VALUE`` texts that change settings for the replay.
            algorithms: your own algorithms, which the run's recipe names.
        """
        result: ReplayResult = service("replay", "Run.replay")(self.path, step, settings, algorithms)
        return result

    def report(self) -> Path:
        """Write ``report.html`` and return its path."""
        reports: RunReports = service("reports", "Run.report")
        return reports.write(self.path)

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint; for callbacks and other threads.

        Raises:
            RunDirectoryError: this object does not train the run.
        """
        if self._interruption is None:
            raise RunDirectoryError(
                f"this object does not train {self.path}",
                why="open_run only reads a run directory",
                fix=f"send SIGTERM to the process that {self.path / layout.LOCK} names, if it still runs",
            )
        self._interruption.requested = self.is_stopped = True


class Answers(Protocol):
    """The model of a run, ready to answer."""

    def answer(self, question: str | tuple[Message, ...]) -> str:
        """Return the answer to a question."""


class ReplayResult(Protocol):
    """Result of ``Run.replay``."""

    @property
    def difference(self) -> object | None:
        """The first value that differs; None if all compared values are equal."""

    @property
    def steps(self) -> Sequence[object]:
        """Compared steps in order, up to the first difference."""

    @property
    def reasons(self) -> Sequence[str]:
        """Facts that may explain the difference."""


def open_run(path: str | Path) -> Run:
    """Open a run directory, finished or not, also while another process trains it.

    Raises:
        RunDirectoryError: the path is missing, or is not a run directory.
    """
    require_run(Path(path))
    return Run(Path(path))
