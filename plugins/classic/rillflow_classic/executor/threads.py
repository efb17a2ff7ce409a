"""Static run: a static plan on some threads of this process.

    a level's reactions ── counter ──┬─> the caller's thread ─┐
                                     └─> worker 1, 2, ...    ─┴─> the level has ended

The workers share a level of which several reactions run: two lock operations for each worker and level,
whatever the number of messages. A level with one reaction runs in the caller's thread.

Loop of a worker (``_Helper._loop``)
    consumes      indices of the present level, from a counter that all workers share
    waits for     the start of the next level
    unblocked by  the caller's thread
    produces      values in slots, and errors of reactions
    shuts down    ``close``, which waits for reactions that still run; the threads are daemons
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from rillflow.errors import GraphError
from rillflow_classic.executor.plan import StaticPlan
from rillflow_classic.executor.run import PlacedReaction, PlanRun, Traced, method_of


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
        self.reactors = {each.name: each.make() for each in plan.reactors}
        """The reactors' objects by name."""
        self._calls = [
            method_of(each.reactor.name, self.reactors[each.reactor.name], each.method)
            for each in plan.reactions
        ]
        self._due: Sequence[PlacedReaction] = ()
        self._next: Iterator[int] = count()
        self._helpers = [_Helper(self._take) for _ in range(workers - 1)]
        for each in self._helpers:
            self.callback(each.close)

    def _execute(self, due: Sequence[PlacedReaction]) -> int:
        self._due, self._next = due, count()
        woken = self._helpers[: len(due) - 1]
        for each in woken:
            each.begin.release()
        self._take()
        for each in woken:
            each.end.acquire()
        return len(woken)

    def _take(self) -> None:
        """Run the next reactions of the level until none is left; ``next`` of a counter is atomic."""
        due, numbers = self._due, self._next
        for index in numbers:
            if index >= len(due):
                return
            self._react(due[index])

    def _react(self, due: PlacedReaction) -> None:
        try:
            self._write(due, self._calls[due.index](*self._given(due)))
        except BaseException as error:  # noqa: BLE001  the caller's thread raises it when the level has ended
            due.error = error


class _Helper:
    """A thread that takes part in a level after ``begin`` is released, and then releases ``end``."""

    def __init__(self, take: Callable[[], None]) -> None:
        self.begin, self.end = threading.Lock(), threading.Lock()
        self.begin.acquire()
        self.end.acquire()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, args=(take,), name="static plan", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after a reaction that still runs."""
        self._is_closed = True
        if self.begin.locked():  # not if an interrupted level has just released it
            self.begin.release()
        self._thread.join()

    def _loop(self, take: Callable[[], None]) -> None:
        while True:
            self.begin.acquire()
            if self._is_closed:
                return
            take()
            self.end.release()
