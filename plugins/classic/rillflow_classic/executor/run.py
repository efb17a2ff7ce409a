"""Static run: execute a static plan tag by tag and level by level, on some threads.

    tag ── level 0: reactions ── level 1: reactions ── ... ──> delayed channels ──> the next tag
              └─ shared by all workers: each takes the next index of a counter

A value is written into its channel's slot and read there by reference: there is no queue, no object store and
no lock on its way. The workers share a level of which several reactions run: two lock operations for each
worker and level, whatever the number of messages. A level with one reaction runs in the caller's thread.

Results depend on no number of workers: the tags say which reactions run, and every channel has one writer.

Loop of a worker (``_SharedLevel._loop``)
    consumes      indices of the present level, from a counter that all workers share
    waits for     the start of the next level
    unblocked by  the caller's thread
    produces      values in slots, and the first error of its reactions
    shuts down    ``close``; the threads are daemons, so the end of the process ends them
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
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
    """Wake-ups of a worker: one for each worker and shared level, none for a message."""


class _Compiled:
    """A reaction with its method and slots."""

    def __init__(self, reaction: Reaction, state: Any, slot_of: Callable[[Channel], int]) -> None:
        self.name = reaction.name
        self.call = _method(reaction, state)
        self.inputs = tuple(
            slot_of(each) if isinstance(each, Channel) else [slot_of(one) for one in each]
            for each in reaction.inputs
        )
        self.watched = tuple(dict.fromkeys(slot_of(each) for each in reaction.reads))
        self.outputs = tuple(each.slot for each in reaction.outputs)
        self.result: Any = None
        self.error: Exception | None = None


class StaticRun(ExitStack):
    """A plan that runs. Close it, or use it in a ``with`` statement.

    Args:
        plan: the plan.
        workers: number of threads, the caller's included.
        traced: receives every reaction's result.

    Raises:
        GraphError: the plan cannot run, or a reactor lacks a method.
    """

    def __init__(self, plan: StaticPlan, *, workers: int = 1, traced: Traced | None = None) -> None:
        super().__init__()
        if workers < 1:
            raise GraphError(f"{plan.name} on {workers} workers", why="a plan needs at least 1")
        levels = plan.levels()
        self.counts = RunCounts()
        """What it has done so far."""
        self.reactors = {each.name: each.make() for each in plan.reactors}
        """The reactors' objects by name."""
        states = self.reactors
        self._levels = [
            [_Compiled(each, states[each.reactor.name], _slot_of) for each in level] for level in levels
        ]
        self._values: list[Any] = [None] * len(plan.channels)
        self._stamps = [-1] * len(plan.channels)  # the number of the tag at which the slot has its value
        self._delays = [
            (_slot_of(each.source), each.slot, each.after)
            for each in plan.channels
            if each.source is not None and each.after is not None
        ]
        self._timers = [each for each in plan.channels if each.period is not None]
        self._order = count()
        self._queue: list[tuple[Tag, int, int, Any]] = []  # tag, order, slot, value: of the caller's thread
        for each in self._timers:
            self._push(Tag(0, 0), each.slot, each.value)
        self._periods = {each.slot: each.period for each in self._timers if each.period}
        self._traced, self._number = traced, -1
        self._shared = _SharedLevel(self._react, workers - 1)
        self.callback(self._shared.close)

    def step(self) -> Tag | None:
        """Run the next tag; return it, or None if nothing is left.

        Raises:
            ClusterError: a reaction raised; its error is the cause.
        """
        if not self._queue:
            return None
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
        return tag

    def run(self, *, tags: int | None = None, until: int | None = None) -> RunCounts:
        """Run until nothing is left, a number of tags has run, or a time is reached."""
        while (tags is None or self.counts.tags < tags) and self._queue:
            if until is not None and self._queue[0][0].time > until:
                break
            self.step()
        return self.counts

    def value(self, channel: Channel) -> Any:
        """Return a channel's value at the last tag; None without one."""
        slot = _slot_of(channel)
        return self._values[slot] if self._stamps[slot] == self._number else None

    def _push(self, tag: Tag, slot: int, value: Any) -> None:
        """Give a slot a value at a later tag; of two values for one tag, the later pushed counts."""
        heapq.heappush(self._queue, (tag, next(self._order), slot, value))

    def _run_level(self, tag: Tag, level: list[_Compiled]) -> None:
        stamps, number = self._stamps, self._number
        due = [each for each in level if any(stamps[slot] == number for slot in each.watched)]
        self.counts.handovers += self._shared.run(due)
        for each in due:
            if each.error is not None:
                error, each.error = each.error, None
                raise ClusterError(
                    f"reaction {each.name} failed at time {tag.time}, microstep {tag.microstep}",
                    why=f"{type(error).__name__}: {error}",
                ) from error
            self.counts.messages += sum(stamps[slot] == number for slot in each.outputs)
            if self._traced is not None:
                self._traced(tag, each.name, each.result)
        self.counts.reactions += len(due)

    def _react(self, due: _Compiled) -> None:
        """Run one reaction; it writes only its own slots."""
        values, stamps, number = self._values, self._stamps, self._number
        given = [
            (values[each] if stamps[each] == number else None)
            if isinstance(each, int)
            else [values[one] if stamps[one] == number else None for one in each]
            for each in due.inputs
        ]
        try:
            due.result = due.call(*given)
            results = due.result if len(due.outputs) > 1 else (due.result,)
            for slot, value in zip(due.outputs, results, strict=True):
                if value is not None:
                    values[slot], stamps[slot] = value, number
        except Exception as error:  # noqa: BLE001  the caller's thread raises it
            due.error = error


class _SharedLevel:
    """Threads that share the reactions of a level with the caller's thread."""

    def __init__(self, react: Callable[[_Compiled], None], helpers: int) -> None:
        self._react = react
        self._due: list[_Compiled] = []
        self._next: Iterator[int] = count()
        self._is_closed = False
        self._starts = [_locked() for _ in range(helpers)]
        self._ends = [_locked() for _ in range(helpers)]
        for number, locks in enumerate(zip(self._starts, self._ends, strict=True), 1):
            threading.Thread(target=self._loop, args=locks, name=f"worker {number}", daemon=True).start()

    def run(self, due: list[_Compiled]) -> int:
        """Run reactions; return the number of threads that were woken."""
        woken = min(len(due) - 1, len(self._starts))
        if woken < 1:
            for each in due:
                self._react(each)
            return 0
        self._due, self._next = due, count()
        for start in self._starts[:woken]:
            start.release()
        self._take()
        for end in self._ends[:woken]:
            end.acquire()
        return woken

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        for start in self._starts:
            start.release()

    def _loop(self, start: threading.Lock, end: threading.Lock) -> None:
        while True:
            start.acquire()
            if self._is_closed:
                return
            self._take()
            end.release()

    def _take(self) -> None:
        """Run the next reactions until none is left; ``next`` of a counter is atomic."""
        due, numbers = self._due, self._next
        for index in numbers:
            if index >= len(due):
                return
            self._react(due[index])


def _locked() -> threading.Lock:
    """Return a lock that one thread waits for until another one releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _slot_of(channel: Channel) -> int:
    """Return the slot that holds a channel's value: that of its source, if no delay is between."""
    while channel.source is not None and channel.after is None:
        channel = channel.source
    return channel.slot


def _method(reaction: Reaction, state: Any) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(state, reaction.method, None)
    if not callable(found):
        raise GraphError(
            f"reactor {reaction.reactor.name!r} has no method {reaction.method!r}",
            why=f"it is a {type(state).__name__}",
            fix="name one of its methods in react",
        )
    return found
