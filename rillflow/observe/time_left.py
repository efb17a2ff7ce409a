"""How long a run still takes, from what its steps took lately.

The median of the last steps of a phase, times the steps it has left: one slow step (a compilation, a
checkpoint, a busy machine) does not move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

WINDOW = 21
"""Steps of a phase that are looked back on."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time left."""

    seconds: float
    """Of every phase whose steps have been timed."""
    is_complete: bool
    """False while a phase is ahead that has not made a step: the time is then a lower bound."""


class TimeLeft:
    """Follows the steps of phases that come one after the other.

    Example:
        left = TimeLeft({"sft": 350, "grpo": 60})
        left.observe("sft", 1, seconds=0.1)
        left.estimate() == Estimate(seconds=34.9, is_complete=False)

    Args:
        total_steps: the steps of every phase, in order. A step's number counts from 1 over all phases.
    """

    def __init__(self, total_steps: Mapping[str, int]) -> None:
        self.total_steps = dict(total_steps)
        self._recent: dict[str, deque[float]] = {phase: deque(maxlen=WINDOW) for phase in total_steps}
        self._step = 0

    def observe(self, phase: str, step: int, seconds: float) -> None:
        """A step of a phase ended after ``seconds``."""
        self._recent[phase].append(seconds)
        self._step = step

    def done(self, phase: str) -> int:
        """Steps of the phase that are over, those before a resume included."""
        before = 0
        for name, total in self.total_steps.items():
            if name == phase:
                return min(max(self._step - before, 0), total)
            before += total
        raise KeyError(phase)

    def of_phase(self, phase: str) -> float | None:
        """Seconds that a phase still takes; None when it has steps left and none was timed."""
        left = self.total_steps[phase] - self.done(phase)
        recent = self._recent[phase]
        return left * median(recent) if recent else None if left else 0.0

    def estimate(self) -> Estimate:
        """Seconds until the last step of the last phase."""
        known = [self.of_phase(phase) for phase in self.total_steps]
        return Estimate(
            seconds=sum(time for time in known if time is not None), is_complete=None not in known
        )
