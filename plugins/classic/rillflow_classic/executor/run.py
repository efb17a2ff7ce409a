"""Plan run: execute a static plan tag by tag and level by level.

    tag ── level 0: reactions ── level 1: reactions ── ... ──> delayed channels ──> the next tag
              └─ ``_execute``: on threads here (threads.py), or on the ranks of a backend (on_backend.py)

A value is written into its channel's slot and read there by reference: there is no queue, no object store and
no lock on its way. Results depend on no number of workers: the tags say which reactions run, and every
channel has one writer.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

from rillflow.errors import ClusterError, GraphError
from rillflow_classic.executor.plan import Channel, Reaction, StaticPlan, Tag

Traced = Callable[[Tag, str, Any], None]
"""Receives the tag, the reaction's name and its result, in an order that no number of workers changes."""


@dataclass(kw_only=True)
class RunCounts:
    """What a run has done."""

    tags: int = 0
    """Tags."""
    reactions: int = 0
    """Reactions that ran."""
    messages: int = 0
    """Values that were written into a channel."""
    handovers: int = 0
    """Wake-ups of a worker: at most one for each worker and level of a tag, none for a message."""


class PlacedReaction:
    """A reaction with its slots, and what it has returned at the present tag."""

    def __init__(self, reaction: Reaction) -> None:
        self.name, self.method, self.index = reaction.name, reaction.method, reaction.index
        self.reactor = reaction.reactor
        self.inputs = tuple(
            _slot_of(each) if isinstance(each, Channel) else [_slot_of(one) for one in each]
            for each in reaction.inputs
        )
        self.watched = tuple(dict.fromkeys(_slot_of(each) for each in reaction.reads))
        self.outputs = tuple(each.slot for each in reaction.outputs)
        self.result: Any = None
        self.error: Exception | None = None


class PlanRun(ExitStack, ABC):
    """A plan that runs. Close it, or use it in a ``with`` statement.

    Args:
        plan: the plan.
        traced: receives every reaction's result.

    Raises:
        GraphError: the plan cannot run.
    """

    def __init__(self, plan: StaticPlan, traced: Traced | None = None) -> None:
        super().__init__()
        self._levels = [[PlacedReaction(each) for each in level] for level in plan.levels()]
        self.counts = RunCounts()
        """What it has done so far."""
        self._name, self._traced = plan.name, traced
        self._values: list[Any] = [None] * len(plan.channels)
        self._stamps = [-1] * len(plan.channels)  # the number of the tag at which the slot has its value
        self._delays = [
            (_slot_of(each.source), each.slot, each.after)
            for each in plan.channels
            if each.source is not None and each.after is not None
        ]
        self._periods = {each.slot: each.period for each in plan.channels if each.period}
        self._number, self._order = -1, count()
        self._is_whole = True  # whether the last tag ended
        self._queue: list[tuple[Tag, int, int, Any]] = []  # tag, order, slot, value
        for each in plan.channels:
            if each.period is not None:
                self._push(Tag(0, 0), each.slot, each.value)

    @abstractmethod
    def _execute(self, due: Sequence[PlacedReaction]) -> int:
        """Run the reactions of one level, each with ``_given``, ``_write``, or an error in ``error``.

        Returns:
            The number of workers that were woken.
        """

    def step(self) -> Tag | None:
        """Run the next tag; return it, or None if nothing is left.

        Raises:
            ClusterError: a reaction raised, and its error is the cause; or an earlier tag did not end.
        """
        if not self._queue:
            return None
        if not self._is_whole:
            raise ClusterError(
                f"{self._name} is asked for a tag after one that did not end",
                why="some of its reactions have run and others have not",
                fix="begin a new run",
            )
        self._is_whole = False
        tag = self._queue[0][0]
        self._number += 1
        while self._queue and self._queue[0][0] == tag:
            _, _, slot, value = heapq.heappop(self._queue)
            self._values[slot], self._stamps[slot] = value, self._number
            if slot in self._periods:
                self._push(Tag(tag.time + self._periods[slot], 0), slot, value)
        for level in self._levels:
            self._run_level(tag, level)
        for source, target, after in self._delays:
            if self._stamps[source] == self._number:
                later = Tag(tag.time + after, 0) if after else Tag(tag.time, tag.microstep + 1)
                self._push(later, target, self._values[source])
        self.counts.tags += 1
        self._is_whole = True
        return tag

    def run(self, *, tags: int | None = None, until: int | None = None) -> RunCounts:
        """Run until nothing is left, the run has made ``tags`` tags in all, or time ``until`` has passed."""
        while (tags is None or self.counts.tags < tags) and self._queue:
            if until is not None and self._queue[0][0].time > until:
                break
            self.step()
        return self.counts

    def value(self, channel: Channel) -> Any:
        """Return a channel's value at the last tag; None without one."""
        return self._at(_slot_of(channel))

    def _push(self, tag: Tag, slot: int, value: Any) -> None:
        """Give a slot a value at a later tag; of two values for one tag, the later pushed counts."""
        heapq.heappush(self._queue, (tag, next(self._order), slot, value))

    def _run_level(self, tag: Tag, level: list[PlacedReaction]) -> None:
        stamps, number = self._stamps, self._number
        due = [each for each in level if any(stamps[slot] == number for slot in each.watched)]
        if not due:
            return
        self.counts.handovers += self._execute(due)
        for each in due:
            if each.error is not None:
                raise ClusterError(
                    f"reaction {each.name} failed at time {tag.time}, microstep {tag.microstep}",
                    why=f"{type(each.error).__name__}: {each.error}",
                ) from each.error
            self.counts.messages += sum(stamps[slot] == number for slot in each.outputs)
            if self._traced is not None:
                self._traced(tag, each.name, each.result)
        self.counts.reactions += len(due)

    def _at(self, slot: int) -> Any:
        return self._values[slot] if self._stamps[slot] == self._number else None

    def _given(self, due: PlacedReaction) -> list[Any]:
        """Return the inputs of a reaction at the present tag."""
        return [
            self._at(each) if isinstance(each, int) else [self._at(one) for one in each]
            for each in due.inputs
        ]

    def _write(self, due: PlacedReaction, result: Any) -> None:
        """Write the result of a reaction into its slots, which no other one writes.

        Raises:
            GraphError: the result is no tuple with a value for each of several outputs.
        """
        due.result = result
        if len(due.outputs) == 1:
            if result is not None:
                self._values[due.outputs[0]], self._stamps[due.outputs[0]] = result, self._number
        elif not isinstance(result, tuple) or len(result) != len(due.outputs):
            raise GraphError(
                f"{due.name} returned a {type(result).__name__}",
                why=f"it has {len(due.outputs)} outputs",
                fix="return a tuple with a value for each; None is no value",
            )
        else:
            for slot, value in zip(due.outputs, result, strict=True):
                if value is not None:
                    self._values[slot], self._stamps[slot] = value, self._number


def _slot_of(channel: Channel) -> int:
    """Return the slot that holds a channel's value: that of its source, if no delay is between."""
    while channel.source is not None and channel.after is None:
        channel = channel.source
    return channel.slot


def method_of(reactor: str, state: object, method: str) -> Callable[..., Any]:
    """Return a reaction's method of a reactor's object.

    Raises:
        GraphError: there is none.
    """
    found: Callable[..., Any] | None = getattr(state, method, None)
    if not callable(found):
        raise GraphError(
            f"reactor {reactor!r} has no method {method!r}",
            why=f"it is a {type(state).__name__}",
            fix="name one of its methods in react",
        )
    return found
