"""Foretold: steps of a run as the simulator has them from the run's own stages, beside what was measured.

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
"""Steps that are simulated: the last ones of those that are shown."""
LANE = "predicted"
"""The lane of a pool's predicted bars."""


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Some steps of a run, simulated."""

    first: int
    """The first of them."""
    steps_s: Sequence[float]
    """Seconds of each."""
    simulation: Simulation
    """The simulated steps, with as many before them as fill it."""
    before: int
    """How many those are."""


Foretell: TypeAlias = Callable[[RunData, int, int], Foretold | str]
"""Simulates steps of a run, from the first to the last; or says why it cannot."""


def foretold_lines(data: RunData, found: Foretold | str) -> list[str]:
    """Predicted seconds of a step beside the measured ones; or why there are none."""
    if isinstance(found, str):
        return [f"not predicted: {found}"]
    last = found.first + len(found.steps_s) - 1
    predicted, measured = fmean(found.steps_s), fmean(steps_s(data, found.first, last))
    which = f"step {last:,}" if last == found.first else f"steps {found.first:,} to {last:,}"
    error = f" ({predicted / measured - 1:+.0%})" if measured else ""
    return [
        f"{which}: the simulator predicts {seconds(predicted)} a step, measured {seconds(measured)}{error}",
        "  from these stages' own seconds and rows; calls, records and all else beside stages are left out",
    ]


def bars_beside(shown: Measured, found: Foretold | str) -> list[Bar]:
    """The measured bars, and on a further lane of every pool the predicted ones, from the same beginning."""
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
