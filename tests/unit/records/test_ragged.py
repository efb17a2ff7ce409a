"""Ragged columns behave like lists of rows, without padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RecordError
from rillflow.records.ragged import Ragged, concatenate_ragged

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=7)


def lists(column: Ragged) -> list[list[int]]:
    return [row.tolist() for row in column.rows()]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_rows_come_back_as_they_went_in(rows: list[list[int]]) -> None:
    column = Ragged.from_rows(rows)
    assert lists(column) == rows
    assert column.lists() == rows
    assert len(column) == len(rows)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, data=st.data())
def test_select_takes_rows_in_any_order_with_repeats(rows: list[list[int]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    chosen = Ragged.from_rows(rows).select(torch.tensor(index, dtype=torch.int64))
    assert lists(chosen) == [rows[place] for place in index]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, data=st.data())
def test_slice_is_the_list_slice_and_shares_memory(rows: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    column = Ragged.from_rows(rows)
    part = column.slice(start, stop)
    assert lists(part) == rows[start:stop]
    assert part.values.untyped_storage().data_ptr() == column.values.untyped_storage().data_ptr()


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_padded_keeps_every_value_at_its_place(rows: list[list[int]]) -> None:
    padded = Ragged.from_rows(rows).padded(fill=-9)
    longest = max((len(row) for row in rows), default=0)
    assert padded.tolist() == [row + [-9] * (longest - len(row)) for row in rows]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_what_is_known_of_each_value(rows: list[list[int]]) -> None:
    column = Ragged.from_rows(rows)
    assert column.row_of.tolist() == [index for index, row in enumerate(rows) for _ in row]
    assert column.positions.tolist() == [place for row in rows for place in range(len(row))]
    assert column.sums().tolist() == [sum(row) for row in rows]
    per_row = torch.arange(len(rows))
    assert torch.equal(column.expand(per_row), column.row_of)
    assert column.bounds[-1] == sum(map(len, rows))


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(ROWS, min_size=1, max_size=4))
def test_concatenate_is_list_addition(parts: list[list[list[int]]]) -> None:
    joined = concatenate_ragged([Ragged.from_rows(rows) for rows in parts])
    assert lists(joined) == [row for rows in parts for row in rows]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=12), max_size=5))
def test_text_comes_back(texts: list[str]) -> None:
    assert Ragged.from_text(texts).to_text() == texts


def test_text_survives_a_selection_of_rows() -> None:
    column = Ragged.from_text(["äé", "", "三", "z"])
    assert column.select(torch.tensor([2, 0, 1])).to_text() == ["三", "äé", ""]
    assert column.slice(2, 4).to_text() == ["三", "z"]


def test_sums_of_bools_count_and_of_floats_keep_their_type() -> None:
    mask = Ragged.from_rows([[True, True], [False]], torch.bool)
    assert mask.sums().tolist() == [2, 0]
    values = Ragged.from_rows([[0.5, 0.25], []], torch.float64)
    assert values.sums().dtype == torch.float64
    assert values.sums().tolist() == [0.75, 0.0]


def test_values_may_be_vectors() -> None:
    column = Ragged(values=torch.arange(6.0).view(3, 2), lengths=torch.tensor([1, 2]))
    assert column.padded().shape == (2, 2, 2)
    assert column.sums().tolist() == [[0.0, 1.0], [6.0, 8.0]]
    assert column.select(torch.tensor([1])).values.tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("values", "lengths", "named"),
    [
        (torch.zeros(3), torch.tensor([1, 1]), r"\[3\].*add up to 2"),
        (torch.zeros(1), torch.tensor([2, -1]), "length -1"),
        (torch.zeros(2), torch.tensor([2.0]), "float32"),
        (torch.zeros(2), torch.tensor([[2]]), r"\[1, 1\]"),
        (torch.tensor(1.0), torch.tensor([1]), r"shape \[\]"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(values: torch.Tensor, lengths: torch.Tensor, named: str) -> None:
    with pytest.raises(RecordError, match=named):
        Ragged(values=values, lengths=lengths)


def test_no_rows_have_no_values() -> None:
    chosen = Ragged.from_rows([[1, 2], [3]]).select(torch.zeros(0, dtype=torch.int64))
    assert (len(chosen), chosen.values.tolist(), chosen.lengths.tolist()) == (0, [], [])
