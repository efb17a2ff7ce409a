"""Iterators: lazy sequences of items on workers and in the controller's process.

    from_workers ─> ParallelIterator ── transforms run at the source worker ──> gather ─┐
                                                                                        v
    concurrently, queue, duplicate  <── transforms run here ── LocalIterator <──────────┘

An operator makes a node of the plan's graph; nothing starts before the last iterator is iterated. One thread
pulls all flows. An operator that has no item now says so with ``NotReady``, so that ``concurrently`` goes on
with another flow, and only a plan of which every flow waits blocks.

The loop of a plan (``LocalIterator.__iter__``)
    consumes      results of worker calls, in the order of the gathers
    waits for     the calls that the waiting flows name
    unblocked by  any of these calls, or the loss of its worker
    produces      items
    shuts down    healthy: workers drop their iterators. A lost worker is left out; without any, ClusterError
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import repeat
from operator import or_
from typing import Any, Self

from rillflow.errors import GraphError
from rillflow_classic.operators.context import NotReady, Operator, PlanContext, label_of
from rillflow_classic.operators.nodes import PlanNode
from rillflow_classic.operators.shards import (
    Function,
    Transform,
    WorkerShards,
    transformed,
    wait_for_any,
)
from rillflow_classic.worker_set import Method, WorkerSet, wait_any

POLL_S = 0.001
"""Pause before a source outside the plan is asked again."""
AT_ONCE = 20
"""Items of one flow before an asynchronous union goes on to the next one."""
Start = Callable[[PlanContext], Iterator[Any]]
Weight = int | str


class _Transforms(PlanNode):
    """Transforms of both iterators: at the source worker before a gather, in this process after it."""

    @abstractmethod
    def _then(self, label: str, function: Function, *, is_flat: bool = False) -> Self:
        """Apply a function; if ``is_flat``, each element of its result is an item."""

    def for_each(self, function: Function) -> Self:
        """Apply a function to every item; while it returns NotReady, it is called again later."""
        return self._then(label_of(function), function)

    def combine(self, function: Function) -> Self:
        """Apply a function that returns any number of items: for_each, then flatten."""
        return self._then(f"combine {label_of(function)}", function, is_flat=True)

    def flatten(self) -> Self:
        """Return the elements of every item, one by one."""
        return self._then("flatten", iter, is_flat=True)

    def filter(self, function: Callable[[Any], bool]) -> Self:
        """Keep the items for which a function is true."""
        label = f"filter {label_of(function)}"
        return self._then(label, lambda item: (item,) if function(item) else (), is_flat=True)

    def batch(self, size: int) -> Self:
        """Join ``size`` items into a list."""
        _at_least_one("a batch", size)
        return self._then(f"batch {size}", collect("", size, lambda _, items: items), is_flat=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalIterator(_Transforms):
    """Items in this process.

    Example:
        plan = from_workers(actors, "sample").gather_async().for_each(train)
        print(as_text(plan.graph("mine")))
        for metrics in plan: ...
    """

    start: Start
    """Begins the sequence of items for one run of the plan; it yields NotReady while there is none."""

    def __iter__(self) -> Iterator[Any]:
        return self.run(PlanContext())

    def run(self, context: PlanContext) -> Iterator[Any]:
        """Check the plan, and run it with a given context.

        Raises:
            GraphError: the plan cannot run; or all its flows wait for each other.
            ClusterError: all workers of a source are lost, or do not answer.
        """
        self.check()
        return _driven(self.start(context), context)

    def zip_with_source(self) -> LocalIterator:
        """Pair every item with the worker it came from: ``(SourceWorker, item)``."""
        paired = Operator(label="zip_with_source", begin=lambda context: lambda item: (context.source, item))
        return self.for_each(paired)

    def duplicate(self, copies: int, capacity: int = 16) -> tuple[LocalIterator, ...]:
        """Return iterators that each have every item.

        Back-pressure: a copy that is ``capacity`` items ahead of another one waits for it. If the plan stops
        because of that, the error names the slow copy.
        """
        _at_least_one("the number of copies", copies)
        _at_least_one("the capacity of a copy", capacity)
        split = PlanNode(label=f"duplicate {copies}", inputs=(self,), copies=copies)

        def started(index: int, context: PlanContext) -> Iterator[Any]:
            if split not in context.shared:
                context.shared[split] = self.start(context), [deque[Any]() for _ in range(copies)]
            items, held = context.shared[split]
            while True:
                if held[index]:
                    yield _popped(held[index], context)
                elif slow := [place for place, each in enumerate(held) if len(each) >= capacity]:
                    why = f"copy {slow[0]} of {split.label} is {capacity} items behind copy {index}"
                    yield NotReady(why=(why,))
                elif isinstance(item := next(items, held), NotReady):
                    yield item
                elif item is held:  # the end
                    return
                else:
                    for each in held:
                        each.append((item, context.source))

        return tuple(
            LocalIterator(label=f"copy {index}", inputs=(split,), start=partial(started, index))
            for index in range(copies)
        )

    def _then(self, label: str, function: Function, *, is_flat: bool = False) -> Self:
        def start(context: PlanContext) -> Iterator[Any]:
            return transformed(function, is_flat, context, self.start(context))

        queue = function.queue if isinstance(function, Operator) else None
        return type(self)(label=label, inputs=(self,), queue=queue, start=start)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelIterator(WorkerShards, _Transforms):
    """Items on every worker of a set; see ``from_workers``. It is read by a gather, and by only one."""

    def __iter__(self) -> Iterator[Any]:
        self.check()
        return iter(())

    def batch_across_workers(self) -> LocalIterator:
        """Return lists of one item of each worker, in their order.

        A barrier: the workers are called only when the next list is wanted. So no worker runs between two
        lists, and each message sent in between, such as new weights, precedes the next items.
        """
        start = partial(self.rounds, one_by_one=False)
        return LocalIterator(label="batch_across_workers", inputs=(self,), start=start)

    def gather_sync(self) -> LocalIterator:
        """Return the items of ``batch_across_workers`` one by one: the same barrier between two rounds."""
        start = partial(self.rounds, one_by_one=True)
        return LocalIterator(label="gather_sync", inputs=(self,), start=start)

    def gather_async(self, num_async: int = 1) -> LocalIterator:
        """Return items as they come, those of one worker in its order.

        A worker is called again only when the item after its own is wanted, so messages sent to it while
        its item is handled precede its next call. With k = ``num_async`` calls in flight, k - 1 are already
        in the worker's mailbox: an item is made at most k - 1 items before the newest message.
        """
        _at_least_one("num_async", num_async)
        start = partial(self.as_they_come, num_async=num_async)
        return LocalIterator(label=f"gather_async {num_async}", inputs=(self,), start=start)

    def _then(self, label: str, function: Function, *, is_flat: bool = False) -> Self:
        if isinstance(function, Operator) and function.queue is not None:
            why, fix = "a queue is in the controller's process", "fill it after a gather"
            raise GraphError(f"{label} runs on {self.role}", why=why, fix=fix)
        last: Transform = partial(transformed, function, is_flat)
        return replace(self, label=label, inputs=(self,), transforms=(*self.transforms, last))


def from_workers(workers: WorkerSet[Any], method: Method, *arguments: Any) -> ParallelIterator:
    """Return an endless iterator over the results of a method on every worker.

    Args:
        workers: the workers.
        method: name of the method, or a function that is called as ``method(worker, *arguments)``.
        arguments: its arguments.
    """
    label = method if isinstance(method, str) else label_of(method).strip("_")
    return ParallelIterator(
        label=label, role=workers.pool, workers=workers, method=method, arguments=arguments
    )


def from_items(items: Iterable[Any], label: str = "items") -> LocalIterator:
    """Return an iterator over items of this process."""
    return LocalIterator(label=label, start=lambda _: iter(items))


def from_function(function: Callable[[], Any], label: str = "") -> LocalIterator:
    """Return an endless iterator over a function's results.

    It returns ``NotReady(polls=True)`` while something outside the plan, such as a stream, has no item.
    """
    return LocalIterator(
        label=label or label_of(function), start=lambda _: (function() for _ in repeat(None))
    )


def concurrently(
    flows: Sequence[LocalIterator],
    mode: str = "round_robin",
    *,
    weights: Sequence[Weight] | None = None,
    output_indexes: Sequence[int] | None = None,
) -> LocalIterator:
    """Run several flows, and return their items.

    Args:
        flows: the flows.
        mode: ``round_robin``: ``weights[i]`` items of flow i in turn. A flow that waits for workers is waited
            for; one that waits for another flow, such as for an empty queue, passes its turn. So the order
            does not depend on time. ``async``: up to 20 ``weights[i]`` items of a flow, and the next flow as
            soon as it has none.
        weights: items of each flow in a turn, 1 by default; ``*`` in ``round_robin``: as many as are ready.
        output_indexes: flows whose items are returned; those of the others are dropped. All by default.

    Raises:
        GraphError: an argument does not fit, or a flow is not gathered.
    """
    kept = range(len(flows)) if output_indexes is None else output_indexes
    shares = [1] * len(flows) if weights is None else list(weights)
    _check_flows(flows, mode, shares, kept)
    is_async = mode == "async"
    limits = [math.inf if each == "*" else int(each) * (AT_ONCE if is_async else 1) for each in shares]
    waits = [not is_async and each != "*" for each in shares]

    def started(context: PlanContext) -> Iterator[Any]:
        context.looks |= not all(waits)
        return _merged([flow.start(context) for flow in flows], context, limits, waits, kept)

    shown = "" if output_indexes is None else f", output {', '.join(str(each) for each in kept)}"
    return LocalIterator(label=f"concurrently {mode}{shown}", inputs=tuple(flows), start=started)


def queue(capacity: int, initial: Sequence[Any] = ()) -> tuple[Operator, LocalIterator]:
    """Return both ends of a bounded queue: an operator for ``for_each``, and an iterator over its items.

    Args:
        capacity: items after which the flow that fills it waits.
        initial: items it begins with; the delay that a cycle needs.
    """
    _at_least_one("the capacity of a queue", capacity)
    key = object()

    def held(context: PlanContext) -> deque[Any]:
        return context.shared.setdefault(key, deque((item, None) for item in initial))  # type: ignore[no-any-return]

    def begin(context: PlanContext) -> Callable[[Any], Any]:
        items, full = held(context), NotReady(why=(f"a queue of {capacity} is full",))

        def put(item: Any) -> Any:
            if len(items) >= capacity:
                return full
            items.append((item, context.source))
            return item

        return put

    def taken(context: PlanContext) -> Iterator[Any]:
        items, empty = held(context), NotReady(why=(f"a queue of {capacity} is empty",))
        while True:
            yield _popped(items, context) if items else empty

    enqueue = Operator(label=f"enqueue {capacity}", begin=begin, queue=key)
    return enqueue, LocalIterator(label=f"dequeue {capacity}", queue=key, initial=len(initial), start=taken)


def _popped(items: deque[Any], context: PlanContext) -> Any:
    """Take an item that was kept with its source."""
    item, context.source = items.popleft()
    context.moves += 1
    return item


def collect(label: str, size: int, join: Callable[[PlanContext, list[Any]], Any]) -> Operator:
    """Collect ``size`` items, and return what ``join`` makes of them; for ``combine``."""

    def begin(context: PlanContext) -> Callable[[Any], Sequence[Any]]:
        held: list[Any] = []

        def add(item: Any) -> Sequence[Any]:
            held.append(item)
            if len(held) < size:
                return ()
            full = held.copy()
            held.clear()
            return (join(context, full),)

        return add

    return Operator(label=label, begin=begin)


def _merged(
    flows: Sequence[Iterator[Any]],
    context: PlanContext,
    limits: Sequence[float],
    waits: Sequence[bool],
    kept: Collection[int],
) -> Iterator[Any]:
    """Yield the kept items of flows that take turns; each keeps the source of its items meanwhile."""
    sources, live = [context.source] * len(flows), list(range(len(flows)))
    while live:
        idle: list[NotReady] = []
        for index in tuple(live):
            taken = 0
            while taken < limits[index]:
                context.source = sources[index]
                item = next(flows[index], live)
                sources[index] = context.source
                if item is live:  # the flow's end
                    live.remove(index)
                    break
                if not isinstance(item, NotReady):
                    taken += 1
                    if index in kept:
                        yield item
                elif waits[index] and item.is_outside:
                    yield item
                else:
                    idle += [item] * (not taken)
                    break
        if idle and len(idle) == len(live):
            yield reduce(or_, idle)


def _driven(items: Iterator[Any], context: PlanContext) -> Iterator[Any]:
    """Yield the items of a plan; wait while none of its flows has one."""
    before = -1
    for item in items:
        if not isinstance(item, NotReady):
            yield item
        elif item.polls:
            if not item.calls:
                time.sleep(POLL_S)
            else:
                wait_any(item.calls, POLL_S)
        elif item.calls:
            wait_for_any(item.calls)
        elif context.moves == before:
            raise GraphError(
                f"the flows of the plan wait for each other: {'; '.join(item.why)}",
                why="no worker is running, and no operator has moved an item since the last look",
                fix="run both flows in one concurrently(...), or raise the capacity",
            )
        else:
            before = context.moves
            continue
        before = -1


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise GraphError(f"{what} is {value}", why="it is at least 1", fix="choose 1 or more")


def _check_flows(
    flows: Sequence[LocalIterator], mode: str, weights: Sequence[Weight], kept: Sequence[int]
) -> None:
    if mode not in ("round_robin", "async"):
        raise GraphError(f"the mode is {mode!r}", why="there are two", fix="choose 'round_robin' or 'async'")
    for each in flows:
        if each.is_parallel:
            each.check()
    if not kept or not set(kept) <= set(range(len(flows))):
        raise GraphError(
            f"concurrently has {len(flows)} flows and output_indexes {list(kept)}",
            why="without an output the plan would run for ever and never return an item",
            fix="name at least one of the flows, counted from 0",
        )
    least = [1 if each == "*" and mode == "round_robin" else each for each in weights]
    if len(least) != len(flows) or not all(isinstance(each, int) and each >= 1 for each in least):
        raise GraphError(
            f"the weights of {len(flows)} flows in mode {mode!r} are {list(weights)}",
            why="each flow takes at least 1 item in its turn; '*' is for round_robin",
            fix="give one number of 1 or more for each flow",
        )
