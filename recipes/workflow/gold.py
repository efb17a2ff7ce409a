"""The gold reward: the share of an answer's characters that are right in their places."""

from __future__ import annotations

from collections.abc import Sequence


def gold(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Return the share of characters that are right in their places; missing and excess ones are wrong."""
    del prompts
    return [
        sum(one == other for one, other in zip(text, right, strict=False)) / max(len(text), len(right))
        for text, right in zip(completions, answer, strict=True)
    ]
