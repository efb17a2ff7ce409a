"""What a text costs: every character more than its answer needs."""

from __future__ import annotations

from collections.abc import Sequence

PRICE = 0.25
"""Of every character more than the answer needs: less than a reward pays for it."""


def cost(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """One cost a text; ``answer`` is a column of the task."""
    del prompts
    return [PRICE * max(0, len(text) - len(right)) for text, right in zip(completions, answer, strict=True)]
