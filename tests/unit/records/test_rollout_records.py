"""Rollouts: append-only, and equal as records and as a batch."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RecordError
from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout, completions, rollout_batch
from rillflow.records.row import RowId
from tests.unit.records.singles import rollouts_of

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    row = RowId(draw(st.integers(-1, 2)), draw(st.integers(0, 99)), draw(st.integers(0, 7)))
    rollout = Rollout.start(row, draw(TOKENS), columns=draw(st.sampled_from(["{}", '{"answer": "é"}'])))
    for _ in range(draw(st.integers(0, 3))):
        tokens = draw(TOKENS)
        if draw(st.booleans()):
            logprobs = [float32(draw(st.floats(-9, 0, width=32))) for _ in tokens]
            finish = draw(st.sampled_from(Finish))
            rollout = rollout.sampled(tokens, logprobs, version=draw(st.integers(0, 5)), finish=finish)
        else:
            rollout = rollout.inserted(tokens)
    return rollout


@settings(max_examples=50, deadline=None)
@given(records=st.lists(rollouts(), max_size=5))
def test_records_come_back_from_a_batch(records: list[Rollout]) -> None:
    assert rollouts_of(rollout_batch(records)) == records


@settings(max_examples=50, deadline=None)
@given(records=st.lists(rollouts(), min_size=1, max_size=5))
def test_completions_are_the_sampled_tokens(records: list[Rollout]) -> None:
    found = completions(rollout_batch(records))
    expected = [[t for t, m in zip(r.tokens, r.loss_mask, strict=True) if m] for r in records]
    assert [row.tolist() for row in found.rows()] == expected


def test_every_token_tells_where_it_came_from() -> None:
    rollout = Rollout.start(RowId(0, 1, 2), [5, 6]).sampled([7], [-0.5], version=3).inserted([8])
    rollout = rollout.sampled([9], [-0.25], version=4, finish=Finish.STOP)
    assert rollout.tokens == (5, 6, 7, 8, 9)
    assert rollout.loss_mask == (False, False, True, False, True)
    assert rollout.logprobs == (0.0, 0.0, -0.5, 0.0, -0.25)
    assert rollout.versions == (-1, -1, 3, -1, 4)
    assert rollout.finish is Finish.STOP
    assert rollout.inserted([1]).finish is Finish.ABORTED


def test_types_of_the_fields() -> None:
    batch = rollout_batch([Rollout.start(RowId(0, 0, 0), [1]).sampled([2], [-1.0], version=0)])
    types = {name: batch.ragged(name).values.dtype for name in ("tokens", "loss_mask", "versions")}
    assert types == {"tokens": torch.int64, "loss_mask": torch.bool, "versions": torch.int32}
    assert batch.ragged("sampler_logprobs").values.dtype == torch.float32
    assert batch.dense("finish").dtype == torch.int8


def test_tokens_without_logprobs_are_refused() -> None:
    with pytest.raises(RecordError, match="2 sampled tokens but 1 log prob"):
        Rollout.start(RowId(0, 0, 0), [1]).sampled([2, 3], [-1.0], version=0)


def test_a_batch_that_lacks_a_field_is_named() -> None:
    batch = rollout_batch([Rollout.start(RowId(0, 0, 0), [1])])
    with pytest.raises(RecordError, match="'versions'"):
        rollouts_of(Batch(ids=batch.ids, fields={k: v for k, v in batch.fields.items() if k != "versions"}))
