"""Totals of data are computed once, by any rank, and outlive the process bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rillflow.errors import RunDirectoryError
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import HELD_OUT_EPOCH, RowId
from rillflow.roles.answer_totals import KeptTotals, marks_of
from rillflow.sharding.mesh import RankGroups
from rillflow.workers.collectives import SingleRank, ThreadGroup, ThreadRanks


def rows(*ids: tuple[int, int, int], version: int = -1) -> Batch:
    tokens = Ragged.from_rows([[1, 2, 3]] * len(ids))
    mask = tokens.with_values(tokens.positions > 0)
    versions = tokens.with_values(torch.full((len(tokens.values),), version))
    return Batch(
        ids=row_ids([RowId(*each) for each in ids]),
        fields={"tokens": tokens, "loss_mask": mask, "versions": versions},
    )


class Scores:
    """Returns a third of each row's number, which no short decimal text represents; counts its rows."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, some: Batch) -> Tensor:
        self.asked += some.ids.tolist()
        return (some.ids[:, 1] * 10 + some.ids[:, 2]).double() / 3


def kept(file: Path | None = None) -> KeptTotals:
    return KeptTotals(RankGroups.whole(SingleRank()), file)


def test_a_row_is_computed_in_the_epoch_it_comes_first() -> None:
    totals, scores = kept(), Scores()
    first = totals.of(rows((0, 4, 0), (0, 4, 1), (0, 2, 0)), scores)
    assert first.dtype == torch.float64 and first.tolist() == [40 / 3, 41 / 3, 20 / 3]
    again = totals.of(rows((3, 2, 0), (3, 700, 1), (3, 4, 1), (4, 700, 1)), scores)
    assert again.tolist() == [20 / 3, 7001 / 3, 41 / 3, 7001 / 3]
    assert scores.asked == [[0, 4, 0], [0, 4, 1], [0, 2, 0], [3, 700, 1]]


def test_other_tokens_under_the_same_number_are_another_row() -> None:
    """A prompt with another prompt's answer in a later epoch; another loss mask; another order."""
    totals, scores = kept(), Scores()
    first = rows((0, 4, 0), (0, 5, 0))
    tokens, mask = first.ragged("tokens"), first.ragged("loss_mask")
    totals.of(first, scores)
    for column, values in (
        ("tokens", [1, 2, 3, 3, 2, 1]),
        ("loss_mask", [False, True, True] + [False] * 2 + [True]),
    ):
        changed = (tokens if column == "tokens" else mask).with_values(torch.tensor(values))
        totals.of(first, scores)
        before = len(scores.asked)
        totals.of(first.with_fields(**{column: changed}), scores)
        assert scores.asked[before:] == [[0, 5, 0]]
    numbers = torch.randint(50_000, (400, 12), generator=torch.Generator().manual_seed(0))
    many = Ragged(values=numbers.flatten(), lengths=torch.full((400,), 12))
    batch = Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(400)]),
        fields={"tokens": many, "loss_mask": many.with_values(many.positions > 5)},
    )
    assert len(set(marks_of(batch).tolist())) == 400


def test_held_out_rows_are_others_than_those_of_the_same_number() -> None:
    totals = kept()
    totals.of(rows((0, 4, 0)), lambda _: torch.tensor([1.0], dtype=torch.float64))
    other = totals.of(rows((HELD_OUT_EPOCH, 4, 0)), lambda _: torch.tensor([2.0], dtype=torch.float64))
    assert other.tolist() == [2.0] and totals.of(rows((1, 4, 0)), Scores()).tolist() == [1.0]


def test_sampled_rows_are_never_kept(tmp_path: Path) -> None:
    totals, scores = kept(tmp_path / "totals.jsonl"), Scores()
    for _ in range(2):
        assert totals.of(rows((0, 4, 0), version=0), scores).tolist() == [40 / 3]
    assert len(scores.asked) == 2 and not (tmp_path / "totals.jsonl").exists()


def test_what_was_kept_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    file, scores = tmp_path / "totals.jsonl", Scores()
    whole = kept(file).of(rows((0, 4, 0), (0, 4, 1)), scores)
    with file.open("ab") as torn:
        torn.write(b'{"rows": [[0, 9')
    again = kept(file)
    assert torch.equal(again.of(rows((5, 4, 1), (5, 4, 0)), scores), whole.flip(0))
    assert len(scores.asked) == 2, "nothing is computed again"
    again.of(rows((5, 9, 0)), scores)
    assert kept(file).of(rows((0, 9, 0)), Scores()).tolist() == [30.0], "the torn line is gone"
    file.write_bytes(b"no record\n" + file.read_bytes())
    with pytest.raises(RunDirectoryError, match=r"totals\.jsonl"):
        kept(file)


def test_ranks_know_what_the_others_computed(tmp_path: Path) -> None:
    """A row moves to another rank in the next epoch; a rank may have no row at all."""
    group, file = ThreadGroup(2, 20.0), tmp_path / "totals.jsonl"
    scores = [Scores(), Scores()]

    def run(rank: int) -> list[list[float]]:
        totals = KeptTotals(RankGroups.whole(ThreadRanks(group, rank)), file)
        own: list[Callable[[], Batch]] = [
            lambda: rows((0, 1, 0)) if rank else rows((0, 2, 0), (0, 3, 0)),
            lambda: rows((1, 2, 0)) if rank else rows((1, 1, 0)),
            lambda: rows((2, 5, 0)) if rank else rows((2, 5, 0)).slice(0, 0),
        ]
        return [totals.of(made(), scores[rank]).tolist() for made in own]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    assert found == [[[20 / 3, 10.0], [10 / 3], []], [[10 / 3], [20 / 3], [50 / 3]]]
    assert [len(each.asked) for each in scores] == [2, 2]
    assert kept(file).of(rows((0, 1, 0), (0, 5, 0)), Scores()).tolist() == [10 / 3, 50 / 3]
    assert len(file.read_bytes().splitlines()) == 2, "one rank writes for all"
