"""Static run: a static plan on some threads of this process.

    a level's reactions ── counter ──┬─> the caller's thread ─┐
                                     └─> worker 1, 2, ...    ─┴─> the level has ended

The workers share a level of which several reactions run: two lock operations for each worker and level,
whatever the number of messages. A level with one reaction runs in the caller's thread.

Loop of a worker (``_SharedLevel._loop``)
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
        self._shared = _SharedLevel(self._react, workers - 1)
        self.callback(self._shared.close)

    def _execute(self, due: Sequence[PlacedReaction]) -> int:
        return self._shared.run(due)

    def _react(self, due: PlacedReaction) -> None:
        try:
            self._write(due, self._calls[due.index](*self._given(due)))
        except Exception as error:  # noqa: BLE001  the caller's thread raises it
            due.error = error


class _SharedLevel:
    """Threads that share the reactions of a level with the caller's thread."""

    def __init__(self, react: Callable[[PlacedReaction], None], helpers: int) -> None:
        self._react = react
        self._due: Sequence[PlacedReaction] = ()
        self._next: Iterator[int] = count()
        self._is_closed = False
        self._starts = [_locked() for _ in range(helpers)]
        self._ends = [_locked() for _ in range(helpers)]
        self._threads = [
            threading.Thread(target=self._loop, args=locks, name=f"worker {number}", daemon=True)
            for number, locks in enumerate(zip(self._starts, self._ends, strict=True), 1)
        ]
        for each in self._threads:
            each.start()

    def run(self, due: Sequence[PlacedReaction]) -> int:
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
            if start.locked():  # not if an interrupted level has just released it
                start.release()
        for each in self._threads:
            each.join()

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
