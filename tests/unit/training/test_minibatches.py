"""Minibatches: every row once per epoch, evenly, in an order that the seed decides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.training.minibatches import minibatches, prompt_units


def batch_of(size: int) -> Batch:
    return Batch(ids=row_ids([RowId(0, row, 0) for row in range(size)]), fields={})


def rows(batch: Batch) -> list[int]:
    return batch.ids[:, 1].tolist()


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 20), epochs=st.integers(1, 3), parts=st.integers(1, 7), step=st.integers(0, 99))
def test_every_row_once_an_epoch_in_even_parts(size: int, epochs: int, parts: int, step: int) -> None:
    found = [rows(part) for part in minibatches(batch_of(size), epochs, parts, 3, step)]
    each = min(parts, size)
    assert len(found) == epochs * each
    for epoch in range(epochs):
        pass_ = found[epoch * each : (epoch + 1) * each]
        sizes = [len(part) for part in pass_]
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert sorted(row for part in pass_ for row in part) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(each=st.integers(1, 4), minibatch=st.integers(1, 3), parts=st.integers(1, 5), step=st.integers(0, 9))
def test_rows_that_are_not_mixed_are_cut_alike_whole_and_part_by_part(
    each: int, minibatch: int, parts: int, step: int
) -> None:
    """Therefore an update over parts that arrive one by one equals one over all rows."""
    batch = batch_of(each * minibatch * parts)
    whole = [rows(cut) for cut in minibatches(batch, 1, minibatch * parts, 3, step, shuffle=False)]
    assert [row for cut in whole for row in cut] == list(range(len(batch)))
    parted = []
    for part in range(parts):
        own = batch.slice(part * each * minibatch, (part + 1) * each * minibatch)
        parted += [rows(cut) for cut in minibatches(own, 1, minibatch, 3, step + part, shuffle=False)]
    assert parted == whole


def test_the_order_depends_on_seed_step_and_epoch() -> None:
    def order(seed: int, step: int) -> list[list[int]]:
        return [rows(part) for part in minibatches(batch_of(40), 2, 2, seed, step)]

    assert order(1, 5) == order(1, 5)
    assert order(1, 5) != order(2, 5)
    assert order(1, 5) != order(1, 6)
    assert order(1, 5)[:2] != order(1, 5)[2:]


def test_one_minibatch_is_the_batch_itself() -> None:
    batch = batch_of(5)
    assert [rows(part) for part in minibatches(batch, 2, 1, 0, 0)] == [list(range(5))] * 2


@settings(max_examples=60, deadline=None)
@given(pairs=st.integers(0, 12), parts=st.integers(1, 7), step=st.integers(0, 99))
def test_units_stay_together(pairs: int, parts: int, step: int) -> None:
    ids = [RowId(0, pair % pairs, pair // pairs) for pair in range(2 * pairs)]  # partners lie far apart
    batch = Batch(ids=row_ids(ids), fields={})
    found = list(minibatches(batch, 2, parts, 3, step, prompt_units(batch)))
    each = min(parts, pairs)
    assert len(found) == 2 * each
    sizes = [len(part) for part in found]
    assert not sizes or max(sizes) - min(sizes) <= 2
    for part in found:
        assert all(rows(part).count(prompt) == 2 for prompt in rows(part))
    for epoch in range(2):
        seen = [row for part in found[epoch * each : (epoch + 1) * each] for row in part.row_ids()]
        assert sorted(seen) == sorted(ids)


def test_units_of_one_row_are_no_units() -> None:
    batch = batch_of(11)
    alone = [rows(part) for part in minibatches(batch, 2, 3, 5, 1)]
    assert [rows(part) for part in minibatches(batch, 2, 3, 5, 1, torch.arange(11))] == alone


class Heard:
    """One rank of several that already has the others' counts."""

    def __init__(self, rank: int, counts: list[int]) -> None:
        self.rank, self.size, self._counts = rank, len(counts), counts

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("nothing is added up here")

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.tolist() == [self._counts[self.rank]]
        return [torch.tensor([count]) for count in self._counts]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    parts=st.integers(1, 5),
    size=st.integers(1, 3),
    step=st.integers(0, 99),
)
def test_ranks_have_their_units_of_one_rank_s_minibatches(
    counts: list[int], parts: int, size: int, step: int
) -> None:
    """Units of ``size`` rows; concatenated, the ranks' minibatches are those of one rank with all units."""
    ids = [RowId(0, unit, place) for unit in range(sum(counts)) for place in range(size)]
    whole = Batch(ids=row_ids(ids), fields={})
    alone = [sorted(part.row_ids()) for part in minibatches(whole, 2, parts, 3, step, prompt_units(whole))]
    found: list[list[list[RowId]]] = []
    for rank in range(len(counts)):
        start, stop = size * sum(counts[:rank]), size * sum(counts[: rank + 1])
        own = whole.slice(start, stop)
        ranks = Heard(rank, counts)
        cut = minibatches(own, 2, parts, 3, step, prompt_units(own), ranks)
        found.append([part.row_ids() for part in cut])
    together = [sorted(row for part in side for row in part) for side in zip(*found, strict=True)]
    assert [part for part in together if part] == alone
