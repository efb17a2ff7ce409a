"""Shards: the sequences of items on a set of workers, and the three ways to gather them.

    open ─ method, transforms, once ─> worker: a generator        next ─> one item       drop ─> at the end

A call for the next item is one message; the calls of a worker run in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from rillflow.errors import ClusterError
from rillflow.workers.backend import RankLost, Site
from rillflow_classic.operators.context import NotReady, Operator, PlanContext, SourceWorker, label_of
from rillflow_classic.worker_set import DEADLINE_S, WorkerCall, WorkerSet

Function = Callable[[Any], Any] | Operator
Transform = Callable[[PlanContext, Iterator[Any]], Iterator[Any]]
"""Changes a sequence of items; it passes NotReady on."""
Method = str | Callable[..., Any]
"""Name of a worker's method, or a function of the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerShards:
    """A sequence of items on every worker of a set."""

    workers: WorkerSet[Any]
    """The workers."""
    method: Method
    """Returns an item."""
    arguments: tuple[Any, ...] = ()
    """Its arguments."""
    transforms: tuple[Transform, ...] = ()
    """Transforms that run on the worker."""

    def rounds(self, context: PlanContext, *, one_by_one: bool) -> Iterator[Any]:
        """Yield lists of one item per worker, or their items one by one; see ``ParallelIterator``."""
        with closing(_Opened(self, context)) as opened:
            while True:
                items = yield from opened.round()
                if one_by_one:
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
                ready = [source for source, calls in flying.items() if calls[0].is_ready]
                for source in ready:
                    item = opened.read(source, flying[source].popleft())
                    if source not in opened.live:
                        del flying[source]
                        continue
                    context.source = source
                    yield item
                    flying[source].append(opened.ask(source))
                if not ready:
                    yield NotReady(calls=tuple(calls[0] for calls in flying.values()))


class _Opened:
    """Open iterators on the workers of a set."""

    def __init__(self, shards: WorkerShards, context: PlanContext) -> None:
        self._workers, self._context, self._key = shards.workers, context, uuid4().hex
        self.live = [SourceWorker(shards.workers, index) for index in range(shards.workers.size)]
        """Workers that are not lost."""
        sent = (self._key, shards.method, shards.arguments, shards.transforms)
        opening = shards.workers.submit_all(_open, *sent)
        for source, call in zip(tuple(self.live), opening, strict=True):
            self.read(source, call)

    def close(self) -> None:
        """Let the workers drop their iterators."""
        if self._workers.is_open:  # otherwise it ended with the backend
            for source in self.live:
                self._workers.submit(source.index, _drop, self._key)

    def ask(self, source: SourceWorker) -> WorkerCall:
        """Ask a worker for its next item."""
        return self._workers.submit(source.index, _next, self._key)

    def round(self) -> Generator[NotReady, None, list[tuple[SourceWorker, Any]]]:
        """Ask every worker for one item, and return all; repeat it while no worker has one."""
        while True:
            calls = {source: self.ask(source) for source in self.live}
            for call in calls.values():
                while not call.is_ready:
                    yield NotReady(calls=(call,))
            found = [(source, self.read(source, call)) for source, call in calls.items()]
            if items := [each for each in found if not isinstance(each[1], NotReady)]:
                return items
            yield NotReady.of([item for _, item in found])

    def read(self, source: SourceWorker, call: WorkerCall) -> Any:
        """Return a call's result; NotReady if its worker is lost, which is left out from then on.

        Raises:
            ClusterError: it was the last one.
        """
        try:
            return call.read(DEADLINE_S)
        except RankLost as error:
            self.live.remove(source)
            self._context.lost(source, error)
            if self.live:
                return NotReady()
            raise ClusterError(
                f"all {self._workers.size} workers of {self._workers.pool} are lost",
                why=f"the last one {error.what}",
                fix="read the log of the first loss, then resume the run from its last checkpoint",
            ) from error


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


def _open(site: Site, pool: str, key: str, method: Method, arguments: Any, transforms: Any) -> None:
    """Make the iterator of a worker."""
    worker = site.objects[pool]
    context, items = PlanContext(worker), _results(worker, method, arguments)
    for transform in transforms:
        items = transform(context, items)
    site.objects[key] = items


def _results(worker: Any, method: Method, arguments: tuple[Any, ...]) -> Iterator[Any]:
    call = getattr(worker, method) if isinstance(method, str) else partial(method, worker)
    while True:
        yield call(*arguments)


def _next(site: Site, pool: str, key: str) -> Any:  # noqa: ARG001
    """Return the next item of a worker's iterator."""
    return next(site.objects[key])


def _drop(site: Site, pool: str, key: str) -> None:  # noqa: ARG001
    """Forget a worker's iterator."""
    site.objects.pop(key, None)
