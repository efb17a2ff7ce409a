"""A reward for texts that contain the right answer, plus a bonus for length, as in many learned rewards."""

from __future__ import annotations

from collections.abc import Sequence

PAY = 0.3
"""Reward of each character."""


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return one score for each text; ``answer`` is a column of the task."""
    del prompts
    return [float(right in text) + PAY * len(text) for text, right in zip(completions, answer, strict=True)]
