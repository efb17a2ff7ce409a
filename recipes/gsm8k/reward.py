"""A reward without dependencies: whether the text after the last #### is the right number."""

from __future__ import annotations

from collections.abc import Sequence


def right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for the right number and 0 for another or none; ``answer`` is the worked answer of a row."""
    return [float(_final(said) == _final(known)) for said, known in zip(completions, answer, strict=True)]


def _final(text: str) -> str:
    _, mark, after = text.rpartition("####")
    return after.strip() if mark else ""
