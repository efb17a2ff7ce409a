"""Prompts: batches of examples in an order that a resumed run continues exactly.

encoded rows ── PromptStream.take ──> (epoch, row) ─┬─ prompt_batch ───> tokens of the prompt
    one permutation per epoch                       └─ answered_batch ─> prompt and each answer
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from rillflow.errors import DataError
from rillflow.formulas.counter import permutation
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish
from rillflow.records.row import RowId
from rillflow.tasks.encoded import Encoded
from rillflow.tasks.kinds import Epochs

Row = TypeVar("Row")


class Draw(NamedTuple, Generic[Row]):
    """One row of the stream."""

    epoch: int
    """Number of completed passes over the data."""
    row: Row
    """The row."""


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """A position in the stream, as plain data. Example: ``StreamPosition(**saved)``."""

    epoch: int = 0
    """Index of the current pass over the data."""
    offset: int = 0
    """Rows taken in the current epoch."""
    rows: int | None = None
    """Rows of the data when the epoch began; None: all. Rows added since join at the next epoch."""


class PromptStream(Generic[Row]):
    """Endless stream of rows: every epoch has each row once, in its own order.

    A row that is None is skipped without a change to the order of the other rows. Rows added at the end since
    the position was saved join with the next epoch, so the order of the current epoch does not change.

    Example:
        stream = PromptStream(task.train, seed=0)
        first = stream.take(64)
        again = PromptStream(task.train, seed=0, position=stream.position)   # goes on where stream is

    Args:
        rows: at least one that is not None.
        seed: determines the order of every epoch.
        position: start of the stream.

    Raises:
        DataError: there are no rows, or the position is beyond their end.
    """

    def __init__(
        self, rows: Sequence[Row | None], *, seed: int, position: StreamPosition = StreamPosition()
    ) -> None:
        size = len(rows) if position.rows is None else position.rows
        is_there = 0 <= position.offset <= size <= len(rows) and position.epoch >= 0
        if all(row is None for row in rows) or not is_there:
            raise DataError(
                f"the stream starts at epoch {position.epoch}, row {position.offset} of {len(rows)} rows",
                why="the position was saved with other data, or there are no rows",
            )
        self._rows = rows
        self._seed = seed
        self.position = StreamPosition(epoch=position.epoch, offset=position.offset, rows=size)
        """Position of the next row."""
        self._order: list[int] = self._permutation(position.epoch, size)

    def take(self, count: int) -> list[Draw[Row]]:
        """Return the next ``count`` rows, across epochs if necessary."""
        drawn: list[Draw[Row]] = []
        epoch, offset = self.position.epoch, self.position.offset
        while len(drawn) < count:
            if offset == len(self._order):
                epoch, offset = epoch + 1, 0
                self._order = self._permutation(epoch, len(self._rows))
            part = self._order[offset : offset + count - len(drawn)]
            drawn += [Draw(epoch, row) for index in part if (row := self._rows[index]) is not None]
            offset += len(part)
        self.position = StreamPosition(epoch=epoch, offset=offset, rows=len(self._order))
        return drawn

    def state(self) -> dict[str, int]:
        """Return the position as a checkpoint holds it."""
        return asdict(self.position)

    def _permutation(self, epoch: int, size: int) -> list[int]:
        order: list[int] = permutation(self._seed, size, stream=epoch).tolist()
        return order


def prompt_batch(rows: Sequence[Encoded], *, epoch: Epochs) -> Batch:
    """Return prompts to sample answers for: ``tokens`` and ``columns``, ids (epoch, index, 0).

    Args:
        rows: B rows.
        epoch: epoch of all rows, or of each.
    """
    epochs = [epoch] * len(rows) if isinstance(epoch, int) else epoch
    return Batch(
        ids=row_ids([RowId(each, row.example.index, 0) for each, row in zip(epochs, rows, strict=True)]),
        fields={
            "tokens": Ragged.from_rows([row.prompt for row in rows]),
            "columns": Ragged.from_text(row.example.as_json() for row in rows),
        },
    )


def _learnt(tokens: Ragged, starts: Tensor, learnt: Sequence[array[int] | None]) -> Tensor:
    """Return [T] bool: the tokens of each answer, or those of them that are learnt."""
    found = tokens.positions >= tokens.expand(starts)
    ends = tokens.lengths.cumsum(0).tolist()
    for end, each in zip(ends, learnt, strict=True):
        if each is not None:
            found[end - len(each) : end] = torch.frombuffer(each, dtype=torch.int8).bool()
    return found


def answered_batch(rows: Sequence[Encoded], *, epoch: Epochs, columns: Sequence[str] = ()) -> Batch:
    """Return answers to learn from: the fields of ``rollout_batch``, with a loss mask on answer and end.

    Every answer becomes a row of its own, its place the sample: of a pair, sample 0 is chosen, sample 1
    rejected. A row's ``labels`` become fields [B], such as ``label`` bool, which says whether the row's own
    answer, sample 0, is good.

    Args:
        rows: rows with B answers, each with as many.
        epoch: epoch of all rows, or of each.
        columns: columns of numbers that become fields [B] float32.
    """
    epochs = [epoch] * len(rows) if isinstance(epoch, int) else epoch
    made = [
        (RowId(each, row.example.index, sample), row, answer)
        for each, row in zip(epochs, rows, strict=True)
        for sample, answer in enumerate(row.answers)
    ]
    tokens = Ragged.from_rows([row.prompt + answer for _, row, answer in made])
    starts = torch.tensor([len(row.prompt) for _, row, _ in made], dtype=torch.int64)
    nothing = torch.zeros(tokens.values.shape[0])
    return Batch(
        ids=row_ids([name for name, _, _ in made]),
        fields={
            "tokens": tokens,
            "loss_mask": tokens.with_values(_learnt(tokens, starts, [row.learnt for _, row, _ in made])),
            "sampler_logprobs": tokens.with_values(nothing),
            "versions": tokens.with_values(torch.full(nothing.shape, -1, dtype=torch.int32)),
            "finish": torch.full((len(made),), int(Finish.STOP), dtype=torch.int8),
            "columns": Ragged.from_text(row.example.as_json() for _, row, _ in made),
            **{
                name: torch.tensor([row.example.labels[name] for _, row, _ in made])
                for name in (rows[0].example.labels if rows else ())
            },
            **{
                name: torch.tensor([row.example.columns[name] for _, row, _ in made], dtype=torch.float32)
                for name in columns
            },
        },
    )
