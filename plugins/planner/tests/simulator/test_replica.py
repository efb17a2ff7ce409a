"""A replica: every row gets its tokens, the cache holds what it can, time in pieces is the same time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.planner.tests.fakes import FakeDecoder
from rillflow.errors import PlanError
from rillflow_planner.simulator.draws import Row
from rillflow_planner.simulator.replica import Replica


def rows_of(lengths: list[int], prompt_tokens: int = 5) -> list[Row]:
    return [
        Row(prompt=0, sample=place, prompt_tokens=prompt_tokens, response_tokens=length)
        for place, length in enumerate(lengths)
    ]


def drained(replica: Replica) -> list[tuple[float, int]]:
    """When each row ends, by sample."""
    ends = []
    while replica.next_s < math.inf:
        now = replica.next_s
        ends += [(now, row.sample) for row in replica.advance(now)]
    return ends


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def test_rows_that_all_fit_drain_by_the_formula() -> None:
    decoder = FakeDecoder(most_rows=8, token_s=1.0, row_s=0.5, prompt_s=0.1)
    replica = Replica(decoder)
    replica.begin(rows_of([10, 30, 20]), 0.0)
    ends = drained(replica)
    prefill = 0.1 * 15
    expected = [prefill + 10 * 2.5, prefill + 10 * 2.5 + 10 * 2.0, prefill + 10 * 2.5 + 10 * 2.0 + 10 * 1.5]
    assert [sample for _, sample in ends] == [0, 2, 1]
    assert [seconds for seconds, _ in ends] == pytest.approx(expected)


def test_a_row_that_ends_makes_room_for_one_that_waits() -> None:
    replica = Replica(FakeDecoder(most_rows=2, token_s=1.0, row_s=0.0, prompt_s=0.0))
    replica.begin(rows_of([10, 30, 15]), 0.0)
    assert drained(replica) == [(10.0, 0), (25.0, 2), (30.0, 1)]


def test_a_shared_prompt_is_read_once() -> None:
    decoder = FakeDecoder(token_s=1.0, row_s=0.0, prompt_s=1.0)
    alone, shared = Replica(decoder), Replica(decoder, shares_prompts=True)
    for replica in (alone, shared):
        replica.begin(rows_of([10, 10]), 0.0)
    assert (alone.next_s, shared.next_s) == (20.0, 15.0)


@given(lengths=LENGTHS, most_rows=st.integers(1, 8), capacity=st.integers(65, 400))
def test_every_row_ends_once_and_the_cache_is_never_overfull(
    lengths: list[int], most_rows: int, capacity: int
) -> None:
    replica = Replica(FakeDecoder(most_rows=most_rows, capacity_tokens=capacity))
    replica.begin(rows_of(lengths), 0.0)
    ends = drained(replica)
    assert sorted(sample for _, sample in ends) == list(range(len(lengths)))
    assert replica.peak_tokens <= capacity + 1e-6
    assert replica.rows == 0


@given(lengths=LENGTHS, pieces=st.lists(st.floats(0.01, 2.0), max_size=20))
def test_time_in_pieces_is_the_same_time(lengths: list[int], pieces: list[float]) -> None:
    whole, cut = Replica(FakeDecoder()), Replica(FakeDecoder())
    for replica in (whole, cut):
        replica.begin(rows_of(lengths), 0.0)
    expected = drained(whole)
    found, now = [], 0.0
    for piece in pieces:
        until = now + piece
        while cut.next_s <= until:
            now = cut.next_s
            found += [(now, row.sample) for row in cut.advance(now)]
        found += [(until, row.sample) for row in cut.advance(until)]
        now = until
    found += drained(cut)
    assert [seconds for seconds, _ in found] == pytest.approx([seconds for seconds, _ in expected], abs=1e-6)
    assert sorted(sample for _, sample in found) == list(range(len(lengths)))


def test_new_weights_cost_a_stall() -> None:
    replica = Replica(FakeDecoder(token_s=1.0, row_s=0.0, prompt_s=0.1))
    replica.begin(rows_of([10, 10]), 0.0)
    assert replica.next_s == pytest.approx(11.0)
    assert replica.advance(6.0) == []
    replica.stall(2.0)
    assert replica.next_s == pytest.approx(11.0 + 2.0)


def test_a_row_longer_than_the_cache_is_refused_before_time_passes() -> None:
    replica = Replica(FakeDecoder(capacity_tokens=50))
    with pytest.raises(PlanError, match="a row of 65 tokens does not fit into a replica's KV cache of 50"):
        replica.begin(rows_of([60]), 0.0)
