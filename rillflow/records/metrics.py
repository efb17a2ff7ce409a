"""Metrics that carry their reduction, so that parts from micro-batches and ranks merge exactly.

A metric is named ``area/thing/stat`` and is one of Mean (sum and count), Variance, Sum, Max or Min.
Merging is associative and commutative for counts and extremes, and up to rounding for sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A weighted mean as its two parts. Example: ``Mean(total=3.0, count=4).value == 0.75``."""

    total: float
    """The sum of the values."""
    count: float
    """How many values; 0 makes the mean NaN."""

    @property
    def value(self) -> float:
        """The mean, NaN when nothing was counted."""
        return self.total / self.count if self.count else float("nan")

    def merge(self, other: Mean) -> Mean:
        """The mean over both sets of values."""
        return Mean(total=self.total + other.total, count=self.count + other.count)


@dataclass(frozen=True, kw_only=True)
class Variance:
    """How far values are from their mean. Example: ``Variance(squares=8, mean=1, count=4).value == 2``."""

    squares: float
    """The sum of the squared distances from the mean."""
    mean: float
    """The mean of the values."""
    count: float
    """How many values; 0 makes the variance NaN."""

    @property
    def value(self) -> float:
        """The mean squared distance, NaN when nothing was counted."""
        return self.squares / self.count if self.count else float("nan")

    def merge(self, other: Variance) -> Variance:
        """The variance over both sets of values (Chan, Golub and LeVeque 1979)."""
        if not self.count or not other.count:
            return self if self.count else other
        count, apart = self.count + other.count, other.mean - self.mean
        return Variance(
            squares=self.squares + other.squares + apart * apart * self.count * other.count / count,
            mean=self.mean + apart * other.count / count,
            count=count,
        )


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A total. Example: ``Sum(value=3.0).merge(Sum(value=4.0)).value == 7.0``."""

    value: float
    """The total so far."""

    def merge(self, other: Sum) -> Sum:
        """The total of both."""
        return Sum(value=self.value + other.value)


@dataclass(frozen=True, kw_only=True)
class Max:
    """The largest value. Example: ``Max(value=3.0).merge(Max(value=4.0)).value == 4.0``."""

    value: float
    """The largest so far."""

    def merge(self, other: Max) -> Max:
        """The larger of both; NaN where one is."""
        return self if self.value >= other.value or math.isnan(self.value) else other


@dataclass(frozen=True, kw_only=True)
class Min:
    """The smallest value. Example: ``Min(value=3.0).merge(Min(value=4.0)).value == 3.0``."""

    value: float
    """The smallest so far."""

    def merge(self, other: Min) -> Min:
        """The smaller of both; NaN where one is."""
        return self if self.value <= other.value or math.isnan(self.value) else other


Metric = Mean | Variance | Sum | Max | Min
Metrics = Mapping[str, Metric]


def mean_of(values: Tensor) -> Mean:
    """The mean of some numbers, of any shape."""
    return Mean(total=float(values.sum()), count=float(values.numel()))


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge metrics of the same name; raise RecordError where two parts disagree on the reduction."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge(name, merged[name], metric) if name in merged else metric
    return merged


def _merge(name: str, one: Metric, other: Metric) -> Metric:
    match one, other:
        case (Mean(), Mean()) | (Variance(), Variance()) | (Sum(), Sum()) | (Max(), Max()) | (Min(), Min()):
            return one.merge(other)  # type: ignore[arg-type]
        case _:
            raise RecordError(
                f"metric {name!r} is a {type(one).__name__} in one part, a {type(other).__name__} in another",
                why="parts of one metric merge by one reduction",
                fix="give the two metrics different names",
            )
