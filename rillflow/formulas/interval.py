"""Intervals of measured shares and means. No torch here: reports import it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from rillflow.errors import FormulaError

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


def wilson(correct: float, count: int, z: float = Z95) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of a share of ``correct`` in ``count``.

    centre = (p + z^2/2n) / (1 + z^2/n), half = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n) (E. B. Wilson,
    JASA 1927). Without a trial it is (0, 1).

    Raises:
        FormulaError: ``correct`` is not between 0 and ``count``.
    """
    if not 0 <= correct <= count:
        raise FormulaError(
            f"wilson: {correct} of {count} were correct", why="the share must be between 0 and 1"
        )
    if count == 0:
        return 0.0, 1.0
    share, square = correct / count, z * z / count
    centre = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # guards against rounding


def student_t(freedom: int, level: float = 0.95) -> float:
    """Return Student's t, the two-sided quantile at a confidence level, for these degrees of freedom.

    Newton's method from the normal quantile. P(|T| <= t) is concave in t and the normal quantile is smaller,
    so every step approaches the result from below.

    Raises:
        FormulaError: there is no degree of freedom, or the level is not between 0 and 1.
    """
    if freedom < 1 or not 0 < level < 1:
        raise FormulaError(
            f"student_t: {freedom} degrees of freedom, level {level}",
            why="freedom must be at least 1, and level between 0 and 1",
        )
    log_peak = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    found, step = NormalDist().inv_cdf((1 + level) / 2), math.inf
    while abs(step) > 1e-9 * found:
        density = 2 * math.exp(log_peak - (freedom + 1) / 2 * math.log1p(found * found / freedom))
        step = (level - _student_within(found, freedom)) / density
        found += step
    return found


def _student_within(t: float, freedom: int) -> float:
    """Return P(|T| <= t) as a sum (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3, 4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square, is_odd = math.sin(angle), math.cos(angle) ** 2, freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for place in range(1, (freedom - is_odd) // 2):
        term *= square * (2 * place - 1 + is_odd) / (2 * place + is_odd)
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def half_width(values: Sequence[float]) -> float:
    """Return half of Student's 95% interval of a mean: t s / sqrt(n), s and t of n - 1 degrees of freedom.

    Raises:
        FormulaError: there are fewer than two values.
    """
    return student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def mean_interval(
    values: Sequence[float], possible: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float] | None:
    """Return Student's 95% interval (low, high) of a mean: mean -+ ``half_width``.

    None if the values do not differ, because the error of their mean is then unknown.

    Args:
        values: independent values, such as one per prompt.
        possible: range of every value; the interval ends at its bounds.
    """
    if len(set(values)) < 2:
        return None
    mean, half = fmean(values), half_width(values)
    return max(possible[0], mean - half), min(possible[1], mean + half)


def observed_range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range for the interval of a mean: 0 to 1 if all values lie there, else that of the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def calibration_error(likely: Sequence[float], bins: int = 10) -> float:
    """Return the expected calibration error (ECE, 0 to 1) of probabilities that better answers are better.

    A pair's confidence is max(p, 1 - p); it is right if p > 1/2 (half right at 1/2). Pairs are put into equal
    bins of confidence from 1/2 to 1; the result is sum over bins of n_bin / n x |right - confidence|
    (M. P. Naeini and others, AAAI 2015).

    Args:
        likely: probability p for each pair that the better answer is better.
        bins: number of bins.

    Raises:
        FormulaError: there is no pair, or a value is not a probability.
    """
    if not likely or not all(0 <= each <= 1 for each in likely):
        raise FormulaError(
            f"calibration_error: {len(likely)} values, not all of them between 0 and 1",
            why="it needs at least one probability, and only probabilities",
        )
    sums: dict[int, float] = {}
    for each in likely:
        sure = max(each, 1 - each)
        place = min(int((sure - 0.5) * 2 * bins), bins - 1)
        right = 0.5 if each == 0.5 else float(each > 0.5)
        sums[place] = sums.get(place, 0.0) + right - sure
    return sum(map(abs, sums.values())) / len(likely)
