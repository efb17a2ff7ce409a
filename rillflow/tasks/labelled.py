"""Labelled: the kind of data with one answer to a prompt, labelled good or bad.

    a row of a file ── LABELLED.read ──> Example(prompt, completion, labels)
    pairs ── LABELLED.made ──────────────^   the better answer of one, the worse of the next

An answer may be bad; supervised steps skip the bad answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rillflow.errors import DataError
from rillflow.tasks.example import Example, answer_of, prompt_of, require_column, shown
from rillflow.tasks.kinds import ARITHMETIC, DataKind, accuracy
from rillflow.tasks.preference import PREFERENCES

if TYPE_CHECKING:
    from rillflow.records.batch import Batch
    from rillflow.runs.reader import Evaluation
    from rillflow.tasks.encoded import Encoded


class Labelled(DataKind):
    """Single answers, each good or bad, and each prompt again with another row's answer."""

    name, fields = "labelled answers", ("tokens", "loss_mask", "label")
    columns, answers = ("prompt", "completion", "label"), ("completion",)
    sources = (ARITHMETIC,)

    def read(self, row: dict[str, Any], index: int, place: str) -> Example:
        """Return a record with ``prompt``, ``completion`` and ``label``; its dict becomes the columns.

        Raises:
            DataError: as ``example_of``; the record is a pair; the answer is missing, null, or neither text
                nor one assistant message; the label is not true or false. The message does not say where the
                row is.
        """
        other = "these rows are pairs: choose an algorithm that learns from pairs"
        for name in ("completion", "label"):
            require_column(row, name, other * ({"chosen", "rejected"} <= row.keys()))
        prompt = prompt_of(row)
        completion = answer_of(row.pop("completion"), "completion", prompt)
        label = row["label"]
        if not isinstance(label, bool):
            raise DataError(
                f"the label is {shown(label)}",
                why="a label is true for a good answer and false for a bad one",
                fix="write true or false, without quotes",
            )
        labels = {"label": label}
        return Example(
            index=index, prompt=prompt, completion=completion, labels=labels, columns=row, place=place
        )

    def made(self, problems: Sequence[Example], seed: int) -> list[Example]:
        """Return each problem with one answer: right and wrong in turn, starting with the right one."""
        return [
            replace(pair, completion=pair.answers[number % 2], others=(), labels={"label": not number % 2})
            for number, pair in enumerate(PREFERENCES.made(problems, seed))
        ]

    def arranged(self, rows: Sequence[Encoded], context: int) -> list[Encoded]:
        """Add to each row a second answer, that of the row before it; the first row gets that of the last.

        Each prompt then has an answer to another prompt, and all answers are used once (KTO's estimate of the
        divergence, arXiv 2402.01306, 4.1). An answer that does not fit into the context is cut.
        """
        before = [rows[-1], *rows[:-1]]
        return [
            replace(row, answers=(row.answers[0], other.answers[0][: max(1, context - len(row.prompt))]))
            for row, other in zip(rows, before, strict=True)
        ]

    def evaluated(self, scores: Batch, rows: Batch) -> Evaluation:
        """Evaluate whether good held-out answers have rewards above 0, and bad ones below 0."""
        rewards, good = scores.dense("rewards").double(), rows.dense("label")
        right = (rewards > 0).where(good, rewards < 0)
        sides = {"good": rewards[good], "bad": rewards[~good]}
        above = (sides["good"][:, None] > sides["bad"]).double()
        more = {f"{name}_reward_mean": float(each.mean()) for name, each in sides.items() if len(each)}
        if above.numel():
            more["good_above_bad"] = float(above.mean())
        return accuracy(right, more)


LABELLED = Labelled()
