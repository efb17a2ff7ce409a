"""Unions, queues, copies and transforms keep their laws; plans that cannot run are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import GraphError
from rillflow.graph.drawing import as_json, as_mermaid, as_text
from rillflow.workers.backend import Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.operators.context import NotReady
from rillflow_classic.operators.iterators import (
    AT_ONCE,
    LocalIterator,
    concurrently,
    from_function,
    from_items,
    from_workers,
    queue,
)
from rillflow_classic.worker_set import WorkerSet

RELEASED = threading.Event()


class Waiter:
    """A worker that waits for the test."""

    def __init__(self, index: int) -> None:
        self.index = index

    def wait(self) -> str:
        RELEASED.wait(60)
        return "waited"


@contextmanager
def waiters(count: int) -> Iterator[WorkerSet[Waiter]]:
    RELEASED.clear()
    backend = InlineBackend()
    backend.open([Pool(name="waiters", size=count), Pool(name="beside", size=1)])
    try:
        yield WorkerSet(backend, "waiters", Waiter)
    finally:
        RELEASED.set()
        backend.close()


lists = st.lists(st.integers(0, 9), max_size=12)
BLOCKED = NotReady(why=("this flow waits for ever",))


def named(lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the items of finite flows: the flow and the number of the item."""
    return [[(flow, number) for number in range(length)] for flow, length in enumerate(lengths)]


def in_turns(flows: Sequence[Sequence[Any]], weights: Sequence[int]) -> Iterator[Any]:
    """The law of a union of flows that are always ready."""
    rest = [list(flow) for flow in flows]
    while any(rest):
        for flow, weight in zip(rest, weights, strict=True):
            yield from flow[:weight]
            del flow[:weight]


@settings(deadline=None)
@given(items=lists)
def test_transforms_are_those_of_lists(items: list[int]) -> None:
    assert list(from_items(items).for_each(lambda item: item + 1)) == [item + 1 for item in items]
    assert list(from_items(items).filter(lambda item: item > 4)) == [item for item in items if item > 4]
    batches = list(from_items(items).batch(3))
    assert batches == [items[first : first + 3] for first in range(0, len(items) - 2, 3)]
    assert list(from_items(items).batch(3).flatten()) == items[: 3 * len(batches)]
    repeated = list(from_items(items).for_each(lambda item: [item] * item).flatten())
    assert list(from_items(items).combine(lambda item: [item] * item)) == repeated


def test_a_function_that_is_not_ready_is_called_again_with_the_same_item() -> None:
    called: list[int] = []

    def slow(item: int) -> Any:
        called.append(item)
        return item if called.count(item) == 3 else NotReady(polls=True)

    assert list(from_items([1, 2]).for_each(slow)) == [1, 2]
    assert called == [1, 1, 1, 2, 2, 2]


@settings(deadline=None)
@given(flows=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_round_robin_takes_its_weight_of_each_flow_in_turn(flows: list[tuple[int, int]]) -> None:
    lengths, weights = zip(*flows, strict=True)
    union = concurrently([from_items(each) for each in named(lengths)], weights=weights)
    assert list(union) == list(in_turns(named(lengths), weights))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_async_takes_at_most_20_items_of_a_flow_before_the_next(lengths: list[int]) -> None:
    union = concurrently([from_items(each) for each in named(lengths)], "async")
    assert list(union) == list(in_turns(named(lengths), [AT_ONCE] * len(lengths)))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=2, max_size=3),
    waits=st.lists(st.booleans(), min_size=40, max_size=40),
    mode=st.sampled_from(["async", "round_robin"]),
)
def test_a_union_of_flows_that_wait_loses_and_reorders_nothing(
    lengths: list[int], waits: list[bool], mode: str
) -> None:
    """In round_robin the order is also that of flows that never wait."""

    def sometimes(flow: list[Any]) -> LocalIterator:
        pattern = iter(waits)
        function = lambda item: NotReady(polls=True) if next(pattern, False) else item  # noqa: E731
        return from_items(flow).for_each(function)

    flows = named(lengths)
    found = list(concurrently([sometimes(each) for each in flows], mode))
    assert [[item for item in found if item[0] == flow] for flow in range(len(flows))] == flows
    if mode == "round_robin":
        assert found == list(in_turns(flows, [1] * len(flows)))


@settings(deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_only_the_flows_with_an_output_index_return_items_but_all_run(
    data: st.DataObject, lengths: list[int]
) -> None:
    kept = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    ran: list[Any] = []
    flows = [from_items(each).for_each(lambda item: ran.append(item) or item) for each in named(lengths)]
    found = list(concurrently(flows, output_indexes=kept))
    whole = list(in_turns(named(lengths), [1] * len(lengths)))
    assert found == [item for item in whole if item[0] in kept] and sorted(ran) == sorted(whole)


def test_a_star_takes_as_many_items_as_are_ready() -> None:
    put, taken = queue(8)
    plan = concurrently([from_items(range(6)).for_each(put), taken], weights=[3, "*"])
    assert list(islice(plan, 12)) == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]


@settings(deadline=None)
@given(capacity=st.integers(1, 5), count=st.integers(0, 20), mode=st.sampled_from(["async", "round_robin"]))
def test_a_queue_is_bounded_and_keeps_the_order(capacity: int, count: int, mode: str) -> None:
    put, taken = queue(capacity)
    entered: list[int] = []
    filled = from_items(range(count)).for_each(put).for_each(lambda item: entered.append(item) or item)
    ahead: list[int] = []
    flow = taken.for_each(lambda item: ahead.append(len(entered) - item) or item)
    plan = concurrently([flow, filled], mode, output_indexes=[0])
    assert list(islice(plan, count)) == list(range(count))
    assert all(each <= capacity for each in ahead)


def test_a_queue_begins_with_its_initial_items_in_every_run() -> None:
    put, taken = queue(4, initial=[0])
    cycle = taken.for_each(lambda item: item + 1).for_each(put)
    assert [list(islice(cycle, 4)) for _ in range(2)] == [[1, 2, 3, 4]] * 2


@settings(deadline=None)
@given(capacity=st.integers(1, 5), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_copy_has_every_item_and_none_is_further_ahead_than_its_capacity(
    capacity: int, sizes: list[int]
) -> None:
    made: list[int] = []
    taken: list[list[int]] = [[] for _ in sizes]
    ahead: list[int] = []

    def note(copy: int) -> Callable[[int], tuple[int, int]]:
        def noted(item: int) -> tuple[int, int]:
            taken[copy].append(item)
            ahead.append(len(made) - min(len(each) for each in taken))
            return copy, item

        return noted

    source = from_items(range(24)).for_each(lambda item: made.append(item) or item)
    copies = source.duplicate(len(sizes), capacity)
    found = list(concurrently([each.for_each(note(copy)) for copy, each in enumerate(copies)], weights=sizes))
    assert taken == [list(range(24))] * len(sizes) and len(found) == 24 * len(sizes)
    assert max(ahead) <= capacity, "a buffer has more items than its capacity"


@pytest.mark.parametrize("mode", ["async", "round_robin"])
def test_a_copy_that_is_never_read_stops_the_plan_with_its_name(mode: str) -> None:
    one, other = from_items(range(100)).duplicate(2, 4)
    plan = concurrently([one, other.for_each(lambda _: BLOCKED)], mode)
    items = iter(plan)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(GraphError, match="copy 1 of duplicate 2 is 4 items behind copy 0"):
        next(items)


def test_flows_that_wait_for_each_other_end_with_an_error() -> None:
    put, taken = queue(2)
    plan = concurrently([from_items(range(9)).for_each(put), taken.for_each(lambda _: BLOCKED)], "async")
    with pytest.raises(
        GraphError, match="wait for each other: a queue of 2 is full; this flow waits for ever"
    ):
        list(plan)


def test_a_source_outside_the_plan_is_asked_until_it_has_an_item() -> None:
    answers = iter([NotReady(polls=True)] * 5 + [1])
    assert next(iter(from_function(lambda: next(answers)))) == 1


def test_a_flow_that_waits_for_a_worker_does_not_hold_up_the_others() -> None:
    with waiters(1) as workers:
        slow = from_workers(workers, "wait").gather_async()
        plan = concurrently([slow, from_items([1, 2, 3])], "async")
        items = iter(plan)
        assert [next(items) for _ in range(3)] == [1, 2, 3]
        RELEASED.set()
        assert next(items) == "waited"


def plans_without_sense() -> dict[str, tuple[Callable[[], Any], str]]:
    one, other = from_items([1]).duplicate(2)
    put, taken = queue(2)
    unread = from_items([1]).for_each(queue(2)[0])
    source = from_items([1])
    cycle = taken.for_each(abs).for_each(put)
    return {
        "an unread queue": (unread.check, "nothing in the plan reads the queue of enqueue 2"),
        "an unread copy": (one.check, "1 of the 2 copies of duplicate 2 have no reader"),
        "two readers": (concurrently([source, source]).check, "2 operators read items"),
        "two readers later": (
            lambda: list(concurrently([source, source.for_each(abs)])),
            "2 operators read items",
        ),
        "an empty queue": (queue(2)[1].check, "dequeue 2 waits for items that nothing makes"),
        "a cycle": (cycle.check, "dequeue 2 waits for items that nothing makes"),
        "a cycle beside a flow": (
            concurrently([cycle, from_items([1])], "async").check,
            "dequeue 2 waits for items that nothing makes",
        ),
        "no output": (lambda: concurrently([source], output_indexes=[]), r"1 flows and output_indexes \[\]"),
        "another output": (lambda: concurrently([source], output_indexes=[1]), r"output_indexes \[1\]"),
        "no flow": (lambda: concurrently([]), "0 flows"),
        "another mode": (lambda: concurrently([source], "both"), "the mode is 'both'"),
        "a weight too many": (lambda: concurrently([source], weights=[1, 2]), r"are \[1, 2\]"),
        "a weight of 0": (lambda: concurrently([source], weights=[0]), r"are \[0\]"),
        "a star in async": (lambda: concurrently([source], "async", weights=["*"]), r"are \['\*'\]"),
        "an empty batch": (lambda: source.batch(0), "a batch is 0"),
        "a queue of 0": (lambda: queue(0), "the capacity of a queue is 0"),
        "copies without room": (lambda: source.duplicate(2, 0), "the capacity of a copy is 0"),
        "no copies": (lambda: source.duplicate(0), "the number of copies is 0"),
        "both copies": (lambda: concurrently([one, other], output_indexes=[2]), r"output_indexes \[2\]"),
    }


@pytest.mark.parametrize("name", plans_without_sense())
def test_a_plan_that_cannot_run_is_refused_with_its_reason_and_a_fix(name: str) -> None:
    use, said = plans_without_sense()[name]
    with pytest.raises(GraphError, match=said) as caught:
        use()
    assert caught.value.why and caught.value.fix


def test_a_cycle_that_begins_with_an_item_or_has_a_source_is_a_plan() -> None:
    put, taken = queue(2)
    fed = concurrently([from_items([1]).for_each(put), taken.for_each(put)], "async")
    fed.check()
    put, taken = queue(2, initial=[1])
    taken.for_each(put).check()


def test_a_plan_is_drawn_with_its_workers_queues_and_copies() -> None:
    with waiters(2) as workers:
        put, taken = queue(4)
        one, other = from_workers(workers, "wait").for_each(noted).gather_async(2).duplicate(2)
        learning = taken.batch(3).for_each(lambda item: item)
        plan = concurrently([one.for_each(put), other.filter(noted), learning], "async", output_indexes=[2])
        graph = plan.graph("mine")
    assert as_text(graph) == DRAWN
    assert "-->|queue|" in as_mermaid(graph)
    assert [each["role"] for each in as_json(graph)["stages"]][:2] == ["waiters", "waiters"]


def noted(item: Any) -> Any:
    return item


DRAWN = """mine: 12 stages, roles waiters
  0  waiters.wait                             nothing
  1  waiters.noted                            result of 0 waiters.wait
  2  controller.gather_async 2                result of 1 waiters.noted
  3  controller.duplicate 2                   result of 2 controller.gather_async 2
  4  controller.copy 0                        result of 3 controller.duplicate 2
  5  controller.enqueue 4                     result of 4 controller.copy 0
  6  controller.copy 1                        result of 3 controller.duplicate 2
  7  controller.filter noted                  result of 6 controller.copy 1
  8  controller.dequeue 4                     queue of 5 controller.enqueue 4
  9  controller.batch 3                       result of 8 controller.dequeue 4
 10  controller.function                      result of 9 controller.batch 3
 11  controller.concurrently async, output 2  """
DRAWN += (
    "result of 5 controller.enqueue 4; result of 7 controller.filter noted; result of 10 controller.function"
)
