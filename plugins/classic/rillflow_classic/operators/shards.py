"""Shards: the sequences of items on a set of workers, and the ways to gather them.

    next (first with the method and the transforms) ─> worker: a generator ─> one item     drop ─> at the end

A call for the next item is one message; the calls of a worker run in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from operator import or_
from typing import Any
from uuid import uuid4

from rillflow.errors import ClusterError
from rillflow.workers.backend import RankDied, RankLost, Site
from rillflow_classic.operators.context import NotReady, Operator, PlanContext, SourceWorker, label_of
from rillflow_classic.operators.nodes import PlanNode
from rillflow_classic.worker_set import DEADLINE_S, Method, WorkerCall, WorkerSet, bound, wait_any

Function = Callable[[Any], Any] | Operator
Transform = Callable[[PlanContext, Iterator[Any]], Iterator[Any]]
"""Changes a sequence of items; it passes NotReady on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerShards(PlanNode):
    """A sequence of items on every worker of a set."""

    workers: WorkerSet[Any]
    """The workers."""
    method: Method
    """Returns an item."""
    arguments: tuple[Any, ...] = ()
    """Its arguments."""
    transforms: tuple[Transform, ...] = ()
    """Transforms that run on the worker."""
    is_parallel = True

    def rounds(self, context: PlanContext, *, one_by_one: bool) -> Iterator[Any]:
        """Yield lists of one item per worker, or their items one by one; see ``ParallelIterator``."""
        with closing(_Opened(self, context)) as opened:
            while True:
                calls, found = {source: opened.ask(source) for source in opened.live}, []
                for source, call in calls.items():
                    found.append((source, (yield from opened.read(source, call))))
                items = [each for each in found if not isinstance(each[1], NotReady)]
                if not items:
                    yield reduce(or_, (item for _, item in found))
                elif one_by_one:
                    for context.source, item in items:
                        yield item
                else:
                    context.source = None
                    yield [item for _, item in items]

    def as_they_come(self, context: PlanContext, num_async: int) -> Iterator[Any]:
        """Yield items as they come; see ``ParallelIterator.gather_async``."""
        with closing(_Opened(self, context)) as opened:
            flying = {source: deque(opened.ask(source) for _ in range(num_async)) for source in opened.live}
            while True:
                first = [calls[0] for calls in flying.values()]
                if not context.looks:
                    wait_for_any(first)
                source = next((each for each, calls in flying.items() if calls[0].is_ready), None)
                if source is None:
                    yield NotReady(calls=tuple(first))
                    continue
                calls = flying.pop(source)
                item = yield from opened.read(source, calls.popleft())
                if source in opened.live:
                    flying[source] = calls  # behind the others, whose turn is next
                    context.source = source
                    yield item
                    calls.append(opened.ask(source))


class _Opened:
    """Open iterators on the workers of a set."""

    def __init__(self, shards: WorkerShards, context: PlanContext) -> None:
        self._workers, self._context, self._key = shards.workers, context, uuid4().hex
        self.live = [SourceWorker(shards.workers, index) for index in range(shards.workers.size)]
        """Workers that are not lost."""
        self._opening = dict.fromkeys(self.live, (shards.method, shards.arguments, shards.transforms))

    def close(self) -> None:
        """Let the workers drop their iterators."""
        if self._workers.is_open:  # otherwise it ended with the backend
            for source in self.live:
                self._workers.submit(source.index, _drop, self._key)

    def ask(self, source: SourceWorker) -> WorkerCall:
        """Ask a worker for its next item."""
        return self._workers.submit(source.index, _next, self._key, *self._opening.pop(source, ()))

    def read(self, source: SourceWorker, call: WorkerCall) -> Generator[NotReady, None, Any]:
        """Return a call's result; NotReady if its worker is lost, which is left out from then on.

        Raises:
            RankDied: it was the last one.
            ClusterError: it does not answer.
        """
        while self._context.looks and not call.is_ready:
            yield NotReady(calls=(call,))
        self._context.moves += 1
        try:
            return call.read(DEADLINE_S)
        except TimeoutError:
            raise unanswered([call]) from None
        except RankLost as error:
            self.live.remove(source)
            self._context.lost(source, error)
            if self.live:
                return NotReady()
            raise RankDied(
                f"no worker of {self._workers.pool!r} is left; there were {self._workers.size}",
                why=f"the last one {error.what}: {error.why}",
                fix="correct what ended it, then run the same command to resume",
            ) from error


def wait_for_any(calls: Sequence[WorkerCall]) -> None:
    """Wait until one of several calls has ended.

    Raises:
        ClusterError: no worker answers.
    """
    if not wait_any(calls, DEADLINE_S):
        raise unanswered(calls)


def unanswered(calls: Sequence[WorkerCall]) -> ClusterError:
    """Return the error for calls that do not end."""
    return ClusterError(
        f"no worker has answered in {DEADLINE_S:g} s",
        why=f"calls of workers {sorted({each.worker for each in calls})} do not end",
        fix="look for an environment that hangs, or make a call shorter",
    )


def transformed(
    function: Function, is_flat: bool, context: PlanContext, items: Iterator[Any]
) -> Iterator[Any]:
    """Apply a function to items."""
    label = label_of(function)
    apply = function.begin(context) if isinstance(function, Operator) else function
    for item in items:
        if isinstance(item, NotReady):
            yield item
            continue
        began_s = time.perf_counter()
        while isinstance(result := apply(item), NotReady):
            yield result
            began_s = time.perf_counter()
        context.worked(label, began_s)
        context.moves += 1
        if is_flat:
            yield from result
        else:
            yield result


def _next(site: Site, pool: str, key: str, *opening: Any) -> Any:
    """Return the next item of a worker's iterator; the first call opens it."""
    if opening:
        site.objects[key] = _opened(site.objects[pool], *opening)
    return next(site.objects[key])


def _opened(
    worker: Any, method: Method, arguments: tuple[Any, ...], transforms: Sequence[Transform]
) -> Iterator[Any]:
    """Return the iterator of a worker."""
    call, context = bound(worker, method), PlanContext(worker)
    items: Iterator[Any] = (call(*arguments) for _ in repeat(None))
    for transform in transforms:
        items = transform(context, items)
    return items


def _drop(site: Site, pool: str, key: str) -> None:  # noqa: ARG001
    """Forget a worker's iterator."""
    site.objects.pop(key, None)
