"""Prompts: examples as batches, in an order that a resume takes up exactly.

encoded rows ── PromptStream.take ──> (epoch, row) ─┬─ prompt_batch ───> tokens of the prompt
    order of an epoch: a permutation of its own     └─ answered_batch ─> prompt and answer; two rows a pair
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from rillflow.tasks.example import Example
from rillflow.tasks.labelled import LabelledAnswer

Row = TypeVar("Row")


class Draw(NamedTuple, Generic[Row]):
    """One row of the stream."""

    epoch: int
    """How many times the data had been gone through before."""
    row: Row
    """The row."""


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """A place in the stream, as plain data. Example: ``StreamPosition(**saved)``."""

    epoch: int = 0
    """The pass through the data."""
    offset: int = 0
    """Rows taken in it."""
    rows: int | None = None
    """Rows of the data as it began; None: all. Those that were added since join at the next one."""


class PromptStream(Generic[Row]):
    """An endless stream of rows: every epoch has each of them once, in an order of its own.

    A row that is None is passed over: which rows are left out changes nothing of the order of the others.
    Rows added at the end since the position was saved join with the next epoch, so the present one goes on
    as it began.

    Example:
        stream = PromptStream(task.train, seed=0)
        first = stream.take(64)
        again = PromptStream(task.train, seed=0, position=stream.position)   # goes on where stream is

    Args:
        rows: at least one that is not None.
        seed: decides every epoch's order.
        position: where to begin.

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
                f"there is no epoch {position.epoch}, row {position.offset} in {len(rows)} rows",
                why="the stream would begin there; the position belongs to other data, or there is no data",
            )
        self._rows = rows
        self._seed = seed
        self.position = StreamPosition(epoch=position.epoch, offset=position.offset, rows=size)
        """Where the next row comes from."""
        self._order: list[int] = self._permutation(position.epoch, size)

    def take(self, count: int) -> list[Draw[Row]]:
        """The next ``count`` rows; more than one epoch holds is fine."""
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
        """The position as a checkpoint holds it."""
        return asdict(self.position)

    def _permutation(self, epoch: int, size: int) -> list[int]:
        order: list[int] = permutation(self._seed, size, stream=epoch).tolist()
        return order


def prompt_batch(rows: Sequence[Encoded], *, epoch: int | Sequence[int]) -> Batch:
    """Prompts to sample answers for: ``tokens`` and ``columns``, ids (epoch, index, 0).

    Args:
        rows: B rows.
        epoch: of all rows, or of each.
    """
    epochs = [epoch] * len(rows) if isinstance(epoch, int) else epoch
    return Batch(
        ids=row_ids([RowId(each, row.example.index, 0) for each, row in zip(epochs, rows, strict=True)]),
        fields={
            "tokens": Ragged.from_rows([row.prompt for row in rows]),
            "columns": Ragged.from_text(row.example.as_json() for row in rows),
        },
    )


def answered_batch(
    rows: Sequence[Encoded], *, epoch: int | Sequence[int], columns: Sequence[str] = ()
) -> Batch:
    """Answers to learn from: the fields of ``rollout_batch``, the loss mask on the answer and its end.

    Of a row with two answers, a pair, there are two rows, sample 0 chosen and sample 1 rejected; of one that
    is labelled the field ``label`` [B] bool says whether its own answer, sample 0, is good.

    Args:
        rows: B rows, each with one answer or each with two.
        epoch: of all rows, or of each.
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
            "loss_mask": tokens.with_values(tokens.positions >= tokens.expand(starts)),
            "sampler_logprobs": tokens.with_values(nothing),
            "versions": tokens.with_values(torch.full(nothing.shape, -1, dtype=torch.int32)),
            "finish": torch.full((len(made),), int(Finish.STOP), dtype=torch.int8),
            "columns": Ragged.from_text(row.example.as_json() for _, row, _ in made),
            **_labels([row.example for _, row, _ in made]),
            **{
                name: torch.tensor([row.example.columns[name] for _, row, _ in made], dtype=torch.float32)
                for name in columns
            },
        },
    )


def with_others(rows: Sequence[Encoded], context: int) -> list[Encoded]:
    """Each row with a second answer, the one of the row before it, the first with the last one's.

    So a prompt is seen with an answer that is none of its own, and all answers are used once (KTO's estimate
    of the divergence, arXiv 2402.01306, 4.1). What does not fit into the context is cut.
    """
    before = [rows[-1], *rows[:-1]]
    return [
        replace(row, answers=(row.answers[0], other.answers[0][: max(1, context - len(row.prompt))]))
        for row, other in zip(rows, before, strict=True)
    ]


def _labels(examples: Sequence[Example]) -> dict[str, Tensor]:
    labels = [each.label for each in examples if isinstance(each, LabelledAnswer)]
    return {"label": torch.tensor(labels)} if labels else {}
