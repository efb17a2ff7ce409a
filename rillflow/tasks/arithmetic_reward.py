"""Reward of the arithmetic task: 1 for the exact answer, 0 for anything else.

It is loaded by path in a child process, and imports nothing from Rillflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def reward(
    prompts: Sequence[object], completions: Sequence[Any], answer: Sequence[str], **columns: object
) -> list[float]:
    """Return one score per completion; surrounding whitespace does not count."""
    del prompts, columns
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
