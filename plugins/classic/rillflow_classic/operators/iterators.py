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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Self

from rillflow.errors import ClusterError, GraphError
from rillflow.graph.graph import Graph
from rillflow_classic.operators import nodes
from rillflow_classic.operators.context import NotReady, Operator, PlanContext, label_of
from rillflow_classic.operators.nodes import PlanNode
from rillflow_classic.operators.shards import Function, Method, Transform, WorkerShards, transformed
from rillflow_classic.worker_set import DEADLINE_S, WorkerSet, wait_any

POLL_S = 0.001
"""Pause before a source outside the plan is asked again."""
AT_ONCE = 20
"""Items of one flow before an asynchronous union goes on to the next one."""
Start = Callable[[PlanContext], Iterator[Any]]
Weight = int | str


class _Transforms(ABC):
    """Transforms of both iterators: at the source worker before a gather, in this process after it."""

    node: PlanNode
    """Its node in the plan's graph."""

    def check(self) -> None:
        """Refuse a plan that cannot run; see ``nodes.check``. Nothing starts."""
        nodes.check(self.node)

    @abstractmethod
    def _applied(self, node: PlanNode, transform: Transform) -> Self:
        """Return the iterator of a transform."""

    def _then(self, label: str, function: Function, *, is_flat: bool = False) -> Self:
        """Apply a function; if ``is_flat``, each element of its result is an item."""
        queue = function.queue if isinstance(function, Operator) else None
        node = replace(self.node, label=label, inputs=(self.node,), queue=queue, initial=0)
        return self._applied(node, partial(transformed, function, is_flat))

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
        return self._then(f"batch {size}", collect("", lambda held: len(held) == size), is_flat=True)


class LocalIterator(_Transforms):
    """Items in this process.

    Args:
        node: its node in the plan's graph.
        start: begins the sequence of items for one run of the plan; it yields NotReady while there is none.

    Example:
        plan = from_workers(actors, "sample").gather_async().for_each(train)
        print(as_text(plan.graph("mine")))
        for metrics in plan: ...
    """

    def __init__(self, node: PlanNode, start: Start) -> None:
        self.node, self.start = node, start

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

    def graph(self, name: str) -> Graph:
        """Return the plan as a graph that ``rillflow graph`` draws."""
        return nodes.as_graph(self.node, name)

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
        label = f"duplicate {copies}"
        split = PlanNode(label=label, inputs=(self.node,), copies=copies)

        def started(index: int, context: PlanContext) -> Iterator[Any]:
            items = context.shared(split, lambda: self.start(context))
            held = context.shared((split, copies), lambda: [deque[Any]() for _ in range(copies)])
            while True:
                if held[index]:
                    yield _popped(held[index], context)
                elif slow := [place for place, each in enumerate(held) if len(each) >= capacity]:
                    why = f"copy {slow[0]} of {label} is {capacity} items behind copy {index}"
                    yield NotReady(why=(why,))
                elif isinstance(item := next(items, held), NotReady):
                    yield item
                elif item is held:  # the end
                    return
                else:
                    for each in held:
                        each.append((item, context.source))

        ends = [PlanNode(label=f"copy {index}", inputs=(split,)) for index in range(copies)]
        return tuple(LocalIterator(node, partial(started, index)) for index, node in enumerate(ends))

    def _applied(self, node: PlanNode, transform: Transform) -> Self:
        return type(self)(node, lambda context: transform(context, self.start(context)))


class ParallelIterator(_Transforms):
    """Items on every worker of a set; see ``from_workers``. It is read by a gather, and by only one."""

    def __init__(self, node: PlanNode, shards: WorkerShards) -> None:
        self.node, self._shards = node, shards

    def __iter__(self) -> Iterator[Any]:
        self.check()
        return iter(())

    def batch_across_workers(self) -> LocalIterator:
        """Return lists of one item of each worker, in their order.

        A barrier: the workers are called only when the next list is wanted. So no worker runs between two
        lists, and each message sent in between, such as new weights, precedes the next items.
        """
        return self._gathered("batch_across_workers", partial(self._shards.rounds, one_by_one=False))

    def gather_sync(self) -> LocalIterator:
        """Return the items of ``batch_across_workers`` one by one: the same barrier between two rounds."""
        return self._gathered("gather_sync", partial(self._shards.rounds, one_by_one=True))

    def gather_async(self, num_async: int = 1) -> LocalIterator:
        """Return items as they come, those of one worker in its order.

        A worker is called again only when the item after its own is wanted, so messages sent to it while
        its item is handled precede its next call. With k = ``num_async`` calls in flight, k - 1 are already
        in the worker's mailbox: an item is made at most k - 1 items before the newest message.
        """
        _at_least_one("num_async", num_async)
        start = partial(self._shards.as_they_come, num_async=num_async)
        return self._gathered(f"gather_async {num_async}", start)

    def _gathered(self, label: str, start: Start) -> LocalIterator:
        return LocalIterator(PlanNode(label=label, inputs=(self.node,)), start)

    def _applied(self, node: PlanNode, transform: Transform) -> Self:
        if node.queue is not None:
            why, fix = "a queue is in the controller's process", "fill it after a gather"
            raise GraphError(f"{node.label} runs on {node.role}", why=why, fix=fix)
        return type(self)(node, replace(self._shards, transforms=(*self._shards.transforms, transform)))


def from_workers(workers: WorkerSet[Any], method: Method, *arguments: Any) -> ParallelIterator:
    """Return an endless iterator over the results of a method on every worker.

    Args:
        workers: the workers.
        method: name of the method, or a function that is called as ``method(worker, *arguments)``.
        arguments: its arguments.
    """
    label = method if isinstance(method, str) else label_of(method).strip("_")
    node = PlanNode(label=label, role=workers.pool, is_parallel=True)
    return ParallelIterator(node, WorkerShards(workers=workers, method=method, arguments=arguments))


def from_items(items: Iterable[Any], label: str = "items") -> LocalIterator:
    """Return an iterator over items of this process."""
    return LocalIterator(PlanNode(label=label), lambda _: iter(items))


def from_function(function: Callable[[], Any], label: str = "") -> LocalIterator:
    """Return an endless iterator over a function's results.

    It returns ``NotReady(polls=True)`` while something outside the plan, such as a stream, has no item.
    """

    node = PlanNode(label=label or label_of(function))
    return LocalIterator(node, lambda _: (function() for _ in repeat(None)))


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
        return _merged([flow.start(context) for flow in flows], context, limits, waits, kept)

    shown = "" if output_indexes is None else f", output {', '.join(str(each) for each in kept)}"
    node = PlanNode(label=f"concurrently {mode}{shown}", inputs=tuple(each.node for each in flows))
    return LocalIterator(node, started)


def queue(capacity: int, initial: Sequence[Any] = ()) -> tuple[Operator, LocalIterator]:
    """Return both ends of a bounded queue: an operator for ``for_each``, and an iterator over its items.

    Args:
        capacity: items after which the flow that fills it waits.
        initial: items it begins with; the delay that a cycle needs.
    """
    _at_least_one("the capacity of a queue", capacity)
    key = object()

    def held(context: PlanContext) -> deque[Any]:
        return context.shared(key, lambda: deque[Any]((item, None) for item in initial))

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

    node = PlanNode(label=f"dequeue {capacity}", queue=key, initial=len(initial))
    return Operator(label=f"enqueue {capacity}", begin=begin, queue=key), LocalIterator(node, taken)


def _popped(items: deque[Any], context: PlanContext) -> Any:
    """Take an item that was kept with its source."""
    item, context.source = items.popleft()
    context.moves += 1
    return item


def collect(
    label: str,
    is_full: Callable[[list[Any]], bool],
    join: Callable[[PlanContext, list[Any]], Any] = lambda _, items: items,
) -> Operator:
    """Collect items until a list of them is full, and return what ``join`` makes of it; for ``combine``."""

    def begin(context: PlanContext) -> Callable[[Any], Sequence[Any]]:
        held: list[Any] = []

        def add(item: Any) -> Sequence[Any]:
            held.append(item)
            if not is_full(held):
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
            yield NotReady.of(idle)


def _driven(items: Iterator[Any], context: PlanContext) -> Iterator[Any]:
    """Yield the items of a plan; wait while none of its flows has one."""
    before = -1
    for item in items:
        if isinstance(item, NotReady) and not item.is_outside:
            if context.moves == before:
                raise GraphError(
                    f"the flows of the plan wait for each other: {'; '.join(item.why)}",
                    why="no worker is running, and no operator has moved an item since the last look",
                    fix="run both flows in one concurrently(...), or raise the capacity",
                )
            before = context.moves
            continue
        before = -1
        if not isinstance(item, NotReady):
            yield item
        elif not item.calls:
            time.sleep(POLL_S)
        elif not wait_any(item.calls, POLL_S if item.polls else DEADLINE_S) and not item.polls:
            raise ClusterError(
                f"no worker has answered in {DEADLINE_S:g} s",
                why=f"calls of workers {sorted({each.worker for each in item.calls})} do not end",
                fix="look for an environment that hangs, or make a call shorter",
            )


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise GraphError(f"{what} is {value}", why="it is at least 1", fix="choose 1 or more")


def _check_flows(
    flows: Sequence[LocalIterator], mode: str, weights: Sequence[Weight], kept: Sequence[int]
) -> None:
    if mode not in ("round_robin", "async"):
        raise GraphError(f"the mode is {mode!r}", why="there are two", fix="choose 'round_robin' or 'async'")
    for each in flows:
        if not isinstance(each, LocalIterator):
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
