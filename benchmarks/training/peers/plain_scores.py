"""Reward and cost functions for the runs of ``whole_updates.py``."""

from __future__ import annotations

from typing import Any


def score(prompt: str, completion: str) -> float | None:
    """Return the share of digits below 5 among four.

    A completion that ends with 9 has no score. All completions of a prompt that begins with 1 get 0.5.
    """
    if prompt.startswith("1"):
        return 0.5
    return None if completion.endswith("9") else sum(letter in "01234" for letter in completion) / 4


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Return the score of every row."""
    return [score(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def cost(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the length of every completion."""
    del prompts
    return [float(len(text)) for text in completions]
