"""Time left in a run, estimated from its recent steps.

The estimate is the median of a phase's last steps, times its remaining steps. A single slow step (a
compilation, a checkpoint, a busy machine) does not move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

WINDOW = 21
"""Number of recent steps of a phase in the median."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time left."""

    seconds: float
    """Seconds left in all phases with timed steps."""
    is_complete: bool
    """False if a remaining phase has no timed step; the seconds are then a lower bound."""


class TimeLeft:
    """Follows the steps of consecutive phases.

    Example:
        left = TimeLeft({"sft": 350, "grpo": 60})
        left.observe("sft", 1, seconds=0.1)
        left.estimate() == Estimate(seconds=34.9, is_complete=False)

    Args:
        total_steps: number of steps of every phase, in order. A step's number counts from 1 over all phases.
    """

    def __init__(self, total_steps: Mapping[str, int]) -> None:
        self.total_steps = dict(total_steps)
        self._recent: dict[str, deque[float]] = {phase: deque(maxlen=WINDOW) for phase in total_steps}
        self._step = 0

    def observe(self, phase: str, step: int, seconds: float) -> None:
        """Record that a step of a phase took ``seconds``."""
        self._recent[phase].append(seconds)
        self._step = step

    def done(self, phase: str) -> int:
        """Return the number of completed steps of the phase, including those before a resume."""
        before = 0
        for name, total in self.total_steps.items():
            if name == phase:
                return min(max(self._step - before, 0), total)
            before += total
        raise KeyError(phase)

    def of_phase(self, phase: str) -> float | None:
        """Return the seconds left in a phase; None if it has steps left and no timed step."""
        left = self.total_steps[phase] - self.done(phase)
        recent = self._recent[phase]
        return left * median(recent) if recent else None if left else 0.0

    def estimate(self) -> Estimate:
        """Return the seconds until the last step of the last phase."""
        known = [self.of_phase(phase) for phase in self.total_steps]
        return Estimate(
            seconds=sum(time for time in known if time is not None), is_complete=None not in known
        )
