"""Buckets: rows of similar length, for which attention is computed together. Imports no torch, for plans."""

from __future__ import annotations

from collections.abc import Sequence

_FILL = 0.75
"""Minimum length of a row in a bucket, as a share of the bucket's longest row."""
_SHORT = 32
"""A bucket whose longest row has at most this length takes all remaining rows."""


def bucket_bounds(lengths: Sequence[int]) -> list[int]:
    """Return the first index of each bucket, for lengths in falling order, and the end; omit empty rows.

    Example: ``bucket_bounds([100, 80, 40, 0]) == [0, 2, 3]``
    """
    bounds, least = list[int](), 0.0
    for place, length in enumerate(filled := [length for length in lengths if length]):
        if not bounds or length < least:
            bounds.append(place)
            least = length * _FILL if length > _SHORT else 0.0
    return [*bounds, len(filled)]
