"""Median: the median stopping rule for runs that are evaluated while they train.

A run is stopped at step s if the best of its results up to s is below the median, over the other runs, of the
mean of their results up to s (Golovin and others, "Google Vizier", KDD 2017, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rillflow_parts.sweeps.config import MedianConfig


@dataclass(frozen=True, kw_only=True)
class Result:
    """A held-out result."""

    step: int
    """Step after which it was measured, from 1 on."""
    value: float
    """Accuracy or mean reward; larger is better."""


def below_median(own: Sequence[Result], others: Sequence[Sequence[Result]], rule: MedianConfig) -> str:
    """Return why a run is to be stopped; empty if it goes on.

    Args:
        own: results of the run, in order.
        others: results of every other run of the sweep, stopped and finished ones too.
        rule: when the rule applies.
    """
    if not own or own[-1].step < rule.after:
        return ""
    step = own[-1].step
    means = [
        fmean(each.value for each in found if each.step <= step)
        for found in others
        if found and found[0].step <= step <= found[-1].step
    ]
    if len(means) < rule.runs:
        return ""
    best, middle = max(each.value for each in own), median(means)
    if best >= middle:
        return ""
    return f"stopped after step {step}: its best result {best:.3f} is below the median {middle:.3f} of others"
