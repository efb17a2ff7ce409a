"""A reward to give in Python; its children load this file, which imports nothing."""

from __future__ import annotations


def longer(completions: list[str]) -> list[float]:
    """Score the length."""
    return [len(text) / 3 for text in completions]
