"""Generation: a replica's token, and how its rows drain; the sum over ends against token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.planner.tests.cost_model.settings import MIXTURE, SHAPE, WORKLOAD, setting
from rillflow_planner.cost_model.generation import (
    Decoder,
    decoder_of,
    drain_s,
    prompt_tokens,
    replica_lengths,
    running_rows,
)
from rillflow_planner.workload import Lengths


def replica(room_bytes: float = 30e9, tp: int = 1, devices: int = 8) -> Decoder:
    found = decoder_of(setting(), tp, devices, room_bytes)
    assert found is not None
    return found


def token_by_token(decoder: Decoder, lengths: list[int], prompt: float) -> float:
    """Every token by itself: all rows run from the beginning."""
    seconds = 0.0
    for done in range(max(lengths)):
        running = sum(length > done for length in lengths)
        seconds += decoder.token_s(running, running * (prompt + done + 0.5))
    return seconds


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 120), min_size=1, max_size=40))
def test_a_drain_is_the_sum_over_its_tokens(lengths: list[int]) -> None:
    expected = token_by_token(replica(), lengths, 128.0)
    found = drain_s(WORKLOAD, replica(), np.sort(np.array(lengths, dtype=np.float64)))
    assert found == pytest.approx(expected, rel=0.01)


@given(rows=st.integers(1, 2000), more=st.integers(1, 500))
def test_more_rows_take_longer_and_each_row_less(rows: int, more: int) -> None:
    one = replica()
    few, many = (one.token_s(count, count * 600.0) for count in (rows, rows + more))
    assert few <= many
    assert many / (rows + more) <= few / rows * (1 + 1e-9)


@given(rows=st.integers(1, 400), context=st.floats(0, 1e6), tokens=st.floats(1, 500))
def test_advancing_in_two_goes_takes_as_long_while_one_side_binds(
    rows: int, context: float, tokens: float
) -> None:
    one = replace(replica(), row_s=0.0, pair_s=0.0)
    whole = one.advance_s(rows, context, 2 * tokens)
    halves = one.advance_s(rows, context, tokens) + one.advance_s(rows, context + rows * tokens, tokens)
    assert halves == pytest.approx(whole)


@settings(max_examples=30)
@given(room=st.floats(1.5e9, 4e10), more=st.floats(1.0, 4.0))
def test_more_memory_never_hurts(room: float, more: float) -> None:
    lengths = replica_lengths(WORKLOAD.response, 256, 1024)
    small, large = replica(room), replica(room * more)
    assert large.capacity_tokens >= small.capacity_tokens
    assert running_rows(WORKLOAD, large) >= running_rows(WORKLOAD, small)
    assert drain_s(WORKLOAD, large, lengths) <= drain_s(WORKLOAD, small, lengths)


def test_waves_take_longer_than_all_at_once() -> None:
    lengths = replica_lengths(WORKLOAD.response, 256, 1024)
    assert drain_s(WORKLOAD, replica(2e9), lengths) > 1.2 * drain_s(WORKLOAD, replica(30e9), lengths)


def test_rows_of_one_length_end_in_whole_waves() -> None:
    workload = replace(WORKLOAD, response=Lengths(kind="fixed", limit=512))
    decoder = replace(replica(), most_rows=32)
    two, one = (drain_s(workload, decoder, np.full(rows, 512.0)) for rows in (64, 32))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_a_cache_too_small_for_the_longest_row_is_none() -> None:
    row = (128 + 2048) * SHAPE.cached_numbers * 2
    assert decoder_of(setting(), 1, 8, 0.5 * row) is None
    assert decoder_of(setting(), 1, 8, -1.0) is None
    assert decoder_of(setting(), 1, 8, 1.2 * row) is not None


@given(tp=st.sampled_from([1, 2, 4, 8]))
def test_devices_that_share_a_copy_hold_more_of_its_cache(tp: int) -> None:
    assert replica(tp=tp).capacity_tokens == pytest.approx(tp * replica().capacity_tokens, rel=1e-3)
    assert replica(tp=tp).replicas == 8 // tp


def test_the_last_replica_has_the_longest_of_all_rows() -> None:
    lengths = replica_lengths(WORKLOAD.response, 64, 1024)
    assert len(lengths) == 64
    assert lengths[-1] == pytest.approx(WORKLOAD.response.quantile(1 - 0.5 / 1024))
    assert np.all(np.diff(lengths) >= 0)


def test_prompts_that_rows_share_are_read_once() -> None:
    shared = prompt_tokens(WORKLOAD, 256, 4)
    each = prompt_tokens(replace(WORKLOAD, shares_prompts=False), 256, 4)
    assert each == pytest.approx(WORKLOAD.samples * shared)


def test_a_mixture_reads_more_of_its_experts_with_more_rows() -> None:
    found = decoder_of(setting(shape=MIXTURE), 1, 8, 30e9)
    assert found is not None
    reads = [found.token_s(rows, 0.0) - found.launch_s - rows * found.link_s for rows in (1, 4, 64)]
    assert reads[0] < reads[1] < reads[2]
    assert reads[2] == pytest.approx(found.trunk_s + found.experts_s, rel=0.01)


@settings(max_examples=60)
@given(rows=st.integers(2, 300), slots=st.integers(1, 299), pace=st.floats(1e-6, 1e-3))
def test_one_more_place_never_slows_rows_of_one_length(rows: int, slots: int, pace: float) -> None:
    workload = replace(WORKLOAD, response=Lengths(kind="fixed", limit=64))
    decoder, lengths = replace(replica(), row_s=pace), np.full(rows, 64.0)
    fewer, more = (drain_s(workload, decoder, lengths, min(one, rows)) for one in (slots, slots + 1))
    assert more <= fewer * (1 + 1e-9)


@settings(max_examples=40)
@given(rows=st.integers(2, 200), slots=st.integers(1, 199), pace=st.floats(1e-6, 1e-3))
def test_one_more_rung_never_slows_rows_of_many_lengths(rows: int, slots: int, pace: float) -> None:
    decoder, lengths = replace(replica(), row_s=pace), WORKLOAD.response.spread(rows)
    tight = [replace(decoder, capacity_tokens=1 << 40, most_rows=one) for one in (slots, slots + 1)]
    fewer, more = (drain_s(WORKLOAD, one, lengths) for one in tight)
    assert more <= fewer * (1 + 1e-9)
