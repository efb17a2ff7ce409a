"""A cost for every character beyond the length of the right answer."""

from __future__ import annotations

from collections.abc import Sequence

PRICE = 0.25
"""Cost of each excess character; less than the reward pays for it."""


def cost(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return one cost for each text; ``answer`` is a column of the task."""
    del prompts
    return [PRICE * max(0, len(text) - len(right)) for text, right in zip(completions, answer, strict=True)]
