"""A stage begins when what it reads has arrived and its pool is free; nothing that grows makes it earlier."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow.graph.graph import Edge, Graph, Stage
from rillflow_planner.evaluate import BESIDE, Timing, counted_s, in_turn, last_s, period_s, tasks_of

seeds = st.integers(0, 10**6)


def random_graph(draw: random.Random) -> Graph:
    count = draw.randint(1, 9)
    stages = [Stage(index=index, role="r", endpoint="e", reads=(), writes=()) for index in range(count)]
    edges = [
        Edge(source=source, destination=index, fields=())
        for index in range(count)
        for source in sorted(draw.sample(range(-1, index), k=draw.randint(0, index + 1)))
    ]
    return Graph(name="g", stages=tuple(stages), edges=tuple(edges))


def random_schedule(seed: int, *, longer: bool = False) -> tuple[Graph, tuple[Timing, ...]]:
    """A schedule of a random graph; with one duration longer than without."""
    draw = random.Random(seed)
    graph = random_graph(draw)
    seconds = [draw.choice((0.0, 1.0, draw.uniform(0, 5))) for _ in graph.stages]
    transfers = [draw.choice((0.0, draw.uniform(0, 3))) for _ in graph.edges]
    pools = [draw.choice((BESIDE, "a", "b")) for _ in graph.stages]
    if longer:
        durations = draw.choice([seconds, transfers] if transfers else [seconds])
        durations[draw.randrange(len(durations))] += 2.5
    return graph, in_turn(tasks_of(graph, seconds=seconds, pools=pools, transfers=transfers))


@given(seed=seeds)
def test_stages_of_a_pool_take_turns_in_the_order_of_the_program(seed: int) -> None:
    _, found = random_schedule(seed)
    for pool in ("a", "b"):
        own = [timing for timing in found if timing.pool == pool]
        assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(own))


@given(seed=seeds)
def test_no_stage_begins_before_what_it_reads_and_none_waits_longer_than_a_transfer(seed: int) -> None:
    graph, found = random_schedule(seed)
    for timing in found:
        sources = [edge.source for edge in graph.into(timing.stage) if edge.source >= 0]
        assert all(found[source].end_s <= timing.start_s for source in sources)
        before = [one.end_s for one in found[: timing.stage] if one.pool == timing.pool != BESIDE]
        waits = [*before, *(found[source].end_s for source in sources)]
        assert timing.start_s <= max(waits, default=0.0) + 3.0
        assert waits or timing.start_s <= 3.0


@given(seed=seeds)
def test_a_longer_duration_makes_nothing_earlier(seed: int) -> None:
    _, before = random_schedule(seed)
    _, after = random_schedule(seed, longer=True)
    assert all(
        old.start_s <= new.start_s and old.end_s <= new.end_s for old, new in zip(before, after, strict=True)
    )
    assert last_s(before) <= last_s(after)


def test_two_pools_overlap_and_a_transfer_delays() -> None:
    stages = tuple(Stage(index=index, role="r", endpoint="e", reads=(), writes=()) for index in range(4))
    edges = tuple(
        Edge(source=source, destination=destination, fields=())
        for source, destination in ((0, 1), (0, 2), (1, 3), (2, 3))
    )
    tasks = tasks_of(
        Graph(name="g", stages=stages, edges=edges),
        seconds=[4.0, 2.0, 3.0, 1.0],
        pools=["a", "a", "b", "a"],
        transfers=[0.0, 0.5, 0.0, 0.25],
    )
    found = in_turn(tasks)
    assert [(one.start_s, one.end_s) for one in found] == [(0, 4), (4, 6), (4.5, 7.5), (7.75, 8.75)]
    later = in_turn(tasks, begin_s=10.0, free_s={"a": 11.0, "b": 16.0})
    assert [(one.start_s, one.end_s) for one in later] == [(11, 15), (15, 17), (16, 19), (19.25, 20.25)]


@pytest.mark.parametrize("given", [{"seconds": [4.0, 2.0]}, {"pools": ["a"]}])
def test_every_stage_needs_a_duration_and_a_pool(given: dict[str, list[Any]]) -> None:
    stages = tuple(Stage(index=index, role="r", endpoint="e", reads=(), writes=()) for index in range(3))
    whole: dict[str, list[Any]] = {"seconds": [4.0, 2.0, 3.0], "pools": ["a", "a", "b"], "transfers": []}
    with pytest.raises(ValueError, match="zip"):
        tasks_of(Graph(name="g", stages=stages, edges=()), **(whole | given))


@pytest.mark.parametrize(("freshness", "period"), [(0, 30.0), (1, 15.0), (2, 12.0), (100, 12.0)])
def test_the_period_falls_with_freshness_to_that_of_the_busiest_pool(freshness: int, period: float) -> None:
    assert period_s([12.0, 7.0], latencies_s=[30.0], freshness=freshness) == pytest.approx(period)


def test_steps_of_several_latencies_hold_each_other_up() -> None:
    """Latencies 10 and 30, bound 1: a step adds max(0, latency - what the last one added), a chain over 0,
    10, 20, 30 with the shares 6, 4, 2, 3 of 15: 34 / 3 on average, not 20 / 2."""
    assert period_s([0.0], latencies_s=[10.0, 30.0], freshness=1) == pytest.approx(34 / 3, rel=0.05)


@given(
    ends=st.lists(st.floats(0.1, 100), min_size=1, max_size=30),
    busy=st.floats(0.1, 50),
    bounds=st.lists(st.sampled_from([0, 0.05, 0.1, 0.5, 1, 2.5, 8]), min_size=2, max_size=2),
)
def test_counted_rows_reduce_to_in_step_and_more_in_advance_is_never_slower(
    ends: list[float], busy: float, bounds: list[float]
) -> None:
    """Bound 0 waits for the longest row; below, the rows left when a batch is formed are at most k steps'."""
    known = np.array(ends)
    assert counted_s(known, busy_s=busy, freshness=0) == pytest.approx(max(ends) + busy)
    fewer, more = sorted(bounds)
    step = counted_s(known, busy_s=busy, freshness=fewer)
    assert busy <= counted_s(known, busy_s=busy, freshness=more) <= step * (1 + 1e-9)
    wait = step - busy
    passed = [np.ceil(max(end - wait - 1e-6, 0) / step) for end in ends]
    assert np.mean(passed) <= fewer + 1e-9


def test_a_tenth_in_advance_leaves_the_longest_row_of_ten_for_later() -> None:
    ends = np.array([1.0] * 9 + [50.0])
    assert counted_s(ends, busy_s=50.0, freshness=0.1) == pytest.approx(51.0)
    assert counted_s(ends, busy_s=50.0, freshness=0.0) == pytest.approx(100.0)
