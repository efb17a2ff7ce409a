"""The arithmetic task's scorer: 1 for the answer itself, 0 for anything else.

Runs in a child process that has nothing of Rillflow imported.
"""

from __future__ import annotations

from collections.abc import Sequence


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object
) -> list[float]:
    """One score a completion; blanks around it do not count."""
    del prompts, columns
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
