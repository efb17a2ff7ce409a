"""Option: one way for a unit to lie on devices, and what it then costs; what the mapping chooses among."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rillflow.planner.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Option:
    """A grid for one unit on a number of devices; bytes are those of its fullest device."""

    grid: Grid
    """How the devices share the model in training and scoring."""
    generate_tp: int
    """Devices that share one copy while they generate; 0 of a unit that does not."""
    seconds: Mapping[int, float]
    """By stage of the unit, all but those that generate."""
    resident_bytes: float
    """Weights, gradients and optimiser, kept from step to step."""
    working_bytes: float
    """The most a stage needs beside, the cache of generation not counted."""
    sampling_bytes: float
    """What the copy for generation takes beside what is resident."""

    @property
    def bytes(self) -> float:
        """All of them in sum."""
        return self.resident_bytes + self.working_bytes + self.sampling_bytes


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a unit lies: enough to say what a transfer from or to it costs."""

    pool: str
    """The pool's name."""
    fleet: str
    """Its machines."""
    devices: int
    """Its size."""
    grid: Grid
    """The grid on which its rows are read or written."""
