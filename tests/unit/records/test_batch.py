"""Batches: row operations keep the fields of each row together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RecordError
from rillflow.records.batch import Batch, concatenate, joined, load_batch, row_ids, save_batch
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId

LENGTHS = st.lists(st.integers(0, 6), max_size=8)


def batch_of(lengths: list[int], first: int = 0) -> Batch:
    """Return rows whose values all name their row."""
    rows = range(first, first + len(lengths))
    return Batch(
        ids=row_ids([RowId(0, row, row % 3) for row in rows]),
        fields={
            "tokens": Ragged.from_rows([[row] * length for row, length in zip(rows, lengths, strict=True)]),
            "reward": torch.tensor([float(row) for row in rows]),
            "columns": Ragged.from_text([f"row {row}" for row in rows]),
        },
    )


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS)
def test_a_stored_batch_is_what_it_was(lengths: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    batch, path = batch_of(lengths), tmp_path_factory.mktemp("stored") / "rows.safetensors"
    save_batch(batch, path)
    found = load_batch(path)
    assert torch.equal(found.ids, batch.ids) and found.fields.keys() == batch.fields.keys()
    assert torch.equal(found.dense("reward"), batch.dense("reward"))
    for name in ("tokens", "columns"):
        assert torch.equal(found.ragged(name).values, batch.ragged(name).values)
        assert torch.equal(found.ragged(name).lengths, batch.ragged(name).lengths)


def agrees(batch: Batch) -> list[int]:
    """Return the rows, after checking that all fields agree on each."""
    rows = [row.prompt for row in batch.row_ids()]
    assert batch.dense("reward").tolist() == rows
    assert batch.ragged("columns").to_text() == [f"row {row}" for row in rows]
    for row, tokens in zip(rows, batch.ragged("tokens").rows(), strict=True):
        assert set(tokens.tolist()) <= {row}
    return rows


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_select_keeps_rows_whole(lengths: list[int], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)) if lengths else []
    assert agrees(batch_of(lengths).select(index)) == index


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_slices_laid_end_to_end_lose_nothing(lengths: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=5)))
    found = [batch_of(lengths).slice(*pair) for pair in pairwise([0, *cuts, len(lengths)])]
    assert [row for part in found for row in agrees(part)] == list(range(len(lengths)))
    assert agrees(concatenate(found)) == list(range(len(lengths)))


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_join_matches_by_row_id_whatever_the_order(lengths: list[int], data: st.DataObject) -> None:
    rows = batch_of(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    other = Batch(ids=rows.ids, fields={"score": torch.arange(len(lengths))}).select(order)
    found = rows.join(other)
    assert agrees(found) == list(range(len(lengths)))
    assert found.dense("score").tolist() == list(range(len(lengths)))


def test_a_join_may_ask_for_some_of_the_other_rows() -> None:
    wide = Batch(ids=batch_of([1] * 4).ids, fields={"score": torch.arange(4)})
    found = batch_of([1] * 2).join(wide)
    assert found.dense("score").tolist() == [0, 1]


def test_joined_takes_the_fields_of_every_batch() -> None:
    rows = batch_of([1, 2])
    more = [Batch(ids=rows.ids.flip(0), fields={name: torch.tensor([1, 0])}) for name in ("a", "b")]
    found = joined([rows, *more])
    assert found.dense("a").tolist() == found.dense("b").tolist() == [0, 1]
    with pytest.raises(RecordError, match="no batch"):
        joined([])


def test_a_join_that_cannot_be_made_names_the_row() -> None:
    rows = batch_of([1, 1])
    short = Batch(ids=rows.ids[:1], fields={"score": torch.zeros(1)})
    twice = Batch(ids=rows.ids[[0, 1, 1]], fields={"score": torch.zeros(3)})
    with pytest.raises(RecordError, match=r"epoch 0 prompt 1 sample 1.*missing"):
        rows.join(short)
    with pytest.raises(RecordError, match=r"epoch 0 prompt 1 sample 1.*twice"):
        rows.join(twice)
    with pytest.raises(RecordError, match="both batches have a field 'columns'"):
        rows.join(rows)


def test_fields_by_name() -> None:
    batch = batch_of([1, 2])
    assert set(batch.only("tokens").fields) == {"tokens"}
    assert set(batch.with_fields(extra=torch.zeros(2)).fields) == {"tokens", "reward", "columns", "extra"}
    with pytest.raises(RecordError, match="did you mean 'reward'"):
        batch.dense("rewards")
    with pytest.raises(RecordError, match="'tokens' is ragged"):
        batch.dense("tokens")
    with pytest.raises(RecordError, match="'reward' is dense"):
        batch.ragged("reward")


def test_fields_and_ids_must_fit() -> None:
    with pytest.raises(RecordError, match="'a' has 3 rows but the batch has 2"):
        Batch(ids=batch_of([1, 1]).ids, fields={"a": torch.zeros(3)})
    with pytest.raises(RecordError, match="'a' has 0 rows but the batch has 2"):
        Batch(ids=batch_of([1, 1]).ids, fields={"a": torch.tensor(1.0)})
    with pytest.raises(RecordError, match=r"\[2, 2\]"):
        Batch(ids=torch.zeros(2, 2, dtype=torch.int64), fields={})
    with pytest.raises(RecordError, match="int32"):
        Batch(ids=torch.zeros(2, 3, dtype=torch.int32), fields={})


def test_concatenation_needs_equal_fields() -> None:
    with pytest.raises(RecordError, match="'extra'"):
        concatenate([batch_of([1]), batch_of([1]).with_fields(extra=torch.zeros(1))])
    with pytest.raises(RecordError, match="no batch"):
        concatenate([])


def test_ids_read_back() -> None:
    batch = batch_of([2, 1])
    assert batch.row_id(1) == RowId(0, 1, 1)
    assert str(batch.row_ids()[1]) == "epoch 0 prompt 1 sample 1"
    assert len(row_ids([])) == 0
