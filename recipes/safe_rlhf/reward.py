"""Pays for the right answer wherever it stands, and, as many learned rewards do, for length."""

from __future__ import annotations

from collections.abc import Sequence

PAY = 0.3
"""Of every character, whatever it says."""


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """One score a text; ``answer`` is a column of the task."""
    del prompts
    return [float(right in text) + PAY * len(text) for text, right in zip(completions, answer, strict=True)]
