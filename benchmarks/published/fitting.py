"""Fitting: values that explain published steps, and how far off they are on steps left out.

rows, expected values ─ least squares on log ratios, held near what is expected ─> values, those at a bound
rows, ways to leave some out ─ a fit to the others each time ──────────────────> measured over predicted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import Generic, TypeVar

import numpy as np

from rillflow_planner.calibration import least_squares

RowT = TypeVar("RowT")
Values = dict[str, float]
ENOUGH = 2e-3
"""A round that gains less ends a fit."""
PULL = 0.1
"""How much a value e times what is expected weighs, where a step e times its measurement weighs 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(Generic[RowT]):
    """What may be fitted, and how a row follows from it."""

    ratios: Callable[[RowT, Values], Sequence[float]]
    """Predicted over measured of a row: its step, or each of its stages."""
    free: Mapping[str, tuple[float, float, float]]
    """Least, expected and most of each value."""

    def values(self, rows: Sequence[RowT], begin: Values | None = None) -> Values:
        """The values that explain rows best; sought from ``begin`` on, or from what is expected."""
        low, start, high = np.log(np.array([self.free[name] for name in self.free])).T
        first = start if begin is None else self._place(begin)
        return self._values(least_squares(partial(self._residuals, rows), first, low, high, ENOUGH))

    def residue(self, rows: Sequence[RowT], values: Values) -> float:
        """What a fit makes small: squares of log ratios and of distances from what is expected."""
        return float(np.square(self._residuals(rows, self._place(values))).sum())

    def _residuals(self, rows: Sequence[RowT], place: np.ndarray) -> np.ndarray:
        start = np.log([expected for _, expected, _ in self.free.values()])
        logs = [math.log(ratio) for row in rows for ratio in self._known(row, tuple(place.tolist()))]
        return np.array([*logs, *(PULL * (place - start))])

    def _place(self, values: Values) -> np.ndarray:
        return np.log([values[name] for name in self.free])

    def at_bound(self, values: Values) -> list[str]:
        """The values that came out at the least or the most."""
        return [
            name
            for name, (low, _, high) in self.free.items()
            if min(abs(math.log(values[name] / low)), abs(math.log(values[name] / high))) < 1e-3
        ]

    def left_out(self, rows: Sequence[RowT], part: Sequence[RowT], begin: Values) -> list[float]:
        """Predicted over measured of a part's rows, by a fit to all others."""
        values = self.values([row for row in rows if row not in part], begin)
        return [self.ratios(row, values)[0] for row in part]

    def _values(self, place: np.ndarray) -> Values:
        return dict(zip(self.free, np.exp(place).tolist(), strict=True))

    @lru_cache(maxsize=1 << 18)  # noqa: B019  a fit lives as long as its process
    def _known(self, row: RowT, place: tuple[float, ...]) -> Sequence[float]:
        """The ratios at a place; fits that begin alike look at the same ones first."""
        return self.ratios(row, self._values(np.array(place)))


def summary(ratios: Sequence[float]) -> str:
    """Median and worst error, and how many are near, as cells of a table."""
    errors = [abs(ratio - 1) for ratio in ratios]
    near, far = (sum(error <= bound for error in errors) for bound in (0.15, 0.3))
    return f"{len(errors)} | {median(errors):.0%} | {max(errors):.0%} | {near} | {far}"


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Measured over predicted that nine in ten exceed, and that nine in ten do not."""
    low, high = np.quantile([1 / ratio for ratio in ratios], [0.1, 0.9])
    return float(low), float(high)
