"""A reward of one's own: what share of the answer is the letter that was asked for."""

from __future__ import annotations

from collections.abc import Sequence


def letter_share(
    prompts: Sequence[str], completions: Sequence[str], letter: Sequence[str], **_: object
) -> list[float]:
    """One score an answer, from 0 to 1; ``letter`` is a column of prompts.jsonl."""
    del prompts
    return [
        answer.count(wanted) / len(answer) if answer else 0.0
        for answer, wanted in zip(completions, letter, strict=True)
    ]
