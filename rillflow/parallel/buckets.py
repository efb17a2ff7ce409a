"""Buckets: rows of like length, which attention computes side by side. No torch here: plans count them."""

from __future__ import annotations

from collections.abc import Sequence

_FILL = 0.75
"""A row joins a bucket when it is at least this share of the bucket's longest row."""
_SHORT = 32
"""A bucket whose longest row is this short takes all the rest."""


def bucket_bounds(lengths: Sequence[int]) -> list[int]:
    """Where buckets begin among rows in falling order, and where the last ends; no empty row is in one.

    Example: ``bucket_bounds([100, 80, 40, 0]) == [0, 2, 3]``
    """
    bounds, least = list[int](), 0.0
    for place, length in enumerate(filled := [length for length in lengths if length]):
        if not bounds or length < least:
            bounds.append(place)
            least = length * _FILL if length > _SHORT else 0.0
    return [*bounds, len(filled)]
