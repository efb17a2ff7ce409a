"""Many plans at once take what each takes alone, and only the sums of segments count."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import PlanError
from rillflow.graph.graph import Edge, Graph, Stage
from rillflow.planner.mapping.clock import Clock
from rillflow.planner.mapping.pareto import undominated
from rillflow.planner.mapping.partitions import partitions
from rillflow.planner.objective import Goal, Objective, rounded
from rillflow.planner.schedule import schedule

seeds = st.integers(0, 10**6)
PLANS = 3


def drawn(seed: int) -> tuple[Graph, list[int], random.Random]:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    stages = [Stage(index=index, role="r", endpoint="e", reads=(), writes=()) for index in range(count)]
    edges = [
        Edge(source=source, destination=index, fields=())
        for index in range(count)
        for source in sorted(draw.sample(range(index), k=draw.randint(0, min(3, index))))
    ]
    graph = Graph(name="g", stages=tuple(stages), edges=tuple(edges))
    return graph, [draw.choice((-1, 0, 1, 2)) for _ in stages], draw


@settings(deadline=None)
@given(seed=seeds)
def test_ends_are_those_of_the_schedule(seed: int) -> None:
    graph, pools, draw = drawn(seed)
    clock = Clock(graph, pools=pools)
    seconds = [np.array([draw.uniform(0, 5) for _ in range(PLANS)]) for _ in pools]
    moved = {number: np.array([draw.uniform(0, 3) for _ in range(PLANS)]) for number in clock.crossing}
    ends = clock.ends(seconds, moved)
    for plan in range(PLANS):
        alone = schedule(
            graph,
            seconds=[one[plan] for one in seconds],
            pools=["" if pool < 0 else str(pool) for pool in pools],
            transfers=[moved[number][plan] if number in moved else 0.0 for number in range(len(graph.edges))],
        )
        assert [end[plan] for end in ends] == pytest.approx([timing.end_s for timing in alone.timings])


@settings(deadline=None)
@given(seed=seeds)
def test_seconds_may_be_shifted_within_a_segment(seed: int) -> None:
    graph, pools, draw = drawn(seed)
    clock = Clock(graph, pools=pools)
    before = [draw.uniform(0, 5) for _ in pools]
    after, last = list(before), set[int]()
    for pool in range(3):
        for segment in clock.segments(pool):
            total = sum(before[index] for index in segment)
            for index in segment:
                after[index] = 0.0
            after[draw.choice(segment)] = total
            last.add(segment[-1])
    last |= {index for index, pool in enumerate(pools) if pool < 0}
    moved = dict.fromkeys(clock.crossing, 0.5)
    one, two = clock.ends(before, moved), clock.ends(after, moved)
    assert [float(one[index]) for index in sorted(last)] == pytest.approx(
        [float(two[index]) for index in sorted(last)]
    )
    assert sorted(index for pool in range(3) for segment in clock.segments(pool) for index in segment) == [
        index for index, pool in enumerate(pools) if pool >= 0
    ]


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=25))
def test_what_is_kept_betters_all_that_is_not(rows: list[tuple[int, int, int]]) -> None:
    numbers = np.array(rows, dtype=float).reshape(len(rows), 3)
    kept = undominated(numbers)
    for row in range(len(rows)):
        covered = any((numbers[one] <= numbers[row]).all() for one in kept)
        assert covered
        others = [one for one in kept if one != row]
        assert row not in kept or not any((numbers[one] <= numbers[row]).all() for one in others)


def test_of_different_groups_and_with_a_handicap_both_are_kept() -> None:
    numbers = np.array([[1.0], [2.0]])
    assert undominated(numbers).tolist() == [0]
    assert undominated(numbers, np.array([0, 1])).tolist() == [0, 1]
    assert undominated(numbers, None, lambda _, others: np.full((len(others), 1), 1.5)).tolist() == [0, 1]
    assert undominated(numbers, None, lambda _, others: np.full((len(others), 1), 0.5)).tolist() == [0]


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203), (7, 877)])
def test_every_partition_comes_once(count: int, bell: int) -> None:
    found = list(partitions([str(number) for number in range(count)], fixed={}))
    assert len(found) == len(set(found)) == bell
    assert all(sorted(unit for pool in one for unit in pool) == list(range(count)) for one in found)


def test_bound_units_stay_together_and_one_alone_stays_alone() -> None:
    found = list(partitions(["a", "b", "c", "s"], fixed={"c": "a"}, alone="s"))
    assert found == [((0, 1, 2), (3,)), ((0, 2), (1,), (3,))]
    with pytest.raises(PlanError, match="did you mean 'critic'"):
        list(partitions(["policy", "critic"], fixed={"policy": "crytic"}))
    with pytest.raises(PlanError, match="s is bound to another unit"):
        list(partitions(["a", "s"], fixed={"a": "s"}, alone="s"))


@given(goal=st.sampled_from(Goal), seed=seeds)
def test_a_value_never_falls_with_seconds_devices_or_price(goal: Goal, seed: int) -> None:
    draw = random.Random(seed)
    objective = Objective(goal=goal, deadline_s=draw.choice((6.0, 1e9)))
    less = np.array([draw.uniform(0, 10), draw.randint(1, 9), draw.uniform(0, 5)])
    more = less + np.array([draw.choice((0.0, 1.0)), draw.choice((0, 1)), draw.choice((0.0, 1.0))])
    values = [
        float(objective.values(*(one[number : number + 1] for number in range(3)))[0]) for one in (less, more)
    ]
    assert values[0] <= values[1]


def test_sums_in_another_order_are_the_same_value() -> None:
    numbers = [0.1, 0.2, 0.3, 1e-3, 7.7]
    sums = np.array([sum(numbers), sum(reversed(numbers)), sum(numbers) * (1 + 1e-6)])
    first, second, third = rounded(sums)
    assert first == second < third


@pytest.mark.parametrize(
    ("settings_", "said"), [({"deadline_s": 0.0}, "deadline is 0"), ({"goal": Goal.DEVICES}, "no deadline")]
)
def test_objectives_that_cannot_be_are_refused(settings_: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Objective(**settings_)
