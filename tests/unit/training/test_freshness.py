"""Staleness of trained tokens: the bound holds for every one, and the error names the oldest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rillflow.errors import TrainingError
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.guards import check_freshness

VERSIONS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4)


def sampled(versions: list[list[int]]) -> Batch:
    """Return rows of one prompt token, which has no version, and sampled tokens."""
    told = [[-1, *row] for row in versions]
    return Batch(
        ids=row_ids([RowId(0, row, 0) for row in range(len(told))]),
        fields={
            "versions": Ragged.from_rows(told),
            "loss_mask": Ragged.from_rows([[v >= 0 for v in row] for row in told], dtype=torch.bool),
        },
    )


@given(versions=VERSIONS, bound=st.integers(0, 9))
def test_bounded_staleness_is_that_of_the_oldest_token(versions: list[list[int]], bound: int) -> None:
    every = [version for row in versions for version in row]
    if 9 - min(every) > bound:
        oldest = next(row for row, each in enumerate(versions) if min(every) in each)
        with pytest.raises(TrainingError, match=f"prompt {oldest}.* has a token of version {min(every)}"):
            check_freshness(sampled(versions), 9, bound)
    else:
        assert check_freshness(sampled(versions), 9, bound).tolist() == [9 - version for version in every]


def test_rows_that_nobody_sampled_have_no_age() -> None:
    shown = sampled([[3, 4]])
    shown = shown.with_fields(versions=shown.ragged("versions").with_values(torch.full((3,), -1)))
    assert not len(check_freshness(shown, 9, 0))
    assert not len(check_freshness(Batch(ids=shown.ids, fields={}), 9, 0))
