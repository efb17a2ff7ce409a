"""Preference: the kind of data with two answers to a prompt, one better than the other.

    a row of a file ── PREFERENCES.read ──> Example(prompt, completion = chosen, others = rejected)
    a made problem ──── a wrong answer next to the right one ──^

Its answer to learn from is the chosen one, so a pair can be split, streamed and imitated like any other
example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from rillflow.errors import DataError
from rillflow.formulas.interval import calibration_error
from rillflow.tasks.example import Answer, Example, Message, answer_of, prompt_of, require_column, shown
from rillflow.tasks.kinds import ARITHMETIC, DataKind, accuracy

if TYPE_CHECKING:
    from rillflow.records.batch import Batch
    from rillflow.runs.reader import Evaluation

_NEAR = 9
"""Largest difference between a wrong answer and the right one, so that the two are similar."""


class Pairs(DataKind):
    """Pairs of answers to one prompt, the better one first."""

    name, fields, unit = "preferences", ("tokens", "loss_mask", "columns"), "pair"
    columns, answers = ("prompt", "chosen", "rejected"), ("chosen answer", "rejected answer")
    stops_early, sources = True, (ARITHMETIC,)

    def read(self, row: dict[str, Any], index: int, place: str) -> Example:
        """Return a record with ``prompt``, ``chosen``, ``rejected`` as a pair; its dict becomes the columns.

        If both answers are whole conversations, the messages before the last one are the prompt. A separate
        prompt column must then hold the same messages, or the text of one of the user's messages.

        Raises:
            DataError: as ``example_of``; an answer is missing, null, or neither text nor one assistant
                message; the two are the same; two conversations differ before their last message, or from the
                prompt. The message does not say where the row is.
        """
        if row.keys() == {"chosen", "rejected"} and isinstance(row["chosen"], str):
            require_column(row, "prompt", _NO_PROMPT)
        prompt = _shared(row) or prompt_of(row)
        chosen, rejected = (_answer(row, name, prompt) for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise DataError(
                f"chosen and rejected are both {shown(chosen)}",
                why="equal answers express no preference",
                fix="remove the row",
            )
        return Example(
            index=index, prompt=prompt, completion=chosen, others=(rejected,), columns=row, place=place
        )

    def made(self, problems: Sequence[Example], seed: int) -> list[Example]:
        """Return the problems of arithmetic, each with its answer and a similar wrong one."""
        random = Random(seed ^ 0x57524F4E47)
        gaps = (random.choice((-1, 1)) * random.randint(1, _NEAR) for _ in problems)
        return [
            replace(one, others=(str(int(str(one.completion)) + gap),))
            for one, gap in zip(problems, gaps, strict=True)
        ]

    def evaluated(self, scores: Batch, rows: Batch) -> Evaluation:
        """Evaluate how scores order held-out pairs, the chosen answer first; equal scores count as wrong.

        Calibration compares the predicted probability sigmoid(s_chosen - s_rejected) with how often the
        chosen answer is better (``calibration_error``).
        """
        del rows
        chosen, rejected = scores.dense("rewards").view(-1, 2).double().unbind(1)
        likely, more = (chosen - rejected).sigmoid(), {}
        if "contradicted" in scores.fields:
            likely = chosen  # a judge's rewards are probabilities already
            met = scores.select(range(0, len(scores), 2))
            more = {
                name: float(met.dense(field).nanmean())
                for name, field in (("contradiction", "contradicted"), ("position_bias", "bias"))
            }
        margin, error = float((chosen - rejected).mean()), calibration_error(likely.tolist())
        return accuracy(chosen > rejected, {"margin_mean": margin, "calibration_error": error, **more})


PREFERENCES = Pairs()
_NO_PROMPT = (
    "move the beginning that both texts share into a column 'prompt'; texts with Human: and Assistant: are "
    "task.format = 'hh'"
)


def _shared(row: dict[str, Any]) -> tuple[Message, ...] | None:
    """Return the messages that two conversations share, leaving each its last one; None for other rows."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, list) and isinstance(rejected, list) and min(len(chosen), len(rejected)) > 1):
        return None
    if chosen[:-1] != rejected[:-1]:
        alike = [one == other for one, other in zip(chosen, rejected, strict=False)]
        raise DataError(
            f"chosen has {len(chosen)} messages and rejected {len(rejected)}; they share only the "
            f"first {[*alike, False].index(False)}",
            why="a pair is two answers to the same messages: only the last ones may differ",
            fix="end both conversations at the first assistant message that differs",
        )
    given = row.get("prompt")
    row |= {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
    prompt = prompt_of(row)
    assert not isinstance(prompt, str), "messages stay messages"
    asked = [turn["content"] for turn in Example(index=0, prompt=prompt).turns if turn["role"] == "user"]
    if given is not None and given not in asked and prompt_of({"prompt": given}) != prompt:
        raise DataError(
            f"the prompt is {shown(given)}, and chosen and rejected answer {shown(asked)}",
            why="chosen and rejected are whole conversations, which include the prompt",
            fix="remove the column 'prompt', or keep only the answers in the other two",
        )
    return prompt


def _answer(row: dict[str, Any], name: str, prompt: str | Sequence[Message]) -> Answer:
    """Remove an answer from a row and return it."""
    other = "these rows are labelled answers: choose an algorithm that learns from them"
    require_column(row, name, other * ({"completion", "label"} <= row.keys()))
    return answer_of(row.pop(name), f"answer {name!r}", prompt)
