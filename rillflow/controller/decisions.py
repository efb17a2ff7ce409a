"""Decisions: what a ready-first run chose by the clock, in order, so that it can be repeated bit for bit.

    run      clock, rule ─> decide ─> note ─> decisions.jsonl, one line for each step
    replay   decisions.jsonl ─> head ─> the same calls in the same order ─> note, which compares

Rows follow from row ids and weights, and ranks run calls in order. So the bits of a run follow from the order
of these events:

    draw n              n prompts of the stream enter the table
    begin r group       a group begins with replica r's next call
    again group why     a group is dropped and its prompt enters the table again
    call r n            replica r runs up to n tokens of each of its rows
    receive r v         replica r receives the phase's v-th publish
    run w groups        worker w computes its stage for some groups
    lost w groups       worker w died; other workers, or its replacement, compute these groups
    gone h              the ranks of holder h (replicas, then workers) cannot be replaced
    form groups         a step, or a chunk of it, takes groups
    deliver v           the v-th publish of the phase is ready for the sampler
    beside              another call of the sampler, such as an evaluation
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines

Event = list[Any]
"""Name of a decision and its arguments, as in JSON."""


class Decisions:
    """The decisions of a phase.

    Args:
        write: appends the decisions that formed a step of the run, given its number.
        script: decisions to repeat; after the last one, and without any, the run decides by itself.
    """

    def __init__(
        self, write: Callable[[int, Sequence[Event]], None] = lambda *_: None, script: Iterable[Event] = ()
    ) -> None:
        self._write, self._script = write, deque(script)
        self._noted: list[Event] = []
        self._has_losses = any(event[0] == "lost" for event in self._script)

    @property
    def head(self) -> Event | None:
        """The next decision to repeat; None at the end, and for a run that decides by itself."""
        return self._script[0] if self._script else None

    def lost(self, worker: int) -> set[tuple[int, int]]:
        """Return the groups that a worker of a streamed stage is going to lose next, in the script."""
        if not self._has_losses:  # the usual script, which need not be searched
            return set()
        lost = next((event for event in self._script if event[:2] == ["lost", worker]), None)
        return set() if lost is None else {(epoch, prompt) for epoch, prompt in lost[2]}

    def note(self, name: str, *arguments: Any) -> None:
        """Note a decision.

        Raises:
            RunDirectoryError: the run that is repeated decided otherwise.
        """
        event = [name, *([list(each) if isinstance(each, tuple) else each for each in arguments])]
        self._noted.append(event)
        if self._script and (wanted := self._script.popleft()) != event:
            raise RunDirectoryError(
                f"the replay decides {event}, and the run decided {wanted}",
                why="a replay repeats the decisions of decisions.jsonl in order",
                fix="replay with the version of Rillflow and the settings of the run",
            )

    def step(self, number: int) -> None:
        """Write the decisions since the step before."""
        self._write(number, self._noted)
        self._noted = []


@dataclass(frozen=True, kw_only=True)
class RecordedDecisions:
    """The decisions of a run that a replay repeats."""

    run: Path
    """The run directory."""
    last: int
    """Last step that the run made before it was interrupted or ended."""

    def after(self, step: int) -> list[Event]:
        """Return the decisions that formed the steps after ``step``.

        Raises:
            RunDirectoryError: a line is damaged.
        """
        lines: list[Any] = [line.data for line in read_lines(self.run / layout.DECISIONS).lines]
        return [event for data in lines if step < data["step"] <= self.last for event in data["events"]]
