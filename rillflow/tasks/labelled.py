"""Labelled: a prompt with one answer, labelled good or bad.

    a row of a file ── labelled_of ──> LabelledAnswer(prompt, completion, label, columns)
    pairs ── labelled_halves ────────^   the better answer of one, the worse of the next

It is an example whose answer may be bad; supervised steps skip the bad answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.errors import DataError, nearest
from rillflow.tasks.example import Example, answer_of, prompt_of, shown
from rillflow.tasks.preference import Preference


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledAnswer(Example):
    """One answer, good or bad.

    Example:
        LabelledAnswer(index=3, prompt="17+25=", completion="43", label=False)
    """

    label: bool
    """Whether the answer is good."""

    @property
    def compared(self) -> frozenset[str]:
        """See Example; always empty, because all answers to one prompt are held out together."""
        return frozenset()

    def plain(self) -> list[Any]:
        """See Example."""
        return [*Example.plain(self), self.label]


def labelled_of(row: dict[str, Any], index: int, place: str) -> LabelledAnswer:
    """Return a row with ``prompt``, ``completion`` and ``label``; the row's dict becomes its columns.

    Raises:
        DataError: as ``example_of``; the row is a pair; the answer is missing, null, or neither text nor one
            assistant message; the label is not true or false. The message does not say where the row is.
    """
    for name in ("completion", "label"):
        if name not in row:
            is_pair = {"chosen", "rejected"} <= row.keys()
            raise DataError(
                f"there is no column {name!r}",
                why=f"the columns are {', '.join(map(repr, row)) or 'none'}",
                fix="choose an algorithm that learns from pairs, which these rows are"
                if is_pair
                else nearest(name, row),
            )
    prompt, completion, label = prompt_of(row), answer_of(row.pop("completion"), "completion"), row["label"]
    if not isinstance(label, bool):
        raise DataError(
            f"the label is {shown(label)}",
            why="a label is true for a good answer and false for a bad one",
            fix="write true or false, without quotes",
        )
    return LabelledAnswer(
        index=index, prompt=prompt, completion=completion, label=label, columns=row, place=place
    )


def labelled_halves(pairs: Sequence[Preference]) -> list[LabelledAnswer]:
    """Return one answer of each pair: the better one and the worse one in turn, starting with the better."""
    return [
        LabelledAnswer(
            index=pair.index,
            prompt=pair.prompt,
            completion=pair.rejected if number % 2 else pair.completion,
            label=not number % 2,
            columns=pair.columns,
            place=pair.place,
        )
        for number, pair in enumerate(pairs)
    ]


def is_bad(example: Example) -> bool:
    """Return whether the row's answer must not be imitated."""
    return isinstance(example, LabelledAnswer) and not example.label
