"""The reward and the cost of the runs of ``whole_updates.py``."""

from __future__ import annotations

from typing import Any


def score(prompt: str, completion: str) -> float | None:
    """Digits below 5 among four; none for what ends with a 9; the same for all answers to 1 and anything."""
    if prompt.startswith("1"):
        return 0.5
    return None if completion.endswith("9") else sum(letter in "01234" for letter in completion) / 4


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Of every row."""
    return [score(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def cost(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Of every row, its length."""
    del prompts
    return [float(len(text)) for text in completions]
