"""Intervals: how far the mean of a few seeds may be from the true one, as the tables of results say it.

values of seeds ─ half_width ─> Student's t, two-sided 95% ─ interval ─> text of a cell    (formulas.interval)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rillflow.formulas.interval import half_width


def interval(values: Sequence[float]) -> str:
    """The mean with half of its interval; of one value the value."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    return f"{fmean(values):.3f} ± {half_width(values):.3f}"
