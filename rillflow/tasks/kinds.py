"""Kinds: what rows of data are, from a record of a file to a step's batch and an evaluation.

    record ─ read ─> row ─ Encoder ─> tokens of prompt and answers ─ arranged, batch ─> fields of a step
    held-out batch ─ algorithm.score ─> rewards ─ evaluated ─> Evaluation

An algorithm names its kind. A kind of your own is a subclass that the algorithm gives as ``data``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from rillflow.errors import DataError
from rillflow.formulas.interval import wilson
from rillflow.tasks.example import Example, example_of, shown, text_of

if TYPE_CHECKING:
    from torch import Tensor

    from rillflow.records.batch import Batch
    from rillflow.runs.json_lines import JSON
    from rillflow.runs.reader import Evaluation
    from rillflow.tasks.encoded import Encoded

Epochs: TypeAlias = int | Sequence[int]
"""Epoch of all rows, or of each."""
ARITHMETIC, GYM = "arithmetic", "reasoning-gym:"
"""Built-in sources, whose problems have one right answer each."""


class DataKind:
    """A kind of data; an algorithm has one object of it.

    Example:
        class RankedLists(DataKind):
            name, fields = "ranked lists", ("tokens", "loss_mask")
            answers = ("best answer", "second answer", "third answer")

            def read(self, row, index, place): ...
    """

    name: ClassVar[str]
    """Its name in messages."""
    fields: ClassVar[tuple[str, ...]]
    """Fields that a step receives."""
    columns: ClassVar[tuple[str, ...]] = ("prompt",)
    """Columns that a file must have."""
    answers: ClassVar[tuple[str, ...]] = ()
    """Names of a row's answers, which are encoded; empty if answers are sampled."""
    stops_early: ClassVar[bool] = False
    """Whether answers are cut after their first end token, where sampling would stop."""
    unit: ClassVar[str] = "row"
    """Word for one row of the data."""
    sources: ClassVar[tuple[str, ...]] = ()
    """Built-in sources that can make such rows."""

    def __str__(self) -> str:
        return self.name

    def read(self, row: dict[str, Any], index: int, place: str) -> Example:
        """Return a file's record as a row; the record's dict becomes its columns.

        Raises:
            DataError: the record is no such row. The message does not say where the record is.
        """
        return example_of(row, index, place)

    def made(self, problems: Sequence[Example], seed: int) -> Sequence[Example]:
        """Return rows made of the problems of a built-in source; the problems themselves if they are rows."""
        del seed
        return problems

    def require_source(self, source: str) -> None:
        """Raise DataError for a built-in source that cannot make such rows."""
        built_in = GYM if source.startswith(GYM) else source
        if built_in in (ARITHMETIC, GYM) and built_in not in self.sources:
            others = "".join(f", or to {each}" for each in self.sources)
            raise DataError(
                f"task.source is {source!r}",
                why=f"its problems have one answer each, and the algorithm needs {self}",
                fix=f"set task.source to a file with the columns {', '.join(self.columns)}{others}",
            )

    def is_used(self, row: Example) -> bool:
        """Return whether a row is trained on."""
        del row
        return True

    def arranged(self, rows: Sequence[Encoded], context: int) -> Sequence[Encoded]:
        """Return the rows of one step as they are trained on, each at most ``context`` tokens."""
        del context
        return rows

    def batch(self, rows: Sequence[Encoded], epoch: Epochs, columns: Sequence[str] = ()) -> Batch:
        """Return rows as a batch: prompts, or all answers; see ``prompts.answered_batch``."""
        from rillflow.tasks.prompts import answered_batch, prompt_batch

        if not self.answers:
            return prompt_batch(rows, epoch=epoch)
        return answered_batch(rows, epoch=epoch, columns=columns)

    def evaluated(self, scores: Batch, rows: Batch) -> Evaluation:
        """Return how an algorithm's scores judge held-out rows.

        Args:
            scores: the field ``rewards`` [B] of all answers, those of one row neighbours.
            rows: the held-out rows.
        """
        raise NotImplementedError


class Prompts(DataKind):
    """Prompts to sample answers for."""

    name, fields = "prompts", ("tokens", "columns")
    sources = (ARITHMETIC, GYM)


class Demonstrations(Prompts):
    """Prompts with an answer to learn."""

    name, fields = "demonstrations", ("tokens", "loss_mask")
    columns, answers = ("prompt", "completion"), ("completion",)

    def read(self, row: dict[str, Any], index: int, place: str) -> Example:
        """See DataKind; a row with ``text`` alone is learnt from its first token on."""
        if "text" not in row or row.keys() & {"prompt", "messages"}:
            return example_of(row, index, place)
        text = row.pop("text")
        if not isinstance(text, str) or not text:
            raise DataError(f"the text is {shown(text)}", why="the column 'text' is learnt, so it is a text")
        return Example(index=index, prompt="", completion=text_of(text, "text"), columns=row, place=place)

    def is_used(self, row: Example) -> bool:
        """See DataKind; bad answers are not imitated."""
        return all(row.labels.values())


PROMPTS, DEMONSTRATIONS = Prompts(), Demonstrations()


def accuracy(right: Tensor, more: Mapping[str, JSON]) -> Evaluation:
    """Return the share of held-out rows that are ``right`` [B], with further measurements."""
    from rillflow.runs.reader import Evaluation

    correct, count = int(right.sum()), len(right)
    return Evaluation(
        count=count,
        mean_reward=correct / count,
        correct=correct,
        is_accuracy=True,
        interval=wilson(correct, count),
        more=more,
    )
