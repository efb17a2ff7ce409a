"""How far a measured share may be from the true one. No torch here: reports import it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from rillflow.errors import FormulaError

Z95 = 1.959963984540054
"""The normal distribution's two-sided 95% quantile."""


def wilson(correct: int, count: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval (low, high) of a share of ``correct`` in ``count``.

    centre = (p + z^2/2n) / (1 + z^2/n), half = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n) (E. B. Wilson,
    JASA 1927). Without a trial nothing is known: (0, 1).

    Raises:
        FormulaError: ``correct`` is not between 0 and ``count``.
    """
    if not 0 <= correct <= count:
        raise FormulaError(f"wilson: {correct} of {count} were correct", why="a share lies between 0 and 1")
    if count == 0:
        return 0.0, 1.0
    share, square = correct / count, z * z / count
    centre = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding left out


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float] | None:
    """The normal interval (low, high) of a mean: mean -+ z s / sqrt(n), s with n - 1.

    None where the values do not differ: how far their mean may be off is then unknown.
    """
    if len(set(values)) < 2:
        return None
    mean, half = fmean(values), z * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half
