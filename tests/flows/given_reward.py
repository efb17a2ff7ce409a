"""A reward function for Python's API; children load this file, so it imports nothing."""

from __future__ import annotations


def longer(completions: list[str]) -> list[float]:
    """Score the length."""
    return [len(text) / 3 for text in completions]
