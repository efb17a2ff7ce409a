"""Preference: a prompt with two answers, one better than the other.

    a row of a file ── preference_of ──> Preference(prompt, completion = chosen, rejected, columns)
    a made problem ──── a wrong answer next to the right one ──^

It is an example whose answer to learn from is the chosen one, so it can be split, streamed and imitated like
any other example.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from rillflow.errors import DataError, nearest
from rillflow.tasks.arithmetic import arithmetic_examples
from rillflow.tasks.example import Example, Message, answer_of, prompt_of, shown

_NEAR = 9
"""Largest difference between a wrong answer and the right one, so that the two are similar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference(Example):
    """One pair of answers; ``completion`` is the chosen one.

    Example:
        Preference(index=3, prompt="17+25=", completion="42", rejected="43")
    """

    rejected: str
    """The worse answer."""

    @property
    def compared(self) -> frozenset[str]:
        """See Example; always empty, because all answers to one prompt are held out together."""
        return frozenset()

    def plain(self) -> list[Any]:
        """See Example."""
        return [*Example.plain(self), self.rejected]


def preference_of(row: dict[str, Any], index: int, place: str) -> Preference:
    """Return a row with ``prompt``, ``chosen`` and ``rejected`` as a pair; its dict becomes the columns.

    If both answers are whole conversations, the messages before the last one are the prompt. A separate
    prompt column must then hold the same messages, or the text of one of the user's messages.

    Raises:
        DataError: as ``example_of``; an answer is missing, null, or neither text nor one assistant message;
            the two are the same; two conversations differ before their last message, or from the prompt. The
            message does not say where the row is.
    """
    prompt = _shared(row) or prompt_of(row)
    chosen, rejected = (_answer(row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(
            f"chosen and rejected are both {shown(chosen)}",
            why="equal answers express no preference",
            fix="remove the row",
        )
    return Preference(
        index=index, prompt=prompt, completion=chosen, rejected=rejected, columns=row, place=place
    )


def arithmetic_preferences(*, size: int, digits: int, operators: str, seed: int) -> list[Preference]:
    """Return the problems of ``arithmetic_examples``, each with its answer and a similar wrong one.

    Raises:
        DataError: an operator is unknown or repeated.
    """
    random = Random(seed ^ 0x57524F4E47)
    return [
        Preference(
            index=example.index,
            prompt=example.prompt,
            completion=example.completion,
            rejected=str(int(str(example.completion)) + random.choice((-1, 1)) * random.randint(1, _NEAR)),
            columns=example.columns,
            place=example.place,
        )
        for example in arithmetic_examples(size=size, digits=digits, operators=operators, seed=seed)
    ]


def _shared(row: dict[str, Any]) -> tuple[Message, ...] | None:
    """Return the messages that two conversations share, leaving each its last one; None for other rows."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, list) and isinstance(rejected, list) and min(len(chosen), len(rejected)) > 1):
        return None
    if chosen[:-1] != rejected[:-1]:
        alike = [one == other for one, other in zip(chosen, rejected, strict=False)]
        raise DataError(
            f"chosen has {len(chosen)} messages and rejected {len(rejected)}, alike in the "
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


def _answer(row: dict[str, Any], name: str) -> str:
    """Remove an answer from a row and return it."""
    if name not in row:
        raise DataError(
            f"there is no column {name!r}",
            why=f"the other columns are {', '.join(map(repr, row)) or 'none'}",
            fix="choose an algorithm that learns from labelled answers, which these rows are"
            if {"completion", "label"} <= row.keys()
            else nearest(name, row),
        )
    return answer_of(row.pop(name), f"answer {name!r}")
