"""Decisions: what a ready-first run chose by the clock, in order, so that it can be repeated bit for bit.

    run      clock, rule ─> decide ─> note ─> decisions.jsonl, one line for each pass of the loop
    replay   decisions.jsonl ─> head ─> the same calls in the same order ─> note, which compares
    resume   the decisions after the checkpoint ─> head ─> ... ─> end ─> decide ─> note ─> decisions.jsonl

Rows follow from row ids and weights, and ranks run calls in order. So the bits of a run follow from the order
of these events:

    draw n              n prompts of the stream enter the table
    begin r group       a group begins with replica r's next call
    again group why     a group is dropped and its prompt enters the table again
    call r n            replica r runs up to n tokens of each of its rows
    receive r v         replica r receives the phase's v-th publish
    save r s            replica r's rows are written for the checkpoint of step s, and go on from their tokens
    run w groups        worker w computes its stage for some groups
    lost w groups       worker w died; other workers, or its replacement, compute these groups
    gone h              the ranks of holder h (replicas, then workers) cannot be replaced
    form groups         a step, or a chunk of it, takes groups
    deliver v           the v-th publish of the phase is ready for the sampler
    beside s            another call of the sampler, for step s or the evaluation after it
    left                a resumed run decides anew from here; rows that later decisions had led to are dropped

The file is one timeline over all starts of a run. An event's position is the number of events before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines

Event = list[Any]
"""Name of a decision and its arguments, as in JSON."""
LEFT_SCRIPT = "left"
"""The decision with which a resumed run begins to decide anew."""
CLOSING = ("deliver", "form", "beside")
"""Decisions that wait for the training loop."""


class DecisionLog(Protocol):
    """The file of a run's decisions."""

    def log_decisions(self, events: Sequence[Event]) -> None:
        """Append decisions."""

    def cut_decisions(self, count: int) -> None:
        """Drop all decisions but the first ``count``."""


class Decisions:
    """The decisions of a phase.

    Args:
        log: receives the decisions that the run makes by itself; None for a replay.
        script: decisions to repeat; after the last one, and without any, the run decides by itself.
        position: number of decisions of the run before these.
    """

    def __init__(
        self, log: DecisionLog | None = None, script: Iterable[Event] = (), position: int = 0
    ) -> None:
        self._log, self._script = log, deque(script)
        self._noted: list[Event] = []
        self.position = position
        """Number of decisions so far."""
        self.left_at: int | None = None
        """Position where the run left the script before its end; None if it did not."""
        self.left = ""
        """Why the run left the script before its end; empty if it did not."""
        self.has_lost_steps = False
        """Whether the run had formed steps after the place where the script was left."""
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

    @property
    def may_leave(self) -> bool:
        """Whether the run may decide by itself before the script's end, as a resume may."""
        return self._log is not None

    def has(self, event: Event) -> bool:
        """Return whether a decision is still to be repeated."""
        return event in self._script

    def coming(self) -> list[Event]:
        """Return the decisions up to the next one that waits for the training loop."""
        return [*takewhile(lambda event: event[0] not in CLOSING, self._script)]

    def note(self, name: str, *arguments: Any) -> None:
        """Note a decision.

        Raises:
            RunDirectoryError: a replay decides otherwise than the run.
        """
        event = [name, *([list(each) if isinstance(each, tuple) else each for each in arguments])]
        if self._script and self._script[0] != event:
            if self._log is None:
                raise RunDirectoryError(
                    f"the replay decides {event}, and the run decided {self._script[0]}",
                    why="a replay repeats the decisions of decisions.jsonl in order",
                    fix="replay with the version of Rillflow and the settings of the run",
                )
            self.leave(f"it decides {event}, and the interrupted run decided {self._script[0]}")
        self.position += 1
        if self._script:
            self._script.popleft()
        else:
            self._noted.append(event)

    def leave(self, reason: str) -> None:
        """Decide alone from here on: the run's later decisions are dropped, also from the file."""
        assert self._log is not None, "a replay never leaves its script"
        self.flush()
        self.has_lost_steps = any(event[0] == "form" for event in self._script)
        self._script.clear()
        self.left = reason
        self._log.cut_decisions(self.position)
        self.left_at, self.position = self.position, self.position + 1
        self._noted.append([LEFT_SCRIPT])

    def flush(self) -> None:
        """Write the decisions made since the last call, so that a killed process loses none of them."""
        if self._noted and self._log is not None:
            self._log.log_decisions(self._noted)
        self._noted = []


@dataclass(frozen=True, kw_only=True)
class RecordedDecisions:
    """The decisions of a run that a replay repeats."""

    run: Path
    """The run directory."""

    def after(self, position: int) -> list[Event]:
        """Return the decisions from a position on.

        Raises:
            RunDirectoryError: a line is damaged.
        """
        return decisions_of(self.run)[position:]


def left_at(events: Sequence[Event], position: int) -> int | None:
    """Return the first position, from the given one on, where a run decided anew; None if there is none."""
    found = (at for at in range(position, len(events)) if events[at] == [LEFT_SCRIPT])
    return next(found, None)


def decisions_of(run: Path) -> list[Event]:
    """Return the decisions of a run directory.

    Raises:
        RunDirectoryError: a line is damaged, or an older version of Rillflow wrote it.
    """
    found: list[Event] = []
    for line in read_lines(run / layout.DECISIONS).lines:
        events: Any = line.data.get("events")
        if "step" in line.data or not isinstance(events, list):
            raise line.refusal("it has a step, or no events", "this version writes one timeline of events")
        found += events
    return found
