"""Trend: what the values of a training signal say over a phase: a rise, a fall, a collapse or a lost level.

values by step ─ trend_of ─> Trend: level of the first and the last tenth, noise of a step, largest loss

A signal is a reward or a return, where more is better, or a loss, where less is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LEAST_STEPS = 3
"""Number of steps in a tenth, at least; fewer only in runs with less than twice as many steps."""
CLEAR = 3.3
"""A change is clear beyond this many standard errors."""
SURE = 6.0
"""A loss of the best level is sure beyond this many: it is the largest of many."""
FAR = 0.5
"""Share of a level above the floor whose loss is a collapse."""
NARROW = 2
"""Number of steps over which a lost level is measured, so that one odd step is none."""
BEST_STEPS = 10
"""Number of steps that a level before a loss is averaged over, at most."""
FEW_JUMPS = 5
"""With fewer differences of neighbours than this, their noise is also bounded by the number of answers."""
SMALLEST_COST = 0.01
"""Costs below this share of the largest count as that, so that a cost of 0 has a logarithm."""
ALIKE = 2.0
"""Answers to one prompt are alike: their mean has the variance of a mean of this many times fewer answers."""
_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""


@dataclass(frozen=True, kw_only=True)
class LostLevel:
    """The largest loss of a level that the signal had reached."""

    before: float
    """Mean of the steps with the best level before."""
    lowest: float
    """Mean of the worst steps after them."""
    first: int
    """Last step before the loss."""
    last: int
    """First step of the worst steps."""
    is_sudden: bool
    """Whether one step lost at least half of it."""
    has_recovered: bool
    """Whether the run ends with at least half of the lost level back."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Course of one signal."""

    name: str
    """Name in sentences. Example: ``training reward``."""
    is_loss: bool
    """Whether less is better."""
    start: int
    """First step with a value."""
    steps: int
    """Number of steps with a value."""
    window: int
    """Number of first, and of last, steps in the two means."""
    first: float
    """Mean of the first steps."""
    last: float
    """Mean of the last steps."""
    noise: float
    """Standard deviation of a step's value around its neighbours."""
    thirds: float
    """Mean of the last third of the steps less that of the first, as measured."""
    third: int
    """Number of steps in a third; 0 if the start lost its level, so that its third says nothing."""
    largest: LostLevel | None
    """The largest sure loss of a level; None without one."""

    @property
    def gain(self) -> float:
        """Change from the first to the last steps, positive if it is for the better."""
        return self.first - self.last if self.is_loss else self.last - self.first

    @property
    def errors(self) -> float:
        """The gain in standard errors; infinite without noise, 0 without a gain.

        A slow gain is clearer in the thirds of the run than in its tenths; the clearer one counts.
        """
        better = -self.thirds if self.is_loss else self.thirds
        return max(
            _in_errors(self.gain, self.noise, self.window),
            _in_errors(better, self.noise, self.third),
            key=abs,
        )

    @property
    def is_clear_rise(self) -> bool:
        """Whether the gain is clear."""
        return self.errors > CLEAR

    @property
    def is_clear_fall(self) -> bool:
        """Whether it became clearly worse."""
        return self.errors < -CLEAR

    @property
    def has_collapsed(self) -> bool:
        """Whether a level was lost and is not back."""
        return self.largest is not None and not self.largest.has_recovered


def _in_errors(gain: float, noise: float, steps: int) -> float:
    """Return the difference of two means of ``steps`` values each, in standard errors; 0 without steps."""
    if gain == 0 or not steps:
        return 0.0
    return gain / (noise * math.sqrt(2 / steps)) if noise else math.copysign(math.inf, gain)


def trend_of(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    name: str,
    floor: float | None = None,
    top: float | None = None,
    answers: float | None = None,
    is_loss: bool = False,
) -> Trend | None:
    """Return the trend of a signal; None if fewer than two steps have a finite value.

    Args:
        steps: the steps, ascending.
        values: value of each step; those that are not finite are left out.
        name: name in sentences.
        floor: worst possible value of the signal, as far as it is known.
        top: best possible value, as far as it is known.
        answers: number of answers whose mean is a value; None if unknown.
        is_loss: whether less is better.
    """
    y_all = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(y_all)
    at = np.asarray(steps, dtype=np.int64)[is_finite]
    y = -y_all[is_finite] if is_loss else y_all[is_finite]
    if len(y) < 2:
        return None
    window = min(len(y) // 2, max(LEAST_STEPS, round(len(y) / 10)))
    worst = _floor(y, window, floor)
    noise = step_noise(y, worst, top, answers)
    is_cost = bool(y.max() <= 0)
    scaled = _logs(y) if is_cost else y
    sure = SURE * (step_noise(scaled) if is_cost else noise)
    largest = _largest_loss(at, y, window, scaled, sure, worst, -1 if is_loss else 1)
    first, third = y[:window], len(y) // 3
    if largest is not None and largest.first < int(at[window - 1]):  # the start lost its level in these steps
        first, third = y[: max(1, int(np.searchsorted(at, largest.first, "right")))], 0
    sign = -1 if is_loss else 1
    return Trend(
        name=name,
        is_loss=is_loss,
        start=int(at[0]),
        steps=len(y),
        window=window,
        first=sign * float(first.mean()),
        last=sign * float(y[-window:].mean()),
        noise=noise,
        thirds=sign * float(y[-third:].mean() - y[:third].mean()) if third else 0.0,
        third=third,
        largest=largest,
    )


def step_noise(
    values: Floats, floor: float = 0.0, top: float | None = None, answers: float | None = None
) -> float:
    """Return the standard deviation of a step around its neighbours: a robust one, from their differences.

    Equal neighbours say nothing about the noise where a signal is at a bound, so they do not count. With few
    other neighbours, the result is at most the error of a mean of ``answers`` values between ``floor`` and
    ``top`` (M. Bhatia and C. Davis, 2000: their variance is at most (top - mean) (mean - floor)).
    """
    jumps = np.abs(np.diff(values))
    jumps = jumps[jumps > 0]
    if not len(jumps):
        return 0.0
    noise = float(np.median(jumps)) / (_MEDIAN * math.sqrt(2))
    if len(jumps) >= FEW_JUMPS or top is None or not answers:
        return noise
    spread = max((top - value) * (value - floor) for value in values.tolist())
    return min(noise, math.sqrt(max(spread, 0.0) * ALIKE / answers))


def _logs(costs: Floats) -> Floats:
    """Return minus the logarithms of costs [steps]: the noise of a cost shrinks with it."""
    size = np.abs(costs)
    least = max(SMALLEST_COST * float(size.max()), np.finfo(np.float64).tiny)
    logs: Floats = -np.log(np.maximum(size, least))
    return logs


def _floor(y: Floats, window: int, floor: float | None) -> float:
    """Return the value that counts as nothing: the worst one, or 0 if every value is positive.

    Values that are never positive are costs. They have no worst value: twice the start's counts as nothing.
    """
    if y.max() <= 0:
        return 2 * float(y[:window].max())
    least = float(y.min())
    return min(least, 0.0 if floor is None else floor)


def _largest_loss(
    at: npt.NDArray[np.int64], y: Floats, window: int, scaled: Floats, sure: float, floor: float, sign: int
) -> LostLevel | None:
    """Return the largest sure loss of more than ``FAR`` of a level; the level is above ``floor``.

    Args:
        at: [N] steps.
        y: [N] values, where more is better.
        window: number of last steps that show whether the level came back.
        scaled: [N] values with the same noise at every level.
        sure: loss of one scaled value against another that is sure.
        floor: the value that counts as nothing.
        sign: -1 if the signal is minus ``y``.
    """
    most = min(BEST_STEPS, max(window, LEAST_STEPS))
    best, best_scaled, best_count, best_at = -math.inf, 0.0, 1, 0
    found: LostLevel | None = None
    share = FAR
    for start in range(1, len(y) - NARROW + 1):
        count = min(most, start)
        level = float(y[start - count : start].mean())
        if level > best:
            best, best_count, best_at = level, count, start - 1
            best_scaled = float(scaled[start - count : start].mean())
        low = float(y[start : start + NARROW].mean())
        lost, lost_scaled = best - low, best_scaled - float(scaled[start : start + NARROW].mean())
        error = math.sqrt(1 / best_count + 1 / NARROW)
        if best <= floor or lost_scaled <= sure * error or lost <= share * (best - floor):
            continue
        share = lost / (best - floor)
        drops = y[best_at : start + 1]
        found = LostLevel(
            before=sign * best,
            lowest=sign * low,
            first=int(at[best_at]),
            last=int(at[start]),
            is_sudden=bool(np.max(-np.diff(drops)) >= lost / 2),
            has_recovered=bool(y[-window:].mean() - floor > FAR * (best - floor)),
        )
    return found
