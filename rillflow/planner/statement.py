"""Statement: what is to be planned, what was assumed of it, and how far off predictions were elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from rillflow.planner.factors import Factors
from rillflow.planner.problem import Problem

UNFITTED = 'default factors, held against no run: like = "nemo-rl" or "verl" names fitted ones'
UNTOLD = "the cluster's file sets factors and does not say what they were fitted to (calibrated = ...)"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A problem, and what nobody said of it."""

    problem: Problem
    """The step, its models and the devices."""
    assumptions: tuple[str, ...]
    """A sentence for each number that was assumed, with what would replace it."""
    steps: int = 0
    """Of the whole run; 0 where nobody said."""

    @property
    def accuracy(self) -> str:
        """What the factors were held against, and what came of it."""
        hardware = self.problem.hardware
        if not hardware.calibrated:
            return UNFITTED if hardware.factors == Factors() else UNTOLD
        told, error = f"factors fitted to {hardware.calibrated}", hardware.accuracy
        if error is None:
            return told
        return (
            f"{told}; on steps left out of the fit the median error is {error.median:.0%}, the worst "
            f"{error.worst:.0%}; the ranges hold eight of ten of them"
        )

    def range_s(self, seconds: float) -> tuple[float, float] | None:
        """Between which eight of ten steps predicted so were; none where nobody measured it."""
        error = self.problem.hardware.accuracy
        return None if error is None else (error.low * seconds, error.high * seconds)
