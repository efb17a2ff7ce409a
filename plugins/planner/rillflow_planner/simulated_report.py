"""Simulated report: simulated steps of a run, for its report and timeline.

SimulatedSteps ─┬─ lines of text: simulated seconds of a step, measured ones, the difference
                └─ bars on extra lanes of the measured steps' timeline
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rillflow.runs.formatting import seconds
from rillflow.runs.report.measured import Measured
from rillflow.runs.report.predicted import steps_s
from rillflow.runs.report.timeline import MOST_LANES, Bar
from rillflow.runs.run_data import RunData
from rillflow_planner.simulator.result import Simulation

MOST_STEPS = 8
"""Largest number of simulated steps: the last ones of the steps shown."""
LANE = "predicted"
"""Name of the lane with a pool's predicted bars."""


@dataclass(frozen=True, kw_only=True)
class NotSimulated:
    """Steps that cannot be simulated."""

    reason: str
    """Why they cannot."""

    def lines(self, data: RunData) -> list[str]:
        """Return the reason."""
        del data
        return [f"not predicted: {self.reason}"]

    def bars(self, shown: Measured) -> list[Bar]:
        """Return no bars."""
        del shown
        return []


@dataclass(frozen=True, kw_only=True)
class SimulatedSteps:
    """Simulated steps of a run."""

    first: int
    """First simulated step, as numbered in the run."""
    steps_s: Sequence[float]
    """Predicted seconds of each step."""
    simulation: Simulation
    """The simulation, including the warm-up steps before ``first`` that fill its queues."""
    before: int
    """Number of warm-up steps in the simulation."""

    def lines(self, data: RunData) -> list[str]:
        """Return predicted and measured seconds of a step."""
        last = self.first + len(self.steps_s) - 1
        predicted, measured = fmean(self.steps_s), fmean(steps_s(data, self.first, last))
        which = f"step {last:,}" if last == self.first else f"steps {self.first:,} to {last:,}"
        error = f" ({predicted / measured - 1:+.0%})" if measured else ""
        return [
            f"{which}: the simulator predicts {seconds(predicted)} a step, "
            f"measured {seconds(measured)}{error}",
            "  simulated from the stages' measured seconds and rows, without the time outside stages",
        ]

    def bars(self, shown: Measured) -> list[Bar]:
        """Return the predicted bars, aligned with the measured ones at the same start."""
        homes = {work.stage: work.on.pool for work in shown.works}
        spans = self.simulation.spans
        begun_s = min(span.start_s for span in spans if span.step == self.before + 1 and span.cause is None)
        moved_s = min(work.start_s for work in shown.works if work.step == self.first) - begun_s
        return [
            Bar(
                pool=pool,
                lane=f"{LANE} {span.lane}" if span.lane > 1 else LANE,
                stage=span.stage if span.cause is None else str(span.cause),
                start_s=max(span.start_s + moved_s, shown.start_s),
                end_s=span.end_s + moved_s,
                step=self.first + span.step - self.before - 1 if span.cause is None else 0,
                is_idle=span.cause is not None,
            )
            for span in spans
            if (pool := span.pool or homes.get(span.stage, "")) and span.lane <= MOST_LANES
            if span.end_s + moved_s > shown.start_s
        ]
