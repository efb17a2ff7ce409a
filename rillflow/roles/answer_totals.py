"""Answer totals: log probabilities of whole answers; those of data rows are computed once.

    rows ─ scorer ─> log probabilities of tokens ─ summed by row ─> [B]           totals_of
    rows of data ─┬─ known ──────────────────────────────────┬─> [B]              KeptTotals
                  └─ the others ─ compute ─ all dp ranks' ───┴─> table ─> a line of the file

A frozen model gives a row the same total in every epoch. A mark, a hash of tokens and loss mask, tells
whether a row has changed (a prompt with another answer, edited data). Every rank has the same table, so any
rank may get the row later; a resumed run reads the table, bit for bit.

Legend: B rows, K rows that are not in the table yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.records.batch import Batch
from rillflow.records.row import HELD_OUT_EPOCH
from rillflow.runs.durable import write_error
from rillflow.runs.json_lines import encode, read_lines
from rillflow.sharding.mesh import RankGroups
from rillflow.training.loss import are_sampled
from rillflow.training.scorer import Scorer

_ODD = -0x61C8864680B583EB
"""2^64 over the golden ratio, as a signed number: its multiples are spread evenly."""


def totals_of(scorer: Scorer, rows: Batch, temperature: float) -> Tensor:
    """Return [B] float64, the summed log probabilities of each row's loss tokens.

    Args:
        scorer: scorer of the model.
        rows: with ``tokens`` and ``loss_mask``.
        temperature: temperature of sampled rows; other rows are scored at 1.
    """
    found = scorer.logprobs(rows, temperature=temperature if are_sampled(rows) else 1.0)
    return found.with_values(found.values.double()).sums()


class KeptTotals:
    """Totals of data rows by (training or held out, prompt, sample), whatever the epoch.

    Args:
        groups: the ranks of the role; all of them request totals together.
        file: the file that keeps the totals after the process ends; None keeps them in memory only.

    Raises:
        RunDirectoryError: the file is damaged.
    """

    def __init__(self, groups: RankGroups, file: Path | None = None) -> None:
        self._groups, self._file = groups, file
        self._table = torch.full((2, 0, 2), torch.nan, dtype=torch.float64)
        self._marks = torch.zeros(2, 0, 2, dtype=torch.int64)
        if file is None:
            return
        found = read_lines(file)
        for line in found.lines:
            known: Any = line.data
            totals = torch.tensor(known["totals"], dtype=torch.float64)
            self._note(torch.tensor(known["rows"]), torch.tensor(known["marks"]), totals)
        if found.torn_at is not None and groups.everyone.rank == 0:
            with file.open("r+b") as torn:
                torn.truncate(found.torn_at)

    def of(self, rows: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Return [B] float64, the rows' totals; ``compute`` gives the totals [K] of unknown rows.

        Every rank calls it, also without rows. Sampled rows never come again and are not kept.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        sampled = torch.tensor([float(are_sampled(rows))])
        self._groups.dp.sum_([sampled])
        if sampled:
            return compute(rows)
        places = torch.cat([(rows.ids[:, :1] == HELD_OUT_EPOCH).long(), rows.ids[:, 1:]], 1)
        self._grow(places)
        marks, at = marks_of(rows), places.unbind(1)
        unknown = (self._table[at].isnan() | (self._marks[at] != marks)).nonzero().squeeze(1)
        missing = unknown[_firsts(places[unknown])]
        made = compute(rows.select(missing))
        self._groups.pp.sum_([made])  # the last stage has them, the others zeros
        named = torch.cat([places, marks[:, None]], 1)[missing]
        new = torch.cat(self._groups.dp.gather(named.flatten())).view(-1, 4)
        totals = torch.cat(self._groups.dp.gather(made))
        if len(new):
            first = _firsts(new[:, :3])
            self._note(new[first, :3], new[first, 3], totals[first])
            self._write(new[first, :3], new[first, 3], totals[first])
        found: Tensor = self._table[at]
        return found

    def _note(self, places: Tensor, marks: Tensor, totals: Tensor) -> None:
        self._grow(places)
        self._table[places.unbind(1)], self._marks[places.unbind(1)] = totals, marks

    def _grow(self, places: Tensor) -> None:
        """Grow the table to hold places [K, 3]."""
        if not len(places):
            return
        wanted = places.amax(0) + 1
        size = self._table.shape
        if int(wanted[1]) > size[1] or int(wanted[2]) > size[2]:
            prompts = max(size[1], 2 * int(wanted[1])) if int(wanted[1]) > size[1] else size[1]
            grown = self._table.new_full((2, prompts, max(size[2], int(wanted[2]))), torch.nan)
            grown[:, : size[1], : size[2]] = self._table
            marks = torch.zeros(grown.shape, dtype=torch.int64)
            marks[:, : size[1], : size[2]] = self._marks
            self._table, self._marks = grown, marks

    def _write(self, places: Tensor, marks: Tensor, totals: Tensor) -> None:
        if self._file is None or self._groups.everyone.rank:
            return
        try:
            with self._file.open("ab") as kept:
                line = {"rows": places.tolist(), "marks": marks.tolist(), "totals": totals.tolist()}
                kept.write(encode(line))
        except OSError as error:
            raise write_error(self._file, error) from error


def marks_of(rows: Batch) -> Tensor:
    """Return [B] int64, a hash of each row's tokens and loss mask that identifies its content."""
    tokens = rows.ragged("tokens")
    said = 2 * tokens.values + rows.ragged("loss_mask").values + 1
    mixed = (said + (tokens.positions + 1) * _ODD) * _ODD
    mixed = (mixed ^ (mixed >> 29)) * _ODD  # products wrap around: all 64 bits of a sum depend on every token
    return tokens.with_values(mixed ^ (mixed >> 32)).sums()


def _firsts(places: Tensor) -> Tensor:
    """Return where each place of [K, 3] occurs first; a batch may span the end of one epoch and the next."""
    if not len(places):
        return torch.zeros(0, dtype=torch.int64)
    numbers = torch.unique(places, dim=0, return_inverse=True)[1]
    index = torch.arange(len(places))
    first = index.new_full((int(numbers.max()) + 1,), len(places))
    return first.scatter_reduce(0, numbers, index, "amin").sort().values
