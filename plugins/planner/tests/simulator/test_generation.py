"""A round ends when what is wanted is there; what is begun beyond that is stopped or put aside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.planner.tests.fakes import FakeDecoder
from rillflow_planner.simulator.draws import Row
from rillflow_planner.simulator.replica import Replica
from rillflow_planner.simulator.sampling import Round, played

FLAT = FakeDecoder(replicas=2, most_rows=64, token_s=1.0, row_s=0.0, prompt_s=0.0)
"""Tokens take a second, however many rows run."""


def prompts_of(lengths: list[list[int]]) -> list[list[Row]]:
    return [
        [
            Row(prompt=prompt, sample=sample, prompt_tokens=3, response_tokens=length)
            for sample, length in enumerate(row)
        ]
        for prompt, row in enumerate(lengths)
    ]


def ran(lengths: list[list[int]], *, wanted: int, samples: int, decoder: FakeDecoder = FLAT) -> Round:
    replicas = [Replica(decoder) for _ in range(decoder.replicas)]
    return played(replicas, prompts_of(lengths), wanted=wanted, samples=samples)


def complete(found: Round) -> list[int]:
    return [*found.complete_s]


def test_a_round_of_all_rows_ends_with_the_longest() -> None:
    found = ran([[10, 20], [30, 5]], wanted=2, samples=2)
    assert (found.seconds, found.lanes_s) == (30.0, [20.0, 30.0])
    assert (complete(found), found.aside, len(found.kept)) == ([0, 1], [], 4)
    assert sum(row.response_tokens for row in found.kept) == 65


def test_more_samples_than_wanted_leave_the_longest_out() -> None:
    found = ran([[10, 90, 20], [30, 5, 80]], wanted=2, samples=2)
    assert (found.seconds, complete(found)) == (30.0, [0, 1])
    assert sorted(row.response_tokens for row in found.kept) == [5, 10, 20, 30]


def test_more_prompts_than_wanted_put_the_longest_aside() -> None:
    found = ran([[10, 90], [30, 5], [7, 8]], wanted=2, samples=2)
    assert (found.seconds, complete(found), found.aside) == (30.0, [2, 1], [0])


LENGTHS = st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=1, max_size=12)
DECODER = FakeDecoder(replicas=3, most_rows=4)


@given(lengths=LENGTHS, wanted=st.integers(1, 12), samples=st.integers(1, 3))
def test_every_row_is_kept_stopped_or_put_aside(lengths: list[list[int]], wanted: int, samples: int) -> None:
    found = ran(lengths, wanted=wanted, samples=samples, decoder=DECODER)
    assert len(found.kept) == samples * len(complete(found))
    assert sorted([*complete(found), *found.aside]) == list(range(len(lengths)))
    assert len(complete(found)) == min(wanted, len(lengths))
    assert all(0.0 <= lane <= found.seconds for lane in found.lanes_s)


@given(lengths=LENGTHS)
def test_wanting_less_never_takes_longer(lengths: list[list[int]]) -> None:
    """Fewer samples or prompts of the same rows: the round ends at an earlier or the same moment."""
    all_s = ran(lengths, wanted=len(lengths), samples=3, decoder=DECODER).seconds
    fewer_prompts = ran(lengths, wanted=max(len(lengths) - 1, 1), samples=3, decoder=DECODER)
    assert fewer_prompts.seconds <= all_s * (1 + 1e-9)
    assert ran(lengths, wanted=len(lengths), samples=2, decoder=FLAT).seconds <= max(map(max, lengths)) + 1e-9


@pytest.mark.parametrize("count", [1, 7, 64])
def test_rows_are_dealt_so_that_no_replica_has_two_more(count: int) -> None:
    found = ran([[4]] * count, wanted=count, samples=1, decoder=FakeDecoder(replicas=5, most_rows=1))
    waves = -(-count // 5)
    assert found.seconds == pytest.approx(waves * (4 * 0.0105 + 3 * 0.0001))
