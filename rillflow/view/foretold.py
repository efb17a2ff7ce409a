"""Foretold: simulate steps of a run from its own stage times and show them next to the measured steps.

Foretold ─┬─ lines of text: predicted seconds of a step, measured ones, the difference
          └─ bars on the lanes and the axis of the measured ones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from rillflow.planner.simulator.result import Simulation
from rillflow.view.columns import seconds
from rillflow.view.measured import Measured, measured_bars
from rillflow.view.predicted import steps_s
from rillflow.view.run_data import RunData
from rillflow.view.timeline import MOST_LANES, Bar

MOST_FORETOLD = 8
"""Largest number of simulated steps: the last ones of the steps shown."""
LANE = "predicted"
"""Name of the lane with a pool's predicted bars."""


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Simulated steps of a run."""

    first: int
    """First simulated step, as numbered in the run."""
    steps_s: Sequence[float]
    """Predicted seconds of each step."""
    simulation: Simulation
    """The simulation, including the warm-up steps before ``first`` that fill its queues."""
    before: int
    """Number of warm-up steps in the simulation."""


Foretell: TypeAlias = Callable[[RunData, int, int], Foretold | str]
"""Function that simulates the first to the last step of a run, or returns the reason why it cannot."""


def foretold_lines(data: RunData, found: Foretold | str) -> list[str]:
    """Return predicted and measured seconds of a step as lines, or the reason for a missing prediction."""
    if isinstance(found, str):
        return [f"not predicted: {found}"]
    last = found.first + len(found.steps_s) - 1
    predicted, measured = fmean(found.steps_s), fmean(steps_s(data, found.first, last))
    which = f"step {last:,}" if last == found.first else f"steps {found.first:,} to {last:,}"
    error = f" ({predicted / measured - 1:+.0%})" if measured else ""
    return [
        f"{which}: the simulator predicts {seconds(predicted)} a step, measured {seconds(measured)}{error}",
        "  simulated from the stages' measured seconds and rows, without the time outside stages",
    ]


def bars_beside(shown: Measured, found: Foretold | str) -> list[Bar]:
    """Return the measured bars, and the predicted bars on an extra lane per pool, aligned at the same
    start.
    """
    bars = measured_bars(shown)
    if isinstance(found, str):
        return bars
    homes = {work.stage: work.on.pool for work in shown.works}
    spans = found.simulation.spans
    begun_s = min(span.start_s for span in spans if span.step == found.before + 1 and span.cause is None)
    moved_s = min(work.start_s for work in shown.works if work.step == found.first) - begun_s
    foretold = [
        Bar(
            pool=pool,
            lane=f"{LANE} {span.lane}" if span.lane > 1 else LANE,
            stage=span.stage if span.cause is None else str(span.cause),
            start_s=max(span.start_s + moved_s, shown.start_s),
            end_s=span.end_s + moved_s,
            step=found.first + span.step - found.before - 1 if span.cause is None else 0,
            is_idle=span.cause is not None,
        )
        for span in spans
        if (pool := span.pool or homes.get(span.stage, "")) and span.lane <= MOST_LANES
        if span.end_s + moved_s > shown.start_s
    ]
    return sorted(
        (*bars, *foretold), key=lambda bar: (bar.pool, bar.lane.startswith(LANE), bar.lane, bar.start_s)
    )
