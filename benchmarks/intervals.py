"""Confidence intervals of the mean over a few seeds, as text for the result tables.

values of seeds ─ half_width ─> Student's t, two-sided 95% ─ interval ─> text of a cell    (formulas.interval)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rillflow.formulas.interval import half_width


def interval(values: Sequence[float]) -> str:
    """Return the mean and the half width of its interval; the bare value if there is only one."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    return f"{fmean(values):.3f} ± {half_width(values):.3f}"


def whole(values: Sequence[float]) -> str:
    """Return a mean with its interval, in whole numbers."""
    mean, _, half = interval(values).partition(" ± ")
    return f"{float(mean):,.0f}" + (f" ± {float(half):,.0f}" if half else "")
