"""A custom reward: the share of the answer that is the requested letter."""

from __future__ import annotations

from collections.abc import Sequence


def letter_share(
    prompts: Sequence[str], completions: Sequence[str], letter: Sequence[str], **_: object
) -> list[float]:
    """Return one score for each answer, from 0 to 1; ``letter`` is a column of prompts.jsonl."""
    del prompts
    return [
        answer.count(wanted) / len(answer) if answer else 0.0
        for answer, wanted in zip(completions, letter, strict=True)
    ]
