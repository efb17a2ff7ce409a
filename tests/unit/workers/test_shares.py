"""Distribution of rows over ranks: all of them, in order, evenly, units whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import ClusterError
from rillflow.records.batch import Batch, concatenate, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.workers.arguments import (
    GROUPS,
    Facts,
    Held,
    RemoteValue,
    Rows,
    balanced_shares,
    groups_of,
    lengths_of,
    piece,
    resolved,
    shares,
)
from rillflow.workers.backend import Place

UNITS = st.integers(1, 4)


def batch_of(rows: int) -> Batch:
    ids = row_ids([RowId(0, row // 2, row % 2) for row in range(rows)])
    return Batch(ids=ids, fields={"x": torch.arange(rows)})


def here(references: Sequence[Any], fields: Any = None) -> list[Any]:
    """Return the values of references."""
    return list(references)


def lying(parts: list[Batch]) -> Held:
    """Return references to parts, which are the values themselves."""
    table = tuple(
        RemoteValue(
            value=part,
            facts=Facts(
                rows=len(part),
                tokens=0,
                lengths=lengths_of(part),
                groups=groups_of(part),
                ends=tuple(part.row_id(place).group for place in (0, -1)) if len(part) else (),
                began=0.0,
                ended=0.0,
                place=Place("main", 0),
            ),
        )
        for part in parts
    )
    return Held(table=table)


@settings(max_examples=100, deadline=None)
@given(whole=st.integers(0, 20), unit=UNITS, count=st.integers(1, 6))
def test_shares_are_even_in_units(whole: int, unit: int, count: int) -> None:
    found = shares(whole * unit, count, unit)
    assert len(found) == count and sum(found) == whole * unit
    assert all(share % unit == 0 for share in found)
    assert max(found) - min(found) <= unit
    assert list(found) == sorted(found, reverse=True)


@settings(max_examples=100, deadline=None)
@given(whole=st.integers(1, 20), unit=UNITS, count=st.integers(1, 6), cuts=st.data())
def test_rows_that_lie_anyhow_arrive_in_whole_units(
    whole: int, unit: int, count: int, cuts: st.DataObject
) -> None:
    """Wherever rows lie, a rank fetches the rows that a split of the whole batch would give it."""
    rows = whole * unit
    inner = sorted(cuts.draw(st.lists(st.integers(0, rows), max_size=4)))
    ends = [0, *inner, rows]
    batch = batch_of(rows)
    parts = [batch.slice(start, stop) for start, stop in pairwise(ends)]
    found = []
    for index in range(count):
        wanted = Rows(held=lying(parts), index=index, count=count, unit=unit)
        got: Any = resolved(wanted, here)
        cut = piece(batch, index, count, unit)
        assert torch.equal(got.ids, cut.ids) and torch.equal(got.dense("x"), cut.dense("x"))
        assert len(got) % unit == 0
        found.append(got)
    assert torch.equal(concatenate(found).ids, batch.ids)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), max_size=8), count=st.integers(1, 5), cuts=st.data())
def test_groups_that_parts_cut_arrive_whole(sizes: list[int], count: int, cuts: st.DataObject) -> None:
    """Wherever rows lie, a rank gets the rows of its share of the groups, and no group is on two ranks."""
    ids = [RowId(0, group, row) for group, size in enumerate(sizes) for row in range(size)]
    batch = Batch(ids=row_ids(ids), fields={"x": torch.arange(len(ids))})
    inner = sorted(cuts.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    held = lying([batch.slice(start, stop) for start, stop in pairwise([0, *inner, len(ids)])])
    found: list[Any] = [
        resolved(Rows(held=held, index=index, count=count, unit=GROUPS), here) for index in range(count)
    ]
    assert torch.equal(concatenate(found).ids, batch.ids)
    groups = [{row.group for row in part.row_ids()} for part in found]
    assert [len(each) for each in groups] == list(shares(len(sizes), count))
    assert sum(map(len, groups)) == len(sizes)


def test_a_unit_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ClusterError, match="7 rows cannot be split over ranks in units of 2"):
        shares(7, 2, 2)


LENGTHS = st.lists(st.integers(0, 50), max_size=24)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, unit=UNITS, count=st.integers(1, 6))
def test_balanced_shares_differ_by_no_more_than_a_unit_s_tokens(
    lengths: list[int], unit: int, count: int
) -> None:
    whole = lengths[: len(lengths) // unit * unit]
    found = balanced_shares(whole, count, unit)
    assert len(found) == count and sum(found) == len(whole)
    assert all(share >= 0 and share % unit == 0 for share in found)
    ends = [sum(found[: rank + 1]) for rank in range(count)]
    tokens = [sum(whole[:end]) for end in ends]
    longest = max((sum(whole[at : at + unit]) for at in range(0, len(whole), unit)), default=0)
    for rank, held in enumerate(tokens, 1):
        assert abs(held - tokens[-1] * rank / count) <= longest / 2 + 1e-9


def test_where_some_parts_do_not_say_their_lengths_rows_are_shared_out_evenly() -> None:
    ids = row_ids([RowId(0, row, 0) for row in range(10)])
    rollouts = Batch(ids=ids, fields={"tokens": Ragged.from_rows([[1] * 9, *([1] for _ in range(9))])})
    told, untold = lying([rollouts.slice(0, 4), rollouts.slice(4, 10)]).table
    untold = replace(untold, facts=replace(untold.facts, lengths=()))
    both = Held(table=(told, untold))
    parts = [Rows(held=both, index=index, count=2, by=both) for index in range(2)]
    assert [len(resolved(part, here)) for part in parts] == [5, 5]


def test_rows_that_differ_in_length_are_shared_out_by_their_tokens() -> None:
    """One row of nine tokens and nine of one: the first rank gets the one, the second the nine."""
    ids = row_ids([RowId(0, row, 0) for row in range(10)])
    tokens = Ragged.from_rows([[1] * 9, *([1] for _ in range(9))], torch.int64)
    rollouts = Batch(ids=ids, fields={"tokens": tokens})
    values = Batch(ids=ids, fields={"x": torch.arange(10)})
    held, more = lying([rollouts.slice(0, 4), rollouts.slice(4, 10)]), lying([values])

    def part(references: Held, index: int) -> Batch:
        wanted = Rows(held=references, index=index, count=2, by=held)
        found: Batch = resolved(wanted, here)
        return found

    for references in (held, more):
        assert [len(part(references, index)) for index in range(2)] == [1, 9]
    assert part(more, 1).dense("x").tolist() == list(range(1, 10))
    assert [len(piece(rollouts, index, 2, balanced=True)) for index in range(2)] == [1, 9]
    assert [len(piece(values, index, 2, balanced=True)) for index in range(2)] == [5, 5]
