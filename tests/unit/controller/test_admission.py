"""The bound is hard: in whatever order groups end, none is trained older than k versions, none stalls."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.controller.admission import CapacityBound, StalenessBound


@dataclass(frozen=True)
class SampleGroup:
    prompt: int
    version: int


def group(prompt: int, version: int) -> SampleGroup:
    return SampleGroup(prompt=prompt, version=version)


@settings(max_examples=60)
@given(
    freshness=st.integers(1, 4),
    prompts=st.integers(1, 4),
    published=st.integers(1, 3),
    choices=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6)), min_size=50, max_size=200),
)
def test_no_group_is_trained_beyond_the_bound_in_any_order(
    freshness: int, prompts: int, published: int, choices: list[tuple[int, int]]
) -> None:
    """An adversary decides which group begins under how old weights, which ends, when a batch is formed."""
    admission = StalenessBound[SampleGroup](freshness=freshness, prompts=prompts, published=published)
    running: list[SampleGroup] = []
    trained, begun = 0, 0
    for action, number in choices:
        newest = admission.batch // published
        if action <= 1:
            least = max(admission.least_version(newest), 0)
            if least <= newest:
                running.append(group(begun, least + number % (newest - least + 1)))
                admission.begin(running[-1])
                begun += 1
        elif action == 2 and running:
            admission.complete(running.pop(number % len(running)))
        else:
            version = admission.version
            taken = admission.take()
            trained += len(taken)
            assert len(taken) in (0, prompts)
            assert all(version - one.version <= freshness for one in taken)
    assert trained == admission.batch * prompts


@settings(max_examples=40)
@given(
    freshness=st.integers(1, 4),
    prompts=st.integers(1, 4),
    published=st.integers(1, 3),
    order=st.lists(st.integers(0, 10**6), min_size=60, max_size=60),
)
def test_it_never_stalls(freshness: int, prompts: int, published: int, order: list[int]) -> None:
    """Where nothing may begin, the groups on their way make a batch once they are complete."""
    admission = StalenessBound[SampleGroup](freshness=freshness, prompts=prompts, published=published)
    running: list[SampleGroup] = []
    for number in order:
        newest = admission.batch // published
        while admission.least_version(newest) <= newest:
            running.append(group(number, newest))
            admission.begin(running[-1])
        while not (taken := admission.take()):
            assert running, "nothing runs, nothing may begin, and no batch can be formed"
            admission.complete(running.pop(number % len(running)))
        assert len(taken) == prompts


def test_as_much_begins_as_k_and_one_batches_hold() -> None:
    admission = StalenessBound[SampleGroup](freshness=2, prompts=3)
    for number in range(9):
        assert admission.least_version(0) <= 0
        admission.begin(group(number, 0))
    assert admission.least_version(0) == 1
    assert admission.least_version(1) == 1


def test_the_earliest_due_is_waited_for_and_others_overtake_until_then() -> None:
    admission = StalenessBound[SampleGroup](freshness=1, prompts=1)
    slow, quick, next_one = group(0, 0), group(1, 0), group(2, 1)
    admission.begin(slow)
    admission.begin(quick)
    admission.complete(quick)
    assert admission.take() == [quick]
    admission.begin(next_one)
    admission.complete(next_one)
    assert admission.take() == [], "next_one may wait one batch longer, slow may not"
    admission.complete(slow)
    assert admission.take() == [slow]
    assert admission.take() == [next_one]


def test_more_returns_as_many_groups_as_requested_and_keeps_the_rest() -> None:
    admission = StalenessBound[SampleGroup](freshness=1, prompts=3)
    groups = [group(number, 0) for number in range(3)]
    for each in groups:
        admission.begin(each)
        admission.complete(each)
    assert admission.more(2) == groups[:2]
    assert admission.more(2) == []
    assert admission.more(1) == groups[2:]


def test_dropping_counts_whole_groups_that_became_too_old() -> None:
    admission = CapacityBound[SampleGroup](freshness=1, prompts=1)
    slow = group(0, 0)
    admission.begin(slow)
    for number in (1, 2):
        one = group(number, number - 1)
        admission.begin(one)
        admission.complete(one)
        assert admission.take() == [one]
    admission.complete(slow)
    assert admission.take() == []
    assert admission.dropped == [slow]


@pytest.mark.parametrize("freshness", [1, 3])
def test_dropping_limits_what_is_begun_by_the_mean(freshness: int) -> None:
    admission = CapacityBound[SampleGroup](freshness=freshness, prompts=2)
    begun = 0
    while admission.least_version(0) <= 0:
        admission.begin(group(begun, 0))
        begun += 1
    assert begun == 2 * (freshness + 1)
