"""Intervals: how far the mean of a few seeds may be from the true one, as the tables of results say it.

values of seeds ─ half_width ─> Student's t, two-sided 95% ─ interval ─> text of a cell
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t, two-sided 95%, by the number of seeds."""


def half_width(values: Sequence[float]) -> float:
    """Half of the interval of the mean, of 2 to 10 values."""
    return STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float]) -> str:
    """The mean with half of its interval; of one value the value."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    return f"{fmean(values):.3f} ± {half_width(values):.3f}"
