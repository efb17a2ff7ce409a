"""The gold reward: how much of the right answer stands where it belongs."""

from __future__ import annotations

from collections.abc import Sequence


def gold(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """The share of characters that are right in their place; one too many or too few counts as wrong."""
    del prompts
    return [
        sum(one == other for one, other in zip(text, right, strict=False)) / max(len(text), len(right))
        for text, right in zip(completions, answer, strict=True)
    ]
