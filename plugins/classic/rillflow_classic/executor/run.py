"""Plan runs: execute a static plan tag by tag and level by level, on threads here or on the ranks of a pool.

    tag ── level 0: reactions ── level 1: reactions ── ... ──> delayed channels ──> the next tag
             ├─ StaticRun    a counter ──┬─> the caller's thread ─┐
             │                           └─> thread 1, 2, ...    ─┴─> results ──> slots
             └─ BackendRun   one call for each rank: (reaction, inputs) ──> ReactorHost ──> results ──> slots

A value is written into its channel's slot and read there by reference: there is no queue, no object store and
no lock on its way. Results depend on no number of workers: the tags say which reactions run, and every
channel has one writer. Threads share a level of which several reactions run: one wake-up for each thread and
level, whatever the number of messages. A backend's values pass through this process, so that form is for
reactors that need a process or a machine of their own, and not for speed with small ones.

Loop of a thread (``StaticRun._help``)
    consumes      indices of the present level, from a counter that all threads share
    waits for     the start of the next level
    unblocked by  the caller's thread
    produces      results, and errors of reactions
    shuts down    ``close``, which waits for reactions that still run; the threads are daemons
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from rillflow.errors import ClusterError, GraphError
from rillflow.workers.backend import Backend
from rillflow_classic.executor.plan import DelayedChannel, PlanChannel, Reaction, StaticPlan, Tag
from rillflow_classic.worker_set import WorkerSet, bound

Traced = Callable[[Tag, str, Any], None]
"""Receives the tag, the reaction's name and its result, in an order that no number of workers changes."""
Outcome = tuple[Any, BaseException | None]
"""Result of a reaction, and the error that it raised, or None."""


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


class ReactorHost:
    """The reactors of one of several ranks.

    Raises:
        GraphError: a reactor lacks the method of a reaction.
    """

    def __init__(self, plan: StaticPlan, ranks: int, rank: int) -> None:
        own = [each for each in plan.reactors if each.index % ranks == rank]
        self.objects = {each.name: each.make() for each in own}
        """The reactors' objects by name."""
        self._calls = {each.slot: self._call_of(each) for each in plan.reactions if each.reactor in own}

    def react(self, slot: int, given: list[Any]) -> Outcome:
        """Run the reaction of a slot with its inputs."""
        try:
            return self._calls[slot](*given), None
        except BaseException as error:  # noqa: BLE001  the run raises it when the level has ended
            return None, error

    def react_all(self, *reactions: tuple[int, list[Any]]) -> list[Outcome]:
        """Run reactions in their order."""
        return [self.react(*each) for each in reactions]

    def _call_of(self, reaction: Reaction) -> Callable[..., Any]:
        state, method = self.objects[reaction.reactor.name], reaction.method
        try:
            return bound(state, method)
        except AttributeError:
            raise GraphError(
                f"reactor {reaction.reactor.name!r} has no method {method!r}",
                why=f"it is a {type(state).__name__}",
                fix="name one of its methods in react",
            ) from None


class PlanRun(ExitStack, ABC):
    """A plan that runs. Close it, or use it in a ``with`` statement.

    Args:
        plan: the plan.
        traced: receives every reaction's result.

    Raises:
        GraphError: the plan cannot run.
    """

    def __init__(self, plan: StaticPlan, traced: Traced | None) -> None:
        super().__init__()
        self._levels = plan.levels()
        self.counts = RunCounts()
        """What it has done so far."""
        self._name, self._traced = plan.name, traced
        self._empty = [None] * len(plan.channels)
        self._values: list[Any] = list(self._empty)  # of all slots at the present tag; None is no value
        self._outcomes: list[Outcome] = [(None, None)] * len(plan.channels)  # by slot of the reaction
        self._delays = [
            (each.reads[0].slot, each.slot, each.after)
            for each in plan.channels
            if isinstance(each, DelayedChannel)
        ]
        starts = {each.slot: each.value for each in plan.channels if each.value is not None}
        self._later: dict[Tag, dict[int, Any]] = {Tag(0, 0): starts}  # values of slots at later tags
        self._is_whole = True  # whether the last tag ended

    @abstractmethod
    def _execute(self, due: Sequence[Reaction]) -> int:
        """Run the reactions of one level with their ``_given`` inputs, and keep ``_outcomes``.

        Returns:
            The number of workers that were woken.
        """

    def step(self) -> Tag | None:
        """Run the next tag; return it, or None if nothing is left.

        Raises:
            ClusterError: a reaction raised, and its error is the cause; or an earlier tag did not end.
        """
        if not self._is_whole:
            raise ClusterError(
                f"{self._name} is asked for a tag after one that did not end",
                why="some of its reactions have run and others have not",
                fix="begin a new run",
            )
        if not self._later:
            return None
        self._is_whole, tag, values = False, min(self._later), self._values
        values[:] = self._empty
        for slot, value in self._later.pop(tag).items():
            values[slot] = value
        for level in self._levels:
            due = [each for each in level if any(values[one.slot] is not None for one in each.reads)]
            if due:
                self.counts.handovers += self._execute(due)
            for each in due:
                self._end(tag, each)
        for source, target, after in self._delays:
            if (value := values[source]) is not None:
                later = Tag(tag.time + after, 0) if after else Tag(tag.time, tag.microstep + 1)
                self._later.setdefault(later, {})[target] = value
        self.counts.tags += 1
        self._is_whole = True
        return tag

    def run(self, *, tags: int | None = None) -> RunCounts:
        """Run until nothing is left, or the run has made ``tags`` tags in all."""
        while self.counts.tags != tags and self.step() is not None:
            pass
        return self.counts

    def value(self, channel: PlanChannel) -> Any:
        """Return a channel's value at the last tag; None without one."""
        return self._values[channel.slot]

    def _given(self, due: Reaction) -> list[Any]:
        """Return the inputs of a reaction at the present tag."""
        values = self._values
        return [
            values[each.slot] if isinstance(each, PlanChannel) else [values[one.slot] for one in each]
            for each in due.inputs
        ]

    def _end(self, tag: Tag, ended: Reaction) -> None:
        """Write the result of a reaction into its slot, or raise its error."""
        result, error = self._outcomes[ended.slot]
        if isinstance(error, Exception):
            raise ClusterError(
                f"reaction {ended.name} failed at time {tag.time}, microstep {tag.microstep}",
                why=f"{type(error).__name__}: {error}",
            ) from error
        if error is not None:
            raise error  # such as Ctrl-C
        self._values[ended.slot] = result
        self.counts.messages += result is not None
        self.counts.reactions += 1
        if self._traced is not None:
            self._traced(tag, ended.name, result)


class StaticRun(PlanRun):
    """A plan that runs on threads; see PlanRun.

    Args:
        plan: the plan.
        workers: number of threads, the caller's included.
        traced: receives every reaction's result.

    Raises:
        GraphError: the plan cannot run, or a reactor lacks a method.
    """

    def __init__(self, plan: StaticPlan, *, workers: int = 1, traced: Traced | None = None) -> None:
        super().__init__(plan, traced)
        if workers < 1:
            raise GraphError(f"{plan.name} on {workers} workers", why="a plan needs at least 1")
        self._host = ReactorHost(plan, 1, 0)
        self.reactors = self._host.objects
        """The reactors' objects by name."""
        self._due: Sequence[Reaction] = ()
        self._next: Iterator[int] = count()
        self._begun, self._ended = SimpleQueue[bool](), SimpleQueue[bool]()
        self._threads = [threading.Thread(target=self._help, daemon=True) for _ in range(workers - 1)]
        for each in self._threads:
            each.start()
            self.callback(each.join)
        for _ in self._threads:
            self.callback(self._begun.put, False)

    def _execute(self, due: Sequence[Reaction]) -> int:
        self._due, self._next = due, count()
        woken = min(len(self._threads), len(due) - 1)
        for _ in range(woken):
            self._begun.put(True)
        self._take()
        for _ in range(woken):
            self._ended.get()
        return woken

    def _take(self) -> None:
        """Run the next reactions of the level until none is left; ``next`` of a counter is atomic."""
        due, numbers = self._due, self._next
        for number in numbers:
            if number >= len(due):
                return
            slot = due[number].slot
            self._outcomes[slot] = self._host.react(slot, self._given(due[number]))

    def _help(self) -> None:
        while self._begun.get():
            self._take()
            self._ended.put(True)


class BackendRun(PlanRun):
    """A plan that runs on the ranks of a pool; see PlanRun.

    Args:
        plan: the plan; its reactors are made by functions of a module, or partials of these.
        backend: an open backend of the core: inline, processes of this machine, or Ray.
        pool: name of the pool.
        traced: receives every reaction's result.

    Raises:
        GraphError: the plan cannot run, or a reactor lacks a method.
    """

    def __init__(
        self, plan: StaticPlan, backend: Backend, pool: str, *, traced: Traced | None = None
    ) -> None:
        super().__init__(plan, traced)
        self._hosts = WorkerSet(backend, pool, partial(ReactorHost, plan, backend.pools[pool]))

    def _execute(self, due: Sequence[Reaction]) -> int:
        by_rank = defaultdict[int, list[Reaction]](list)
        for each in due:
            by_rank[each.reactor.index % self._hosts.size].append(each)
        calls = {
            rank: self._hosts.call(rank, "react_all", *((each.slot, self._given(each)) for each in placed))
            for rank, placed in by_rank.items()
        }
        for rank, call in calls.items():
            for each, outcome in zip(by_rank[rank], call.read(), strict=True):
                self._outcomes[each.slot] = outcome
        return len(calls)
