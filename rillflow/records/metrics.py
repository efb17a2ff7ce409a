"""Metrics that carry their reduction, so that parts from micro-batches and ranks merge exactly.

A metric is named ``area/thing/stat`` and is a Mean (sum and count), Variance, Sum, Max, Min, LargestShare or
Histogram.
Merging is associative and commutative for counts and extremes, and up to rounding for sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A weighted mean, as a sum and a count. Example: ``Mean(total=3.0, count=4).value == 0.75``."""

    total: float
    """The sum of the values."""
    count: float
    """Number of values; 0 makes the mean NaN."""

    @property
    def value(self) -> float:
        """The mean, NaN when nothing was counted."""
        return self.total / self.count if self.count else float("nan")

    def merge(self, other: Mean) -> Mean:
        """Return the mean over both sets of values."""
        return Mean(total=self.total + other.total, count=self.count + other.count)


@dataclass(frozen=True, kw_only=True)
class Variance:
    """Mean squared distance from the mean. Example: ``Variance(squares=8, mean=1, count=4).value == 2``."""

    squares: float
    """The sum of the squared distances from the mean."""
    mean: float
    """The mean of the values."""
    count: float
    """Number of values; 0 makes the variance NaN."""

    @property
    def value(self) -> float:
        """The mean squared distance, NaN when nothing was counted."""
        return self.squares / self.count if self.count else float("nan")

    def merge(self, other: Variance) -> Variance:
        """Return the variance over both sets of values (Chan, Golub and LeVeque 1979)."""
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
        """Return the total of two sums."""
        return Sum(value=self.value + other.value)


@dataclass(frozen=True, kw_only=True)
class Max:
    """The largest value. Example: ``Max(value=3.0).merge(Max(value=4.0)).value == 4.0``."""

    value: float
    """The largest so far."""

    def merge(self, other: Max) -> Max:
        """Return the larger of both; NaN if either is NaN."""
        return self if self.value >= other.value or math.isnan(self.value) else other


@dataclass(frozen=True, kw_only=True)
class Min:
    """The smallest value. Example: ``Min(value=3.0).merge(Min(value=4.0)).value == 3.0``."""

    value: float
    """The smallest so far."""

    def merge(self, other: Min) -> Min:
        """Return the smaller of both; NaN if either is NaN."""
        return self if self.value <= other.value or math.isnan(self.value) else other


@dataclass(frozen=True, kw_only=True)
class LargestShare:
    """Share of the largest of some numbers in their sum. Example: ``(most=2, total=8)`` is 0.25."""

    most: float
    """Largest number; no number is negative."""
    total: float
    """Sum of all numbers; if it is 0, the share is 0."""

    @property
    def value(self) -> float:
        """The largest over the sum, 0 to 1."""
        return self.most / self.total if self.total else 0.0

    def merge(self, other: LargestShare) -> LargestShare:
        """Return the share over both sets of numbers; NaN if either has a NaN."""
        most = self.most if self.most >= other.most or math.isnan(self.most) else other.most
        return LargestShare(most=most, total=self.total + other.total)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of values by range. Example: ``histogram_of(tensor([0, 1, 1]), (0, 1)).counts == (1, 2, 0)``."""

    edges: tuple[float, ...]
    """Ascending edges; a value that equals an edge counts below that edge."""
    counts: tuple[int, ...]
    """Counts, one more than edges: up to the first edge, from there to the second, ..., above the last."""

    @property
    def value(self) -> float:
        """Number of values."""
        return float(sum(self.counts))

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of both sets of values, which have the same edges."""
        counts = map(sum, zip(self.counts, other.counts, strict=True))
        return Histogram(edges=self.edges, counts=tuple(counts))


Metric = Mean | Variance | Sum | Max | Min | LargestShare | Histogram
Metrics = Mapping[str, Metric]


def mean_of(values: Tensor) -> Mean:
    """Return the mean of numbers of any shape."""
    return Mean(total=float(values.sum()), count=float(values.numel()))


def histogram_of(values: Tensor, edges: Sequence[float]) -> Histogram:
    """Return the histogram of numbers [N]; NaN counts below the first edge."""
    places = (values[:, None] > values.new_tensor(edges)).sum(1)
    return Histogram(edges=tuple(edges), counts=tuple(places.bincount(minlength=len(edges) + 1).tolist()))


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge metrics of the same name; raise RecordError if two parts have different reductions."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge(name, merged[name], metric) if name in merged else metric
    return merged


def _merge(name: str, one: Metric, other: Metric) -> Metric:
    if type(one) is not type(other):
        raise RecordError(
            f"metric {name!r} is a {type(one).__name__} in one part, a {type(other).__name__} in another",
            why="all parts of a metric need the same reduction",
            fix="give the two metrics different names",
        )
    return one.merge(other)  # type: ignore[arg-type]
