"""Reward of the arithmetic task: 1 for the exact answer, 0 for anything else.

It is loaded by path in a child process, and imports nothing from Rillflow.
"""

from __future__ import annotations

from collections.abc import Sequence


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object
) -> list[float]:
    """Return one score per completion; surrounding whitespace does not count."""
    del prompts, columns
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
