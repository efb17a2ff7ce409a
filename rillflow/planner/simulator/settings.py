"""Settings: what a simulation assumes beside the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rillflow.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How weights arrive, how lengths of a prompt's rows belong together, and which devices are slow.

    Example:
        Settings(interrupts=True, crossing="hidden", straggler_share=0.05, straggler_factor=1.5)
    """

    interrupts: bool | None = None
    """Whether new weights interrupt rows, which go on under them once their prefixes are read again; else a
    replica ends what it runs first; None: as the engine of the cluster does."""
    crossing: Literal["exposed", "hidden"] = "exposed"
    """Whether both sides stand still while weights travel, or work on beside it."""
    shared_length: float = 0.0
    """The share of the variance of log lengths that the rows of a prompt have in common, 0 to 1."""
    straggler_share: float = 0.0
    """The share of devices that are slow; which ones follows from the seed."""
    straggler_factor: float = 1.0
    """How many times as long a slow device takes."""

    def __post_init__(self) -> None:
        for name, value in (("shared_length", self.shared_length), ("straggler_share", self.straggler_share)):
            if not 0.0 <= value <= 1.0:
                raise PlanError(f"{name} is {value:g}", why="a share lies between 0 and 1")
        if not 1.0 <= self.straggler_factor <= 1e6:
            raise PlanError(
                f"straggler_factor is {self.straggler_factor:g}",
                why="a slow device takes at least as long as the others",
                fix="give 1.5 for one that takes half as long again",
            )
