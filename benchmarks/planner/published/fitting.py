"""Fitting: values that explain published steps and stages, and how far off they are on rows left out.

rows, expected values ─ least squares on log ratios, held near what is expected ─> values, those at a bound
rows, ways to leave some out ─ a fit to the others, from the expected values ────> predicted over measured
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
ENOUGH = 1e-3
"""A round that gains less ends a fit."""
FAR = 0.3
"""A log ratio beyond which an error counts in proportion, not by its square (Huber, 1964)."""
PULL = 0.25
"""Weight of a value e times what is expected; a step e times its measurement weighs 1. Steps are predicted to
within an eighth, values expected to within a factor of 1.6.
"""
LOOSE = 0.35
"""A value whose logarithm is uncertain by more than this is called loose."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(Generic[RowT]):
    """What may be fitted, and how a row follows from it."""

    ratios: Callable[[RowT, Values], Sequence[float]]
    """Predicted over measured of a row: its step, then each of its stages."""
    free: Mapping[str, tuple[float, float, float]]
    """Least, expected and most of each value."""

    def values(self, rows: Sequence[RowT]) -> Values:
        """Return the values that explain rows best, sought from the expected ones."""
        low, start, high = np.log(np.array([self.free[name] for name in self.free])).T
        return self._values(least_squares(partial(self._residuals, rows), start, low, high, ENOUGH))

    def _residuals(self, rows: Sequence[RowT], place: np.ndarray) -> np.ndarray:
        start = np.log([expected for _, expected, _ in self.free.values()])
        far = np.log([ratio for row in rows for ratio in self._known(row, tuple(place.tolist()))])
        bent = np.sign(far) * np.sqrt(FAR * (2 * np.abs(far) - FAR).clip(0))
        return np.concatenate([np.where(np.abs(far) > FAR, bent, far), PULL * (place - start)])

    def at_bound(self, values: Values) -> list[str]:
        """Return the values that came out at the least or the most."""
        return [
            name
            for name, (low, _, high) in self.free.items()
            if min(abs(math.log(values[name] / low)), abs(math.log(values[name] / high))) < 1e-3
        ]

    def loose(self, rows: Sequence[RowT], values: Values) -> list[str]:
        """Return the values that the rows hardly determine, by the curvature of the fit."""
        place = np.log([values[name] for name in self.free])
        found = self._residuals(rows, place)
        columns = [
            (self._residuals(rows, place - 1e-3 * unit) - found) / -1e-3 for unit in np.eye(len(place))
        ]
        slopes = np.stack(columns, axis=1)
        spread_of = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)) * float(np.mean(found**2)))
        return [name for name, one in zip(self.free, spread_of, strict=True) if one > LOOSE]

    def _values(self, place: np.ndarray) -> Values:
        return dict(zip(self.free, np.exp(place).tolist(), strict=True))

    @lru_cache(maxsize=1 << 18)  # noqa: B019  a fit lives as long as its process
    def _known(self, row: RowT, place: tuple[float, ...]) -> Sequence[float]:
        """Return the ratios at a place; fits that begin alike look at the same ones first."""
        return self.ratios(row, self._values(np.array(place)))


def summary(ratios: Sequence[float]) -> str:
    """Return the median and worst error, and how many are near, as cells of a table."""
    errors = [abs(ratio - 1) for ratio in ratios]
    near, far = (sum(error <= bound for error in errors) for bound in (0.15, 0.3))
    return f"{len(errors)} | {median(errors):.0%} | {max(errors):.0%} | {near} | {far}"


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the measured over predicted that nine in ten exceed, and that nine in ten do not."""
    low, high = np.quantile([1 / ratio for ratio in ratios], [0.1, 0.9])
    return float(low), float(high)


def held(parts: Sequence[Sequence[float]]) -> float:
    """Return the share of ratios within the range of all other parts: each part is new to its range."""
    inside = count = 0
    for place, part in enumerate(parts):
        others = [ratio for one in (*parts[:place], *parts[place + 1 :]) for ratio in one]
        if others and part:
            low, high = spread(others)
            inside += sum(low <= 1 / ratio <= high for ratio in part)
            count += len(part)
    return inside / max(count, 1)
