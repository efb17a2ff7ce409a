"""Observers: what watches a run beside training, such as trackers; their failures never stop the run.

    start ─> step, evaluation, step, ... ─> finish(state)        all in the driver, in this order
      └── an exception of one observer: a note to the user, and the run goes on without that observer

A step has its line in metrics.jsonl when its observers hear of it. After a restart of ranks, or in a resumed
run, steps without a checkpoint come again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rillflow.config.schema import Section
from rillflow.errors import Interrupted
from rillflow.runs.error_lines import innermost_line

if TYPE_CHECKING:
    from rillflow.records.metrics import Metrics
    from rillflow.runs.reader import Evaluation

End = Literal["finished", "stopped", "failed"]
"""How a run ended: after its last step, on request, or by an error."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """The run that an observer watches."""

    path: Path
    """Run directory; metrics, rollouts and everything else that the run writes are there."""
    recipe: Section
    """Settings of the run."""
    base: Path
    """The recipe's folder; paths in the recipe are relative to it."""
    say: Callable[[str], None]
    """Shows the user a line; any thread may call it."""


class Observer(Protocol):
    """Watches a run. Each call returns quickly, because training waits for it."""

    def start(self) -> None:
        """Begin; config.json and environment.json of this start are written."""
        ...

    def step(self, step: int, phase: str, metrics: Metrics) -> None:
        """Take a finished step.

        Args:
            step: its number, from 1 over all phases.
            phase: its phase: ``warm_start`` or the algorithm's name.
            metrics: its metrics by name. The recorded rows of the step before it are in the run directory.
        """
        ...

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Take an evaluation after a step; 0 for one before the first step."""
        ...

    def finish(self, state: End) -> None:
        """End. The report is written afterwards; bound any wait."""
        ...


class Observers:
    """The observers of a run; a context manager, whose exit tells them how the run ended.

    Args:
        observers: the observers.
        say: shows the user a line.

    Example:
        with Observers([Printer()], progress.note) as observers:
            observers.start()
    """

    def __init__(self, observers: Sequence[Observer], say: Callable[[str], None]) -> None:
        self._observers, self._say, self._is_started = list(observers), say, False

    def start(self) -> None:
        """Start the observers, once; a restart of ranks starts them no second time."""
        if not self._is_started:
            self._is_started = True
            self._each(lambda observer: observer.start())

    def step(self, step: int, phase: str, metrics: Metrics) -> None:
        """Tell of a finished step; see Observer."""
        self._each(lambda observer: observer.step(step, phase, metrics))

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Tell of an evaluation; see Observer."""
        self._each(lambda observer: observer.evaluation(step, found))

    def __enter__(self) -> Observers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        is_asked = kind is not None and issubclass(kind, Interrupted | KeyboardInterrupt)
        state: End = "finished" if kind is None else "stopped" if is_asked else "failed"
        if self._is_started:
            self._each(lambda observer: observer.finish(state))
        self._observers.clear()

    def _each(self, call: Callable[[Observer], None]) -> None:
        for observer in [*self._observers]:
            try:
                call(observer)
            except Exception as error:  # noqa: BLE001  an observer may raise anything, and the run must not end
                self._observers.remove(observer)
                what = f"{type(error).__name__}: {error} ({innermost_line(error)})"
                self._say(f"{type(observer).__name__} failed, and the run goes on without it: {what}")
