"""Prediction: predicted steps of a run that the report and the timeline show next to the measured ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from rillflow.runs.report.measured import Measured
from rillflow.runs.report.timeline import Bar
from rillflow.runs.run_data import RunData


class Prediction(Protocol):
    """Predicted steps of a run."""

    def lines(self, data: RunData) -> list[str]:
        """Return predicted and measured seconds of a step, or the reason for a missing prediction."""
        ...

    def bars(self, shown: Measured) -> list[Bar]:
        """Return the bars on extra lanes of the measured steps' timeline, in its seconds."""
        ...


Predict: TypeAlias = Callable[[RunData, int, int], Prediction]
"""Function that predicts the first to the last step of a run."""


def bars_with(shown: Measured, measured: Sequence[Bar], prediction: Prediction) -> list[Bar]:
    """Return measured and predicted bars, sorted by pool; the predicted lanes come last in each pool."""
    ours = {bar.lane for bar in measured}
    return sorted(
        (*measured, *prediction.bars(shown)),
        key=lambda bar: (bar.pool, bar.lane not in ours, bar.lane, bar.start_s),
    )
